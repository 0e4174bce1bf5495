"""SqueezeNets (Iandola et al. 2016) with BatchNorm after every convolution but the last.

torchvision's have none: their weights load by the same keys, and only those of the norms are missing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mimicnorm.models.parts import scaled

# A number is a Fire module by the channels it squeezes to, "+" one with the simple bypass, M max pooling.
LAYOUTS = {
    "1_0": "M 16 16 32 M 32 48 48 64 M 64",
    "1_1": "M 16 16 M 32 32 M 48 48 64 64",
    "bypass": "M 16 16+ 32 M 32+ 48 48+ 64 M 64",
}


class Fire(nn.Module):
    """Squeeze by 1 x 1, expand by 1 x 1 beside 3 x 3; with a bypass, the input is added."""

    def __init__(self, i: int, squeeze: int, expand: int, bypass: bool):
        super().__init__()
        self.bypass = bypass
        self.squeeze, self.squeeze_norm = nn.Conv2d(i, squeeze, 1), nn.BatchNorm2d(squeeze)
        self.expand1x1, self.expand1x1_norm = nn.Conv2d(squeeze, expand, 1), nn.BatchNorm2d(expand)
        self.expand3x3, self.expand3x3_norm = nn.Conv2d(squeeze, expand, 3, padding=1), nn.BatchNorm2d(expand)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        s = self.relu(self.squeeze_norm(self.squeeze(x)))
        ones = self.relu(self.expand1x1_norm(self.expand1x1(s)))
        threes = self.relu(self.expand3x3_norm(self.expand3x3(s)))
        joined = torch.cat([ones, threes], 1)
        return joined + x if self.bypass else joined


class SqueezeNet(nn.Module):
    """A layout of Fire modules and a convolution that makes the logits, averaged."""

    def __init__(self, layout: str, *, num_classes: int, small: bool, width: float, in_channels: int):
        super().__init__()
        channels = scaled(64 if layout == "1_1" else 96, width)
        kernel, stride, padding = (3, 1, 1) if small else (3 if layout == "1_1" else 7, 2, 0)
        layers: list[nn.Module] = [
            nn.Conv2d(in_channels, channels, kernel, stride, padding),
            nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),  # one place, to keep torchvision's numbers
        ]
        for item in LAYOUTS[layout].split():
            if item == "M":
                layers.append(nn.MaxPool2d(2 if small else 3, 2, ceil_mode=True))
                continue
            squeeze = int(item.removesuffix("+"))
            expand = scaled(4 * squeeze, width)
            layers.append(Fire(channels, scaled(squeeze, width), expand, item.endswith("+")))
            channels = 2 * expand
        self.features = nn.Sequential(*layers)
        head = nn.Conv2d(channels, num_classes, 1)
        if layout == "bypass":
            self.classifier = nn.Sequential(head, nn.AdaptiveAvgPool2d(1))
        else:
            self.classifier = nn.Sequential(nn.Dropout(), head, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x)).flatten(1)
