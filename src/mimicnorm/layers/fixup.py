"""Fixup's scalars: a bias before each layer and activation, a multiplier at the end of each residual branch.

Zhang, Dauphin and Ma (2019), rule 3: where BatchNorm has a beta per channel, Fixup has scalars.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.layers.derive import Derived, derive


class FixupScalars(nn.Module):
    """``s * x + b`` with scalars s and b: what stands for a BatchNorm; without s a bias alone.

    Always a fresh tensor, as ``Shift``.
    """

    def __init__(self, bias: Parameter, residual_scale: Parameter | None = None):
        super().__init__()
        self.register_parameter("residual_scale", residual_scale)
        self.scalar_bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, then add."""
        if self.residual_scale is not None:
            x = x * self.residual_scale.to(x.dtype)
        return x + self.scalar_bias.to(x.dtype)


class FixupLayer(Derived):
    """A layer with a scalar bias before it, and a multiplier behind it where it ends a branch by itself.

    Attributes:
        input_bias: Added to the input, shape (1,); None for a layer that reads the network's own input.
        residual_scale: Multiplies the output, shape (1,), or None.
    """

    input_bias: Parameter | None
    residual_scale: Parameter | None

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add, run the layer, multiply."""
        if self.input_bias is not None:
            input = input + self.input_bias.to(input.dtype)
        y = super().forward(input, *args, **kwargs)  # pyrefly: ignore
        return y if self.residual_scale is None else y * self.residual_scale.to(y.dtype)


@functools.cache
def fixup_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a layer's class with Fixup's scalars around it."""
    return derive(fixup_class, "Fixup", base, FixupLayer)


def fixup_(layer: nn.Module, input_bias: Parameter | None, residual_scale: Parameter | None = None) -> nn.Module:
    """Put Fixup's scalars around a layer, in place: the same object, the same parameters."""
    layer.__class__ = fixup_class(type(layer))
    layer.register_parameter("input_bias", input_bias)
    layer.register_parameter("residual_scale", residual_scale)
    return layer
