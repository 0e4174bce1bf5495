"""Subclasses made from the user's own classes, so that ``isinstance`` and identity survive.

A converted layer stays the object it was: only its class changes, to one derived from the
class it had. Such classes have no importable name, so pickling goes through the factory
that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Derived:
    """Mixin of every class made by a factory; knows how to be pickled and copied.

    Attributes:
        base: The class it was derived from.
        factory: The module-level function that derives it: ``factory(base)`` is this class.
    """

    base: type[nn.Module]
    factory: Callable[[type[nn.Module]], type[nn.Module]]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Rebuild through the factory: the class itself cannot be imported by name."""
        cls = type(self)
        return _blank, (cls.factory, cls.base), self.__getstate__()


def derive(factory: Callable, prefix: str, base: type[nn.Module], *mixins: type) -> type[nn.Module]:
    """Make the class ``(*mixins, base)`` for a factory; the name shows both."""
    members = {
        "__module__": mixins[0].__module__,
        "__doc__": mixins[0].__doc__,
        "base": base,
        "factory": staticmethod(factory),
    }
    return type(f"{prefix}{base.__name__}", (*mixins, base), members)


def _blank(factory: Callable, base: type[nn.Module]) -> nn.Module:
    cls = factory(base)
    return cls.__new__(cls)
