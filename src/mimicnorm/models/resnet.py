"""ResNets (He et al. 2016) with the stride in the 3 x 3 convolution, keys as in torchvision."""

from __future__ import annotations

from torch import Tensor, nn

from mimicnorm.models.parts import scaled


def _conv(i: int, o: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False)


class _Residual(nn.Module):
    """A branch and a shortcut, added; the shortcut projects where shapes change."""

    expansion = 1
    downsample: nn.Module | None

    def __init__(self, i: int, channels: int, stride: int):
        super().__init__()
        o = channels * self.expansion
        self._branch(i, channels, stride)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(_conv(i, o, 1, stride), nn.BatchNorm2d(o)) if stride != 1 or i != o else None

    def _branch(self, i: int, channels: int, stride: int) -> None:
        raise NotImplementedError

    def branch(self, x: Tensor) -> Tensor:
        """What is added to the shortcut."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.relu(self.branch(x) + shortcut)


class Basic(_Residual):
    """Two 3 x 3 convolutions."""

    def _branch(self, i: int, channels: int, stride: int) -> None:
        self.conv1, self.bn1 = _conv(i, channels, 3, stride), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv(channels, channels, 3), nn.BatchNorm2d(channels)

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))


class Bottleneck(_Residual):
    """1 x 1 down, 3 x 3, 1 x 1 up to four times the channels."""

    expansion = 4

    def _branch(self, i: int, channels: int, stride: int) -> None:
        self.conv1, self.bn1 = _conv(i, channels, 1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = _conv(channels, channels, 3, stride), nn.BatchNorm2d(channels)
        self.conv3, self.bn3 = _conv(channels, 4 * channels, 1), nn.BatchNorm2d(4 * channels)

    def branch(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.bn3(self.conv3(self.relu(self.bn2(self.conv2(x)))))


BLOCKS: dict[str, type[_Residual]] = {"basic": Basic, "bottleneck": Bottleneck}


class ResNet(nn.Module):
    """Four stages of residual blocks; small images skip the strided stem and its pooling."""

    def __init__(
        self, kind: str, depths: tuple[int, ...], *, num_classes: int, small: bool, width: float, in_channels: int
    ):
        super().__init__()
        block = BLOCKS[kind]
        channels = scaled(64, width)
        self.conv1 = _conv(in_channels, channels, 3) if small else _conv(in_channels, channels, 7, 2)
        self.bn1, self.relu = nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        stages = []
        for stage, depth in enumerate(depths):
            inner = scaled(64 * 2**stage, width)
            blocks = []
            for position in range(depth):
                blocks.append(block(channels, inner, 2 if stage and not position else 1))
                channels = inner * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))
