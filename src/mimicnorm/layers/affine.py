"""What is left of a BatchNorm once it stops normalising: a shift, a scale, its other children."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.layers.derive import Derived, derive


class Shift(nn.Module):
    """``x + beta`` per channel, always a fresh tensor.

    Stands for a BatchNorm that no layer owns. The fresh tensor is the point even when beta is zero:
    an in-place activation after a BatchNorm must not overwrite the skip connection before it. An
    addition saves nothing for the backward pass.
    """

    def __init__(self, beta: Parameter | None, channel_dim: int = 1):
        super().__init__()
        self.register_parameter("bias", beta)
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        """Add beta along the channels."""
        if self.bias is None:
            return x.clone()
        return x + _along(self.bias, x, self.channel_dim).to(x.dtype)

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

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the scalar, add beta along the channels."""
        scale = self.residual_scale if self.factor == 1.0 else self.residual_scale * self.factor
        y = x * scale.to(x.dtype)
        return y if self.bias is None else y + _along(self.bias, x, self.channel_dim).to(x.dtype)

    def extra_repr(self) -> str:
        """Show what is learnt."""
        return "scalar" if self.bias is None else f"scalar, bias {self.bias.numel()}"


class ScaledOutput(Derived):
    """A layer that ends a residual branch but is not centred: its output times a scalar."""

    residual_scale: Parameter

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer, then multiply."""
        y = super().forward(*args, **kwargs)  # pyrefly: ignore
        return y * self.residual_scale.to(y.dtype)


@functools.cache
def scaled_output_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a layer's class that multiplies its own output."""
    return derive(scaled_output_class, "ScaledOutput", base, ScaledOutput)


def scale_output_(layer: nn.Module, residual_scale: Parameter) -> nn.Module:
    """Let a layer multiply its output by a scalar, in place: the same object, the same parameters."""
    layer.__class__ = scaled_output_class(type(layer))
    layer.register_parameter("residual_scale", residual_scale)
    return layer


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


def _along(vector: Tensor, x: Tensor, dim: int) -> Tensor:
    shape = [1] * x.dim()
    shape[dim] = -1
    return torch.reshape(vector, shape)
