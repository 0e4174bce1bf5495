"""Small networks, one per pattern that a converter meets."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def conv(i: int, o: int, k: int = 3, **kw) -> nn.Conv2d:
    return nn.Conv2d(i, o, k, padding=k // 2, bias=False, **kw)


def plain(classes: int = 5) -> nn.Sequential:
    """conv-BN-ReLU twice, pooled, linear."""
    return nn.Sequential(
        conv(6, 8),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        conv(8, 8),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, classes),
    )


class Block(nn.Module):
    """Post-activation residual block, in-place throughout."""

    def __init__(self, i: int, o: int):
        super().__init__()
        self.conv1, self.bn1 = conv(i, o), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = conv(o, o), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(conv(i, o, 1), nn.BatchNorm2d(o)) if i != o else None

    def forward(self, x):
        skip = x if self.down is None else self.down(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += skip
        return self.relu(y)


class PreBlock(nn.Module):
    """Pre-activation block: its in-place ReLU would overwrite the skip without a fresh tensor."""

    def __init__(self, c: int):
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c), conv(c, c)
        self.bn2, self.conv2 = nn.BatchNorm2d(c), conv(c, c)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.conv1(self.relu(self.bn1(x)))
        return x + self.conv2(self.relu(self.bn2(y)))


class Residual(nn.Module):
    """A stem, blocks of one kind, a head."""

    def __init__(self, blocks: list[nn.Module], width: int = 16, classes: int = 5):
        super().__init__()
        self.stem = nn.Sequential(conv(3, blocks_in(blocks)), nn.BatchNorm2d(blocks_in(blocks)), nn.ReLU())
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, classes)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def blocks_in(blocks: list[nn.Module]) -> int:
    return next(m for m in blocks[0].modules() if isinstance(m, nn.Conv2d)).in_channels


def resnet(classes: int = 5) -> Residual:
    return Residual([Block(8, 8), Block(8, 16), Block(16, 16)], 16, classes)


def preact(classes: int = 5) -> Residual:
    return Residual([PreBlock(16), PreBlock(16)], 16, classes)


class Dense(nn.Module):
    """Concatenation with pre-activation, as DenseNet."""

    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.BatchNorm2d(8 * n), nn.ReLU(True), conv(8 * n, 8)) for n in (1, 2))
        self.norm, self.fc = nn.BatchNorm2d(24), nn.Linear(24, 5)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.fc(F.relu(self.norm(torch.cat(features, 1))).mean((2, 3)))


class SqueezeExcite(nn.Module):
    """A residual block whose branch is gated; the gate has a BatchNorm of its own."""

    def __init__(self, c: int = 16):
        super().__init__()
        self.stem, self.stem_bn = conv(3, c), nn.BatchNorm2d(c)
        self.conv1, self.bn1 = conv(c, c), nn.BatchNorm2d(c)
        self.fc1, self.fc1_bn, self.fc2 = conv(c, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, c, 1)
        self.head = nn.Linear(c, 5)

    def forward(self, x):
        x = F.relu(self.stem_bn(self.stem(x)))
        y = self.bn1(self.conv1(x))
        gate = self.fc2(F.relu(self.fc1_bn(self.fc1(y.mean((2, 3), keepdim=True)))))
        return self.head(F.relu(x + y * gate.sigmoid()).mean((2, 3)))


class Segmenter(nn.Module):
    """Dense logits, upsampled, in a dict, with an auxiliary head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            conv(3, 16), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 16), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2, bias=False)
        self.up_bn = nn.BatchNorm2d(16)
        self.head, self.aux = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = self.body(x)
        z = F.relu(self.up_bn(self.up(y)))
        aux = F.interpolate(self.aux(y), scale_factor=2, mode="bilinear", align_corners=False)
        return {"out": F.interpolate(self.head(z), size=x.shape[2:]), "aux": aux}


class Mlp(nn.Module):
    """BatchNorm after Linear, on sequences through a flattening, and two heads averaged."""

    def __init__(self):
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64)
        self.fc2, self.bn2 = nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.head, self.head_dist = nn.Linear(64, 3), nn.Linear(64, 3)

    def forward(self, x):
        y = self.fc1(x)
        y = F.relu(self.bn1(y.flatten(0, 1)).view_as(y))
        y = F.relu(self.bn2(self.fc2(y.mean(1))))
        return (self.head(y) + self.head_dist(y)) / 2
