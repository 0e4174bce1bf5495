"""A small residual network with BatchNorm, as anybody would write one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a skip connection."""

    def __init__(self, width_in: int, width: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if stride != 1 or width_in != width:
            self.shortcut = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Branch plus skip, then ReLU."""
        skip = x if self.shortcut is None else self.shortcut(x)
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + skip)


def small_resnet(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Three stages for images of 8 to 32 pixels."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Block(16, 16),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


if __name__ == "__main__":
    print(small_resnet()(torch.randn(2, 3, 32, 32)).shape)
