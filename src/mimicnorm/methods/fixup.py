"""Residual networks without normalisation whose branches start at zero: Fixup and SkipInit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mimicnorm.arguments import finite
from mimicnorm.methods.base import Method, NormFacts
from mimicnorm.methods.edits import LayerEdit, NormEdit

if TYPE_CHECKING:
    from mimicnorm.surgery.residual import Branch


def beside_skips(candidates: list[Branch], *, from_zero: bool) -> list[Branch]:
    """Return the branches beside a skip.

    A sum without a skip would be zero altogether if its branches start at zero, and a ReLU after a branch at zero
    passes no gradient back.

    Args:
        candidates: The branches of the network.
        from_zero: Whether branches start at zero.
    """
    return [b for b in candidates if b.beside_skip and (b.wakes or not from_zero)]


@dataclass(frozen=True, kw_only=True)
class Fixup(Method):
    """Residual learning without normalisation (Zhang, Dauphin and Ma 2019).

    The classifier and the last layer of each residual branch start at zero, the other m - 1 layers of a branch are
    scaled by L^(-1/(2m-2)), L the number of branches. A scalar multiplier ends each branch; scalar biases stand
    before each activation and each layer (except the one that reads the network's input, as in the authors' code).
    """

    name = "fixup"
    weights = "bias"
    needs_branches = True
    changes_heads = True
    own_init = True
    scalar_rate = 0.1

    def branches(self, candidates: list[Branch]) -> list[Branch]:
        return [b for b in beside_skips(candidates, from_zero=True) if all(b.last_layers)]

    def branch_scale(self, _: float, /) -> float | None:
        return 1.0  # the branch's last layer starts at zero, not the scalar

    def branch_variance(self, _: float, /) -> float:
        return 0.0

    def layer(self, layer: LayerEdit, branches: Sequence[Branch]) -> LayerEdit:
        why = self.keeps(layer)
        if why:
            return replace(layer, why=why)
        factor, why = _start(layer, branches)
        return replace(layer, action="bias", gain=layer.gain * factor, why=why)

    def norm(self, norm: NormEdit, facts: NormFacts) -> NormEdit:
        if norm.role == "unused":
            return super().norm(norm, facts)
        norm = replace(norm, scalar=True)
        if norm.scale is not None:
            return replace(norm, action="scale")
        if facts.before_activation:
            return replace(norm, why="scalar bias before an activation")
        if norm.role == "post" and facts.removable:
            return replace(norm, action="remove", why=f"owned by {norm.owners[0]}, before no activation")
        return replace(norm, why="its input is read by others, too")


def _start(layer: LayerEdit, branches: Sequence[Branch]) -> tuple[float, str]:
    """Return Fixup's factor on a layer's initial weights, and why. A layer on nested branches goes by the innermost."""
    if layer.role == "head":
        return 0.0, "starts at zero: the head"
    if any(layer.name in names for branch in branches for names in branch.last_layers):
        return 0.0, "starts at zero: the last layer of its branch"
    around = [b for b in branches if layer.name in b.layers and len(b.layers) > 1]
    if not around:
        return 1.0, ""
    m = min(len(b.layers) for b in around)
    return len(branches) ** (-1 / (2 * m - 2)), f"one of {m} layers in one of {len(branches)} branches"


@dataclass(frozen=True, kw_only=True)
class SkipInit(Method):
    """No norm, biases, and one learnable scalar at the end of each residual branch (De and Smith 2020).

    Args:
        alpha: Initial value of the scalars.
    """

    name = "skipinit"
    needs_branches = True
    scales_bias = True
    own_init = True

    alpha: float = 0.0

    def __post_init__(self) -> None:
        finite(self.alpha, "SkipInit: alpha")

    def branches(self, candidates: list[Branch]) -> list[Branch]:
        return beside_skips(candidates, from_zero=self.alpha == 0)

    def branch_scale(self, _: float, /) -> float | None:
        return float(self.alpha)

    def branch_variance(self, v: float, /) -> float:
        return self.alpha**2 * v
