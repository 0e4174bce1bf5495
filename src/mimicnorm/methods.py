"""What to do with BatchNorm: one frozen dataclass per method, all applied by the same converter.

Example:
    >>> MimicNorm(residual="linear").name
    'mimicnorm'
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import ClassVar, Literal

from mimicnorm.errors import MimicNormError, NameNotFoundError

Residual = Literal["sqrt", "linear"] | None


@dataclass(frozen=True, kw_only=True)
class Method:
    """What the converter reads of a method. Use one of the subclasses.

    Attributes:
        removes_norm: Whether BatchNorms are taken out at all.
        centres: Whether owners get weight mean.
    """

    name: ClassVar[str]
    removes_norm: ClassVar[bool] = True
    centres: ClassVar[bool] = False

    residual: Residual = None
    """Start of the scalar that ends a residual branch: "sqrt" is 1/sqrt(v) (the paper), "linear" is 1/v, None is
    no scalar. v is the variance predicted there: l in the l-th block of a ResNet."""
    min_fan_in: int = 50
    """Layers with this many inputs or fewer are not centred: too few weights to take a mean of."""
    last_norm: bool = False
    """Put an affine-free BatchNorm on the logits."""

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.residual not in ("sqrt", "linear", None):
            raise MimicNormError(f'{type(self).__name__}: residual={self.residual!r}; use "sqrt", "linear" or None')
        if not isinstance(self.last_norm, bool):
            raise MimicNormError(f"{type(self).__name__}: last_norm={self.last_norm!r}; use True or False")
        if type(self.min_fan_in) is not int or self.min_fan_in < 1:
            raise MimicNormError(f"{type(self).__name__}: min_fan_in={self.min_fan_in!r}; use a whole number from 1 on")

    def branch_scale(self, v: float) -> float | None:
        """The scalar a residual branch starts with where the predicted variance is ``v``."""
        if self.residual is None:
            return None
        return v**-0.5 if self.residual == "sqrt" else 1.0 / v


@dataclass(frozen=True, kw_only=True)
class MimicNorm(Method):
    """Weight mean, residual scalars and the last BN: the paper's method whole."""

    name = "mimicnorm"
    centres = True
    residual: Residual = "sqrt"
    last_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightMean(Method):
    """MimicNorm without its last BN: the paper's first ablation."""

    name = "weight-mean"
    centres = True
    residual: Residual = "sqrt"


@dataclass(frozen=True, kw_only=True)
class LastBN(Method):
    """No norm but the last BN on the logits: the paper's second ablation."""

    name = "last-bn"
    last_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class NoNorm(Method):
    """BatchNorm taken out and nothing put in."""

    name = "nonorm"


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Method):
    """The network as it is: the baseline of every comparison."""

    name = "batchnorm"
    removes_norm = False


METHODS: dict[str, type[Method]] = {m.name: m for m in (MimicNorm, WeightMean, LastBN, NoNorm, BatchNorm)}


def method(name: str) -> Method:
    """A method by its name, with its default settings.

    Example:
        >>> method("nonorm")
        NoNorm(residual=None, min_fan_in=50, last_norm=False)
    """
    key = name.lower().replace("_", "-")
    if key not in METHODS:
        near = difflib.get_close_matches(key, METHODS, n=2, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise NameNotFoundError(f"unknown method {name!r}.{hint} Known: {', '.join(METHODS)}.")
    return METHODS[key]()


def as_method(value: object) -> Method:
    """Accept a method object, or say what to pass."""
    if isinstance(value, Method) and hasattr(value, "name"):
        return value
    if isinstance(value, type) and issubclass(value, Method) and value is not Method:
        raise MimicNormError(f"method is the class {value.__name__}; pass an object: {value.__name__}()")
    if isinstance(value, str):
        return method(value)
    known = ", ".join(f"{m.__name__}()" for m in METHODS.values())
    raise MimicNormError(f"method must be one of {known}; got {value!r}")


def settings(m: Method) -> dict:
    """The fields of a method, with its name, as plain data."""
    return {"name": m.name, **dataclasses.asdict(m)}
