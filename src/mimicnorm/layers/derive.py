"""Subclasses made from the user's own classes, so that ``isinstance`` and identity survive.

A converted layer stays the object it was: only its class changes, to one derived from the class it had. Such classes
have no importable name, so they are pickled as the two classes they are made of.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn import Parameter

from mimicnorm.errors import MimicNormError


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

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which calls this for every module first."""
        raise MimicNormError(
            f"torch.jit.script cannot compile {type(self).__name__}, a layer of a converted network: script the plain "
            "layers that mimicnorm.fold(model.eval()) gives, or use torch.jit.trace"
        )


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
