"""VGG networks (Simonyan and Zisserman 2014) with BatchNorm, keys as in torchvision's ``vgg*_bn``."""

from __future__ import annotations

from torch import Tensor, nn

from mimicnorm.models.parts import scaled


class VGG(nn.Module):
    """Convolutions in five groups, each ended by max pooling, and a classifier of three layers with dropout."""

    def __init__(self, depths: tuple[int, ...], *, num_classes: int, small: bool, width: float, in_channels: int):
        super().__init__()
        layers: list[nn.Module] = []
        channels = in_channels
        for depth, base in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                o = scaled(base, width)
                layers += [nn.Conv2d(channels, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
                channels = o
            layers.append(nn.MaxPool2d(2, ceil_mode=small))  # the same at 32 px, and 28 or 8 px keep a pixel
        self.features = nn.Sequential(*layers)
        side, hidden = 1 if small else 7, scaled(4096, width)
        self.avgpool = nn.AdaptiveAvgPool2d(side)
        self.classifier = nn.Sequential(
            *(nn.Linear(channels * side**2, hidden), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout()),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))
