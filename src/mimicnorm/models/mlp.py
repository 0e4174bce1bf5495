"""The fully connected network of the paper's theory: equal widths of 300, BatchNorm, ReLU (appendix B.1)."""

from __future__ import annotations

from torch import nn

from mimicnorm.models.parts import scaled


def mlp(depth: int, *, num_classes: int, features: int, width: float) -> nn.Module:
    """Hidden layers of one width and a linear classifier; images are flattened."""
    hidden = scaled(300, width)
    layers: list[nn.Module] = [nn.Flatten()]
    for layer in range(depth):
        layers += [nn.Linear(hidden if layer else features, hidden, bias=False), nn.BatchNorm1d(hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, num_classes))
