"""Plain PyTorch: a network with BatchNorm, converted, trained on digits.

python examples/plain_pytorch.py --epochs 5

Lines that a BatchNorm script does not have are marked with (+).
"""

from __future__ import annotations

import argparse

import torch
from digits import accuracy, digits
from small_resnet import small_resnet
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mimicnorm as mn  # (+)


def main(epochs: int = 5, batch_size: int = 64, lr: float = 0.1) -> float:
    """Train; return the accuracy on the test set."""
    torch.manual_seed(0)
    train, test = digits()
    loader = DataLoader(train, batch_size, shuffle=True, drop_last=True)

    model = small_resnet(num_classes=10, in_channels=1)
    report = mn.convert_(model, mn.MimicNorm(), example=(2, 1, 8, 8))  # (+) before the optimizer is built
    print(report)

    groups = mn.param_groups(model, weight_decay=5e-4)  # (+) decays all but the logit scale
    optimizer = torch.optim.SGD(groups, lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * len(loader))

    for epoch in range(epochs):
        for images, labels in loader:
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {accuracy(model, test):.3f}")
    return accuracy(model, test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    main(**vars(parser.parse_args()))
