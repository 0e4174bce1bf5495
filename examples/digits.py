"""1,797 handwritten digits of 8 pixels, inside scikit-learn: what the examples train on."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set, of images (1, 8, 8) and labels."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = (images.float() / 16 - 0.31).div(0.38).reshape(-1, 1, 8, 8)
    return TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of a set that a network classifies correctly, in evaluation mode."""
    model.eval()
    images, labels = data.tensors
    correct = (model(images).argmax(1) == labels).float().mean().item()
    model.train()
    return correct
