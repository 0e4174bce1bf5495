"""ShuffleNetV2 (Ma et al. 2018), keys as in torchvision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mimicnorm.models.parts import scaled

CHANNELS = {
    "x0_5": (48, 96, 192, 1024),
    "x1_0": (116, 232, 464, 1024),
    "x1_5": (176, 352, 704, 1024),
    "x2_0": (244, 488, 976, 2048),
}


def _pointwise(i: int, o: int) -> list[nn.Module]:
    return [nn.Conv2d(i, o, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]


def _depthwise(channels: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False), nn.BatchNorm2d(channels)]


class Unit(nn.Module):
    """Two branches, joined and shuffled; at stride 1 the first is half of the input as it is."""

    def __init__(self, i: int, o: int, stride: int):
        super().__init__()
        half = o // 2
        self.branch1 = nn.Sequential(*_depthwise(i, stride), *_pointwise(i, half)) if stride == 2 else None
        self.branch2 = nn.Sequential(
            *_pointwise(i if stride == 2 else half, half), *_depthwise(half, stride), *_pointwise(half, half)
        )

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.branch1(x), x) if self.branch1 is not None else x.chunk(2, 1)
        joined = torch.cat((first, self.branch2(second)), 1)
        return joined.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleNetV2(nn.Module):
    """Three stages of shuffle units; small images skip the strides of the stem."""

    def __init__(self, size: str, *, num_classes: int, small: bool, width: float, in_channels: int):
        super().__init__()
        *stages, last = (scaled(c, width) for c in CHANNELS[size])
        channels = scaled(24, width)
        stem = nn.Conv2d(in_channels, channels, 3, 1 if small else 2, 1, bias=False)
        self.conv1 = nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        built = []
        for o, repeats in zip(stages, (4, 8, 4), strict=True):
            units = [Unit(channels, o, 2), *(Unit(o, o, 1) for _ in range(repeats - 1))]
            built.append(nn.Sequential(*units))
            channels = o
        self.stage2, self.stage3, self.stage4 = built
        self.conv5 = nn.Sequential(*_pointwise(channels, last))
        self.fc = nn.Linear(last, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage4(self.stage3(self.stage2(self.maxpool(self.conv1(x)))))
        return self.fc(self.conv5(x).mean((2, 3)))
