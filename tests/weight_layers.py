"""Layers of every kind that a weight can be changed in, and what autograd saves for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class SamePad(nn.Conv2d):
    """A convolution with a forward of its own, as timm's Conv2dSame."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class ForeignLinear(nn.Module):
    """A linear layer of another package."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return F.linear(x, self.weight, bias=self.bias)


LAYERS = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "conv1d same, uneven": (lambda: nn.Conv1d(4, 6, 4, padding="same"), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), (2, 4, 5, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (2, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 5, 5)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 5, 5)),
    "same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 5, 5)),
    "without batch": (lambda: nn.Conv2d(4, 6, 3), (4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (2, 4, 3, 3)),
    "transposed grouped": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 3, 3)),
    "linear": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "own forward": (lambda: SamePad(4, 6, 2), (2, 4, 5, 5)),
    "foreign": (ForeignLinear, (2, 4, 5)),
}


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def saved_bytes(run, layer: nn.Module, x: torch.Tensor) -> int:
    """What autograd saves beside parameters."""
    parameters = {p.untyped_storage()._cdata for p in layer.parameters()}
    saved: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = (storage.nbytes(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(x)
    assert y.requires_grad
    return sum(n for n, _ in saved.values())
