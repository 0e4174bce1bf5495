"""What to do with BatchNorm: one frozen dataclass per method, all applied by the same converter.

A new method is a subclass of ``base.Method`` in a file of its own, and an entry in ``METHODS``.
"""

from __future__ import annotations

import dataclasses

from mimicnorm.errors import MimicNormError, NameNotFoundError
from mimicnorm.methods.base import Method
from mimicnorm.methods.fixup import Fixup, SkipInit
from mimicnorm.methods.mimicnorm import BatchNorm, LastBN, MimicNorm, NoNorm, WeightMean
from mimicnorm.methods.standardised import GroupNormWS, ScaledWS

METHODS: dict[str, type[Method]] = {
    m.name: m for m in (MimicNorm, WeightMean, LastBN, NoNorm, BatchNorm, Fixup, SkipInit, GroupNormWS, ScaledWS)
}


def method(name: str) -> Method:
    """Return a method by its name, with its default settings.

    Example:
        >>> method("nonorm")
        NoNorm(min_fan_in=16, last_norm=False, residual=None, logit_scale='auto')
    """
    key = name.lower().replace("_", "").replace("-", "")
    for known, kind in METHODS.items():
        if known.replace("-", "") == key:
            return kind()
    raise NameNotFoundError(f"unknown method {name!r}.", name, METHODS)


def as_method(value: object) -> Method:
    """Return a method object, given one or its name; else raise an error that says what to pass."""
    if isinstance(value, Method) and hasattr(value, "name"):
        return value
    if isinstance(value, type) and issubclass(value, Method) and value is not Method:
        raise MimicNormError(f"method is the class {value.__name__}; pass an object: {value.__name__}()")
    if isinstance(value, str):
        return method(value)
    known = ", ".join(f"{m.__name__}()" for m in METHODS.values())
    raise MimicNormError(f"method must be one of {known}; got {value!r}")


def settings(m: Method) -> dict:
    """Return the fields of a method, with its name, as plain data."""
    return {"name": m.name, **dataclasses.asdict(m)}


__all__ = [
    "METHODS",
    "BatchNorm",
    "Fixup",
    "GroupNormWS",
    "LastBN",
    "Method",
    "MimicNorm",
    "NoNorm",
    "ScaledWS",
    "SkipInit",
    "WeightMean",
    "as_method",
    "method",
    "settings",
]
