"""Differentially private training (DP-SGD) by Opacus.

python examples/opacus_dp.py --epsilon 8

DP-SGD clips the gradient of each sample, so no sample may see another: convert with ``last_norm=False``.
"""

from __future__ import annotations

import argparse

import torch
from digits import accuracy, digits
from opacus import PrivacyEngine
from small_resnet import small_resnet
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mimicnorm as mn


def main(epsilon: float = 8.0, epochs: int = 10, batch_size: int = 128, lr: float = 0.5) -> tuple[float, float]:
    """Train; return the privacy spent and the accuracy on the test set."""
    torch.manual_seed(0)
    train, test = digits()
    delta = 1e-4  # less than one in the size of the training set

    model = small_resnet(num_classes=10, in_channels=1)
    mn.convert_(model, mn.MimicNorm(last_norm=False), example=(2, 1, 8, 8))
    mn.opacus.prepare_(model)  # samplers for converted layers; in-place activations off

    engine = PrivacyEngine(accountant="rdp")
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr),
        data_loader=DataLoader(train, batch_size),
        target_epsilon=epsilon,
        target_delta=delta,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(private(images), labels).backward()
            optimizer.step()
    spent = engine.get_epsilon(delta)
    print(f"epsilon {spent:.2f} at delta {delta:.0e}, test accuracy {accuracy(model, test):.3f}")
    return spent, accuracy(model, test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.5)
    main(**vars(parser.parse_args()))
