"""What to do with BatchNorm: one frozen dataclass per method, all applied by the same converter.

Example:
    >>> MimicNorm(residual="linear").name
    'mimicnorm'
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from mimicnorm.errors import MimicNormError, NameNotFoundError

Residual = Literal["sqrt", "linear"] | None


@dataclass(frozen=True, kw_only=True)
class Method:
    """What the converter reads of a method. Use one of the subclasses.

    Attributes:
        removes_norm: Whether BatchNorms are taken out at all.
        weights: What becomes of owners: "keep", "centre", "standardise", or "bias" (a scalar before each layer).
        instead: What stands for a BatchNorm: "beta" (its beta, as a bias or a shift), "scalar" or "group" norm.
        gains: Whether standardised weights are scaled by the theory's gain and a learnable one.
        only_beside_skips: Whether a sum without a skip is no residual one.
        needs_branches: Whether a network without residual branches is refused.
        scales_bias: Whether a branch's scalar stands behind its last bias, not before it.
        zeroes: Whether the last layers of branches and the head start at zero, the others scaled by their number.
        own_init: Whether it prescribes starting weights for any network, so that nothing is calibrated.
        scalar_rate: The learning rate of its scalars over that of the rest, where its authors prescribe one.
    """

    name: ClassVar[str]
    removes_norm: ClassVar[bool] = True
    weights: ClassVar[str] = "keep"
    instead: ClassVar[str] = "beta"
    gains: ClassVar[bool] = False
    only_beside_skips: ClassVar[bool] = False
    needs_branches: ClassVar[bool] = False
    scales_bias: ClassVar[bool] = False
    zeroes: ClassVar[bool] = False
    own_init: ClassVar[bool] = False
    scalar_rate: ClassVar[float] = 1.0
    residual: ClassVar[Residual] = None
    min_fan_in: ClassVar[int] = 1
    last_norm: ClassVar[bool] = False

    @property
    def branches(self) -> bool:
        """Whether residual branches end in a scalar."""
        return self.branch_scale(1.0) is not None

    @property
    def branch_factor(self) -> float:
        """A fixed factor on residual branches, beside the scalar."""
        return 1.0

    def branch_scale(self, _: float, /) -> float | None:
        """The scalar a residual branch starts with, given the variance predicted there; or None."""
        return None

    def branch_variance(self, _: float, /) -> float:
        """Predicted variance behind a branch's scalar, given the one before it."""
        return 1.0

    def _refuse(self, field: str, use: str) -> None:
        raise MimicNormError(f"{type(self).__name__}: {field}={getattr(self, field)!r}; use {use}")

    def _require_finite(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                self._refuse(field, "a finite number")


@dataclass(frozen=True, kw_only=True)
class _Paper(Method):
    """The fields of the paper's method and its ablations."""

    residual: Residual = None  # pyrefly: ignore
    """Start of the scalar that ends a residual branch: "sqrt" is 1/sqrt(v) (the paper), "linear" is 1/v, None is
    no scalar. v is the variance predicted there: l in the l-th block of a ResNet."""
    min_fan_in: int = 50  # pyrefly: ignore
    """Layers with this many inputs or fewer are not centred: too few weights to take a mean of."""
    last_norm: bool = False  # pyrefly: ignore
    """Put an affine-free BatchNorm on the logits."""

    def __post_init__(self) -> None:
        if self.residual not in ("sqrt", "linear", None):
            self._refuse("residual", '"sqrt", "linear" or None')
        if not isinstance(self.last_norm, bool):
            self._refuse("last_norm", "True or False")
        if type(self.min_fan_in) is not int or self.min_fan_in < 1:
            self._refuse("min_fan_in", "a whole number from 1 on")

    def branch_scale(self, v: float, /) -> float | None:
        if self.residual is None:
            return None
        return v**-0.5 if self.residual == "sqrt" else 1.0 / v


@dataclass(frozen=True, kw_only=True)
class MimicNorm(_Paper):
    """Weight mean, residual scalars and the last BN: the paper's method whole."""

    name = "mimicnorm"
    weights = "centre"
    residual: Residual = "sqrt"
    last_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class WeightMean(_Paper):
    """MimicNorm without its last BN: the paper's first ablation."""

    name = "weight-mean"
    weights = "centre"
    residual: Residual = "sqrt"


@dataclass(frozen=True, kw_only=True)
class LastBN(_Paper):
    """No norm but the last BN on the logits: the paper's second ablation."""

    name = "last-bn"
    last_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class NoNorm(_Paper):
    """BatchNorm taken out and nothing put in."""

    name = "nonorm"


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Method):
    """The network as it is: the baseline of every comparison. It has no settings."""

    name = "batchnorm"
    removes_norm = False


@dataclass(frozen=True, kw_only=True)
class Fixup(Method):
    """Residual learning without normalisation (Zhang, Dauphin and Ma 2019).

    The classifier and the last layer of each residual branch start at zero, the other m - 1 layers of a branch are
    scaled by L^(-1/(2m-2)), L the number of branches. A scalar multiplier ends each branch; scalar biases stand
    before each activation and each layer (but the one that reads the network's input, as in the authors' code).
    """

    name = "fixup"
    weights = "bias"
    instead = "scalar"
    only_beside_skips = True
    needs_branches = True
    zeroes = True
    own_init = True
    scalar_rate = 0.1

    def branch_scale(self, _: float, /) -> float | None:
        return 1.0  # it is the branch's last layer that starts at zero

    def branch_variance(self, _: float, /) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class SkipInit(Method):
    """No norm, biases, and one learnable scalar at the end of each residual branch (De and Smith 2020)."""

    name = "skipinit"
    only_beside_skips = True
    needs_branches = True
    scales_bias = True
    own_init = True

    alpha: float = 0.0
    """Where the scalars start."""

    def __post_init__(self) -> None:
        self._require_finite("alpha")

    def branch_scale(self, _: float, /) -> float | None:
        return float(self.alpha)

    def branch_variance(self, v: float, /) -> float:
        return self.alpha**2 * v


@dataclass(frozen=True, kw_only=True)
class GroupNormWS(Method):
    """GroupNorm (Wu and He 2018) for BatchNorm, and weight standardisation (Qiao et al. 2019)."""

    name = "groupnorm-ws"
    weights = "standardise"
    instead = "group"
    own_init = True

    groups: int = 32
    """Groups of a GroupNorm; fewer where they do not divide its channels or would hold next to nothing."""

    def __post_init__(self) -> None:
        if type(self.groups) is not int or self.groups < 1:
            self._refuse("groups", "a whole number from 1 on")


@dataclass(frozen=True, kw_only=True)
class ScaledWS(Method):
    """Normalizer-free networks (Brock, De, Smith and Simonyan 2021): scaled weight standardisation.

    Weights are standardised, scaled by gamma / sqrt(fan-in) and a learnable gain per output channel. A residual
    block is h + alpha * f(h / beta), with beta the square root of the variance predicted for h: 1 behind every
    standardised layer (hence behind a projection shortcut), and alpha^2 more behind every block. The division is
    folded into the weights of the layers that read h: behind the activation, as in the authors' code.
    """

    name = "scaled-ws"
    weights = "standardise"
    gains = True
    only_beside_skips = True
    scales_bias = True
    own_init = True

    alpha: float = 0.2
    """The fixed factor on residual branches."""
    skip_gain: float = 0.0
    """Start of the learnable scalar on residual branches, beside alpha (SkipInit); 1 for branches that are there
    from the start."""

    def __post_init__(self) -> None:
        self._require_finite("alpha", "skip_gain")
        if self.alpha <= 0:
            self._refuse("alpha", "a number above 0")

    @property
    def branch_factor(self) -> float:
        return float(self.alpha)

    def branch_scale(self, _: float, /) -> float | None:
        return float(self.skip_gain)  # 1 / beta is in the branch's first layer

    def branch_variance(self, v: float, /) -> float:
        return self.alpha**2 * v  # as if the skip gain were one


METHODS: dict[str, type[Method]] = {
    m.name: m for m in (MimicNorm, WeightMean, LastBN, NoNorm, BatchNorm, Fixup, SkipInit, GroupNormWS, ScaledWS)
}


def method(name: str) -> Method:
    """A method by its name, with its default settings.

    Example:
        >>> method("nonorm")
        NoNorm(residual=None, min_fan_in=50, last_norm=False)
    """
    key = name.lower().replace("_", "-")
    found = [m for known, m in METHODS.items() if known.replace("-", "") == key.replace("-", "")]
    if not found:
        raise NameNotFoundError(f"unknown method {name!r}.", key, METHODS)
    return found[0]()


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
