"""A factor and an addend per channel: taken up by the layer before, by the layer after, or a layer of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.errors import DeployError
from mimicnorm.layers.weight import by_output

_DEPTHWISE = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


@dataclass(frozen=True, eq=False)
class Affine:
    """``scale * x + shift``: each a scalar, one number per channel, or None for nothing."""

    scale: Tensor | None
    shift: Tensor | None
    channel_dim: int = 1

    @property
    def is_identity(self) -> bool:
        """Whether nothing is done, except that the output is a new tensor."""
        return self.scale is None and self.shift is None

    @property
    def width(self) -> int:
        """How many channels it tells apart; 1 if all are treated alike."""
        return max((t.numel() for t in (self.scale, self.shift) if t is not None), default=1)


def after(layer: nn.Module, affine: Affine) -> None:
    """Let a layer do to its output channels what an affine map after it does."""
    weight, bias = _wide(layer.weight), _wide(layer.bias)
    rows, dims = by_output(weight, _transposed_groups(layer))
    outputs = [n for d, n in enumerate(rows.shape) if d not in dims]
    bias = weight.new_zeros(outputs).flatten() if bias is None else bias
    if affine.scale is not None:
        scale = _wide(affine.scale).expand(bias.shape)
        weight = (rows * scale.reshape([1 if d in dims else n for d, n in enumerate(rows.shape)])).reshape(weight.shape)
        bias = bias * scale
    if affine.shift is not None:
        bias = bias + _wide(affine.shift)
    set_(layer, weight, bias if layer.bias is not None or affine.shift is not None else None)


def before(layer: nn.Module, affine: Affine) -> None:
    """Let a layer without padding do to its input channels what an affine before it does."""
    weight, bias = _wide(layer.weight), _wide(layer.bias)
    groups = getattr(layer, "groups", 1)
    inputs = weight.shape[1] * groups
    # The input channels of each output: those of its group.
    grouped = weight.unflatten(0, (groups, -1))  # (groups, out / groups, in / groups, *kernel)
    along = (groups, 1, -1, *[1] * (weight.dim() - 2))
    if affine.shift is not None:
        shift = _wide(affine.shift).expand(inputs).reshape(along)
        added = (grouped * shift).flatten(2).sum(2).flatten()
        bias = added if bias is None else bias + added
    if affine.scale is not None:
        weight = (grouped * _wide(affine.scale).expand(inputs).reshape(along)).flatten(0, 1)
    set_(layer, weight, bias)


def set_(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a layer parameters of these values; type, memory format and whether they train stay as they are."""
    like: Any = layer.weight
    layout = torch.channels_last if like.dim() == 4 and _is_channels_last(like) else torch.contiguous_format
    trains = like.requires_grad
    # New objects: they may be tied to those of another layer.
    layer.register_parameter("weight", Parameter(weight.to(like.dtype, memory_format=layout, copy=True), trains))
    layer.register_parameter("bias", None if bias is None else Parameter(bias.to(like.dtype, copy=True), trains))


def standalone(affine: Affine, shape: torch.Size, beside: nn.Module, name: str) -> nn.Module:
    """Make the plain layer that does what an affine does to a tensor of some shape; type and device from ``beside``.

    A depthwise 1x1 convolution; for single vectors between two reshapes; for channels in the last of several
    dimensions, which no convolution takes, a ``nn.Linear`` whose matrix is diagonal.
    """
    like = next(beside.parameters())
    rank, dim = len(shape), affine.channel_dim % len(shape)
    channels = shape[dim]
    factory: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    scale = like.new_ones(channels) if affine.scale is None else affine.scale.expand(channels)
    bias = affine.shift is not None
    layer: nn.Module
    if dim == 1 and rank in (2, *_DEPTHWISE):
        kind = _DEPTHWISE[max(rank, 3)]
        layer = kind(channels, channels, 1, groups=channels, bias=bias, **factory)
        weight = scale.reshape(layer.weight.shape)
    elif dim == rank - 1:
        layer = nn.Linear(channels, channels, bias=bias, **factory)
        weight = torch.diag(scale)
    else:
        raise DeployError(
            f"{name}: no layer of torch.nn scales dimension {dim} of a tensor of shape {tuple(shape)}. Convert with "
            "where= such that its BatchNorm stays"
        )
    set_(layer, weight, None if affine.shift is None else affine.shift.expand(channels))
    return nn.Sequential(nn.Unflatten(1, (channels, 1)), layer, nn.Flatten(1)) if rank == 2 else layer


def _transposed_groups(layer: Any) -> int | None:
    return layer.groups if getattr(layer, "transposed", False) else None


def _is_channels_last(weight: Tensor) -> bool:
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _wide(t: Any) -> Any:
    return None if t is None else t.detach().double()
