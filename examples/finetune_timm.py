"""Fine-tune a trained network of timm without its BatchNorms, with batches of four.

python examples/finetune_timm.py --model resnet18 --pretrained

Without ``--pretrained`` nothing is downloaded: a random network that has seen some digits stands for the checkpoint.
"""

from __future__ import annotations

import argparse

import timm
import torch
from digits import accuracy, digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import mimicnorm as mn


def trained(name: str, pretrained: bool) -> nn.Module:
    """A network with BatchNorm whose statistics are set, and a fresh head for ten digits."""
    model = timm.create_model(name, pretrained=pretrained, in_chans=1)
    if not pretrained:
        for images, _ in DataLoader(digits()[0], 64):
            model(images)  # in training mode: moves the running statistics
    model.reset_classifier(10)
    return model


def main(model: str = "test_resnet", pretrained: bool = False, steps: int = 200, lr: float = 0.001) -> float:
    """Fine-tune; return the accuracy on the test set."""
    torch.manual_seed(0)
    train, test = digits()
    net = trained(model, pretrained)
    images, _ = test.tensors
    before = net.eval()(images[:8]).detach()

    mn.convert_(net, mn.MimicNorm(), example=(2, 1, 8, 8), init="keep")  # after loading weights, after the new head
    difference = (net(images[:8]) - before).abs().max().item()
    print(f"outputs of the converted network differ from the original's by at most {difference:.1e}")

    net.train()  # computes the same as in evaluation mode: no batch statistics are left
    optimizer = torch.optim.AdamW(net.parameters(), lr)
    loader = DataLoader(train, batch_size=4, shuffle=True)
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    print(f"test accuracy after {steps} steps: {accuracy(net, test):.3f}")
    return accuracy(net, test)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="test_resnet", help="any timm network with BatchNorm")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.001)
    main(**vars(parser.parse_args()))
