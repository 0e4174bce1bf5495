"""The paper's method, its two ablations, no norm at all, and the BatchNorm baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mimicnorm.arguments import positive_int
from mimicnorm.methods.base import Method, NormFacts
from mimicnorm.methods.edits import LayerEdit, NormEdit

if TYPE_CHECKING:
    from mimicnorm.surgery.residual import Branch

Residual = Literal["sqrt", "linear"] | None
LogitScale = Literal["auto"] | bool

CONFIDENT = 0.999
"""``logit_scale="auto"``: the probability that balanced classes must be able to reach without a logit scale. It leaves
the scale out from 140 classes on: with 100 it was better in three seeds of three (docs/accuracy.md), and with 1,000 it
has not been tried."""


def most_confident(classes: int) -> float:
    """Return the largest mean probability (a geometric mean) that unit-variance logits give the right class.

    For balanced classes, whose logits are at most classes / sqrt(classes - 1) apart: docs/theory.md.

    Example:
        >>> [round(most_confident(classes), 3) for classes in (2, 10, 100)]
        [0.881, 0.757, 0.996]
    """
    others = max(classes - 1, 1)  # a single logit is one against 0
    return 1 / (1 + others * math.exp(-(others + 1) / math.sqrt(others)))


@dataclass(frozen=True, kw_only=True)
class _Paper(Method):
    """The fields of the paper's method and its ablations."""

    residual: Residual = None
    min_fan_in: int = 16  # pyrefly: ignore
    last_norm: bool | None = False  # pyrefly: ignore
    logit_scale: LogitScale = "auto"

    def __post_init__(self) -> None:
        if self.residual not in ("sqrt", "linear", None):
            self._refuse("residual", '"sqrt", "linear" or None')
        if self.last_norm is not None and not isinstance(self.last_norm, bool):
            self._refuse("last_norm", "True, False or None")
        if self.logit_scale != "auto" and not isinstance(self.logit_scale, bool):
            self._refuse("logit_scale", '"auto", True or False')
        positive_int(self.min_fan_in, f"{type(self).__name__}: min_fan_in")

    def resolved(self, *, trained: bool = False) -> Method:
        return replace(self, last_norm=not trained) if self.last_norm is None else self

    def for_trained(self) -> Method | None:
        fields = ("name", "min_fan_in", "last_norm", "logit_scale")
        return Trained(centres=self.weights == "centre", **{field: getattr(self, field) for field in fields})

    def scales_logits(self, outputs: int, dense: bool) -> str:
        if self.logit_scale != "auto":
            return "logit_scale=True" if self.logit_scale else ""
        if dense:
            return "pixels or tokens are rarely balanced over the classes"
        reached = most_confident(outputs)
        why = f"at unit variance, balanced classes reach a mean probability of at most {reached:.4g}"
        return why if reached < CONFIDENT else ""

    def branch_scale(self, v: float, /) -> float | None:
        if self.residual is None:
            return None
        return v**-0.5 if self.residual == "sqrt" else 1.0 / v

    @property
    def scale_rule(self) -> str:
        return {"sqrt": "1/sqrt(v)", "linear": "1/v", None: ""}[self.residual]

    def keeps(self, layer: LayerEdit) -> str:
        why = super().keeps(layer)
        if not why and layer.depthwise and self.min_fan_in > 1:
            return "depthwise"
        if not why and layer.fan_in <= self.min_fan_in:
            return f"fan-in of at most {self.min_fan_in}"
        return why


@dataclass(frozen=True, kw_only=True)
class _Centred(_Paper):
    """The fields of the methods that centre weights."""

    weights = "centre"
    residual: Residual = "sqrt"
    centre: Literal["forward", "backward"] = "forward"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centre not in ("forward", "backward"):
            self._refuse("centre", '"forward" or "backward"')

    def layer(self, layer: LayerEdit, branches: Sequence[Branch]) -> LayerEdit:
        return replace(super().layer(layer, branches), centring=self.centre)


@dataclass(frozen=True, kw_only=True)
class MimicNorm(_Centred):
    """The paper's method: centred weights, one scalar per residual branch, one affine-free BatchNorm on the logits.

    Args:
        residual: Initial value of the scalar that ends a residual branch. "sqrt" is 1/sqrt(v) (the paper), "linear"
            is 1/v, None is no scalar. v is the variance predicted there: l in the l-th block of a ResNet.
        min_fan_in: Layers with this fan-in or less are not centred: a mean over so few weights removes too much.
            The authors use 50, which leaves out a first 3x3 layer on RGB (fan-in 27): docs/accuracy.md. Depthwise
            layers are not centred either, whatever their kernel; 1 centres them, too.
        last_norm: Put the last BN on the logits. None does so in a fresh network, and not in a trained one that is kept
            (``init="keep"``).
        centre: "forward" centres weights in every forward, which is right for every optimizer. "backward" centres them
            once and then their gradients alone: faster, and the same steps under SGD with momentum and weight decay.
            Under Adam, value clipping or added noise, call ``mn.project_(model)`` after each step.
        logit_scale: Multiply the normalised logits by one learned scalar that starts at 1. "auto": where unit variance
            does not let balanced classes reach a probability of 0.999 (fewer than 140 classes), and where a sample has
            many predictions (pixels, tokens). False is the paper. Exempt it from weight decay:
            ``mimicnorm.param_groups``.

    Example:
        >>> MimicNorm(residual="linear").name
        'mimicnorm'
    """

    name = "mimicnorm"
    last_norm: bool | None = None

    @classmethod
    def paper(cls) -> MimicNorm:
        """The settings of the paper's authors, whatever the defaults are."""
        return cls(residual="sqrt", min_fan_in=50, last_norm=True, logit_scale=False, centre="forward")


@dataclass(frozen=True, kw_only=True)
class WeightMean(_Centred):
    """MimicNorm without its last BN: the paper's first ablation. Fields as for ``MimicNorm``."""

    name = "weight-mean"


@dataclass(frozen=True, kw_only=True)
class LastBN(_Paper):
    """No norm except the last BN on the logits: the paper's second ablation. Fields as for ``MimicNorm``."""

    name = "last-bn"
    last_norm: bool | None = None


@dataclass(frozen=True, kw_only=True)
class NoNorm(_Paper):
    """BatchNorm is removed and nothing replaces it. Fields as for ``MimicNorm``."""

    name = "nonorm"


@dataclass(frozen=True, kw_only=True)
class Trained(_Paper):
    """One of the methods above on a trained network: every BatchNorm stays as an affine map with constant statistics.

    No residual scalars: branches have their trained sizes. Weights are applied as they are; a method that centres
    weights centres their gradients.

    Args:
        name: That of the method.
        centres: Whether it centres weights.
    """

    name: str  # pyrefly: ignore
    centres: bool
    keeps_statistics = True

    @property
    def weights(self) -> str:  # pyrefly: ignore
        return "centre" if self.centres else "keep"

    def layer(self, layer: LayerEdit, branches: Sequence[Branch]) -> LayerEdit:
        edit = super().layer(layer, branches)
        if edit.action == "keep":
            return replace(edit, centring=None)
        return replace(edit, action="trained", centring="backward")

    def norm(self, norm: NormEdit, facts: NormFacts) -> NormEdit:
        if facts.norm_into is not None:
            return replace(norm, action="fold", beta_into=facts.norm_into, why=f"taken up by {facts.norm_into}")
        return replace(norm, action="affine", before_relu=facts.before_relu, why=facts.obstacle)


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Method):
    """The network as it is: the baseline of every comparison. It has no settings."""

    name = "batchnorm"
    removes_norm = False

    def for_trained(self) -> Method | None:
        return self
