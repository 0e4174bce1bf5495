"""What stands in a BatchNorm's place: a shift, a scale, Fixup's scalars, a GroupNorm, its other children."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import Parameter

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Shift(nn.Module):
    """``x + beta`` per channel, always a fresh tensor.

    Stands for a BatchNorm whose beta no layer takes. The tensor is fresh even without beta: an in-place activation
    after a BatchNorm must not overwrite the skip connection before it. An addition saves nothing for backward.
    """

    def __init__(self, beta: Parameter | None, channel_dim: int = 1):
        super().__init__()
        self.register_parameter("bias", beta)
        self.channel_dim = channel_dim

    def as_affine(self) -> tuple[Tensor | None, Tensor | None]:
        """See ``deploy.fold``: factor and addend, each a scalar, one number per channel, or None."""
        return None, self.bias

    def forward(self, x: Tensor) -> Tensor:
        """Add beta along the channels."""
        if self.bias is None:
            return laid_out(x.clone())
        return laid_out(x + _along(self.bias, x, self.channel_dim).to(x.dtype))

    def extra_repr(self) -> str:
        """Show the width."""
        return "no bias" if self.bias is None else f"{self.bias.numel()}"


class Scale(nn.Module):
    """``s * x + beta``: the scalar of a residual branch whose end cannot be folded into a layer.

    With a fixed factor beside it, ``factor * s * x + beta``.
    """

    def __init__(self, value: Tensor, beta: Parameter | None = None, channel_dim: int = 1, factor: float = 1.0):
        super().__init__()
        self.residual_scale = value if isinstance(value, Parameter) else Parameter(value.reshape(1))
        self.register_parameter("bias", beta)
        self.channel_dim, self.factor = channel_dim, factor

    def as_affine(self) -> tuple[Tensor, Tensor | None]:
        """As ``Shift.as_affine``."""
        scale = self.residual_scale if self.factor == 1.0 else self.residual_scale * self.factor
        return scale, self.bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the scalar, add beta along the channels."""
        scale, _ = self.as_affine()
        y = x * scale.to(x.dtype)
        return laid_out(y if self.bias is None else y + _along(self.bias, x, self.channel_dim).to(x.dtype))

    def extra_repr(self) -> str:
        """Show what is learnt."""
        return "scalar" if self.bias is None else f"scalar, bias {self.bias.numel()}"


class FixupScalars(nn.Module):
    """``s * x + b`` with scalars s and b (Zhang, Dauphin and Ma 2019); without s a bias alone.

    Always a fresh tensor, as ``Shift``.
    """

    def __init__(self, bias: Parameter, residual_scale: Parameter | None = None):
        super().__init__()
        self.register_parameter("residual_scale", residual_scale)
        self.scalar_bias = bias

    def as_affine(self) -> tuple[Tensor | None, Tensor | None]:
        """As ``Shift.as_affine``."""
        return self.residual_scale, self.scalar_bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, then add."""
        if self.residual_scale is not None:
            x = x * self.residual_scale.to(x.dtype)
        return laid_out(x + self.scalar_bias.to(x.dtype))


class GroupNorm(nn.GroupNorm):
    """``nn.GroupNorm`` (Wu and He 2018) with given gamma and beta, or none, and its channels along any dimension."""

    def __init__(
        self,
        groups: int,
        channels: int,
        gamma: Parameter | None,
        beta: Parameter | None,
        channel_dim: int = 1,
        eps: float = 1e-5,
    ):
        super().__init__(groups, channels, eps, affine=False)
        self.affine = gamma is not None
        self.register_parameter("weight", gamma)
        self.register_parameter("bias", beta)
        self.channel_dim = channel_dim

    def forward(self, input: Tensor) -> Tensor:
        """Normalise each sample's groups of channels."""
        if self.channel_dim == 1 or input.dim() == 2:
            return super().forward(input)
        return super().forward(input.movedim(self.channel_dim, 1)).movedim(1, self.channel_dim)


def group_count(channels: int, positions: int, most: int) -> int:
    """Choose the number of groups: the largest divisor up to ``most`` that leaves 16 values or more to a group.

    Fewer values say nothing once normalised (of two, only the sign of their difference): a BatchNorm on single
    vectors gets fewer groups, down to one.

    Example:
        >>> group_count(64, 49, 32), group_count(24, 49, 32), group_count(64, 1, 32), group_count(8, 1, 32)
        (32, 24, 4, 1)
    """
    fitting = (g for g in range(min(most, channels), 0, -1) if channels % g == 0)
    return next((g for g in fitting if channels // g * positions >= 16), 1)


class Remains(nn.Module):
    """The children of a BatchNorm that did more than normalise (dropout, activation), in their order.

    Children keep their names, hence their state-dict keys.
    """

    def __init__(self, first: nn.Module | None, children: dict[str, nn.Module]):
        super().__init__()
        if first is not None:
            self.add_module("instead", first)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        """Run what is left, in order."""
        for child in self.children():
            x = child(x)
        return x


def laid_out(y: Tensor) -> Tensor:
    """Return a fresh tensor in the memory format of a BatchNorm's output: channels last, or else contiguous.

    Arithmetic keeps the strides of a permuted tensor, a BatchNorm does not: code after it may call ``view``. Where the
    format is right already, as it nearly always is, nothing is copied.

    Example:
        >>> laid_out(torch.ones(2, 6, 3).transpose(1, 2)).stride(), laid_out(torch.ones(2, 6, 3)).stride()
        ((18, 6, 1), (18, 3, 1))
    """
    return y if y.is_contiguous() or _is_channels_last(y) else y.contiguous()


def _is_channels_last(y: Tensor) -> bool:
    if y.dim() not in _CHANNELS_LAST:
        return False
    if torch._C._are_functorch_transforms_active():  # vmap knows one format only
        return y.movedim(1, -1).is_contiguous()
    return y.is_contiguous(memory_format=_CHANNELS_LAST[y.dim()])


def _along(vector: Tensor, x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.reshape(vector, shape)
