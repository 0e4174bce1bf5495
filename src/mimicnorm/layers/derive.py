"""Subclasses made from the user's own classes, so that ``isinstance`` and identity survive.

A converted layer stays the object it was: only its class changes, to one derived from the class it had. Such classes
have no importable name, so they are pickled as the two classes they are made of.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter


class Derived:
    """Base of every mixin that ``derived_class`` combines with a user's class.

    Attributes:
        base: The user's class.
        mixin: What was put before it.
    """

    base: type[nn.Module]
    mixin: type[Derived]

    def __init_subclass__(cls, **kwargs: Any):
        """Skip the user's hook for a derived class: it may demand keywords, or register the class as one more."""
        if "base" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    @classmethod
    def bases(cls, base: type[nn.Module]) -> tuple[type, ...]:
        """The bases of this mixin's class derived from ``base``."""
        return cls, base

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Rebuild from mixins and base: the class itself cannot be imported by name."""
        base: Any = type(self)
        mixins = []
        while "mixin" in base.__dict__:
            mixins.append(base.mixin)
            base = base.base
        return _blank, (mixins, base), self.__getstate__()


@functools.cache
def derived_class(mixin: type[Derived], base: type[nn.Module]) -> type[nn.Module]:
    """Make the subclass of a user's class that behaves as the mixin says; the name shows both."""
    members = {"__module__": mixin.__module__, "__doc__": mixin.__doc__, "base": base, "mixin": mixin}
    name = mixin.__name__.removesuffix("Layer") + base.__name__
    return type(name, mixin.bases(base), members)


def derive_(layer: nn.Module, mixin: type[Derived], **parameters: Parameter | None) -> nn.Module:
    """Change a layer's class to the mixin's, in place, and give it the parameters that the mixin adds."""
    layer.__class__ = derived_class(mixin, type(layer))
    for name, parameter in parameters.items():
        layer.register_parameter(name, parameter)
    return layer


def _blank(mixins: list[type[Derived]], base: type[nn.Module]) -> nn.Module:
    for mixin in reversed(mixins):
        base = derived_class(mixin, base)
    return base.__new__(base)


class FixupLayer(Derived):
    """A layer with a scalar bias before it, and a multiplier behind it where it ends a branch by itself.

    Zhang, Dauphin and Ma (2019), rule 3: where BatchNorm has a beta per channel, Fixup has scalars.

    Attributes:
        input_bias: Added to the input, shape (1,); None for a layer that reads the network's input.
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


def fixup_(layer: nn.Module, input_bias: Parameter | None, residual_scale: Parameter | None = None) -> nn.Module:
    """Put Fixup's scalars around a layer, in place: the same object, the same parameters."""
    return derive_(layer, FixupLayer, input_bias=input_bias, residual_scale=residual_scale)


class ScaledOutput(Derived):
    """A layer that ends a residual branch but is not centred: its output times a scalar."""

    residual_scale: Parameter

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer, then multiply."""
        y = super().forward(*args, **kwargs)  # pyrefly: ignore
        return y * self.residual_scale.to(y.dtype)


def scale_output_(layer: nn.Module, residual_scale: Parameter) -> nn.Module:
    """Let a layer multiply its output by a scalar, in place: the same object, the same parameters."""
    return derive_(layer, ScaledOutput, residual_scale=residual_scale)
