"""What the networks share: scaled widths and initial weights."""

from __future__ import annotations

import math

from torch import nn


def scaled(channels: int, width: float) -> int:
    """Channels times a width, to the nearest multiple of 8 (at least 8); as they are at width 1.

    Example:
        >>> scaled(58, 1.0), scaled(64, 0.25), scaled(116, 0.25)
        (58, 16, 32)
    """
    return channels if width == 1 else max(8, round(channels * width / 8) * 8)


def draw_weights(model: nn.Module) -> None:
    """Draw N(0, 2 / fan-in) for every convolution and linear layer and set their biases to 0, as the authors do."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=math.sqrt(2 / module.weight[0].numel()))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
