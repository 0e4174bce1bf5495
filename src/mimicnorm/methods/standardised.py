"""Methods with standardised weights: GroupNorm with weight standardisation, and normalizer-free networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mimicnorm.arguments import finite, positive_int
from mimicnorm.methods.base import Method, NormFacts
from mimicnorm.methods.edits import LayerEdit, NormEdit
from mimicnorm.methods.fixup import beside_skips

if TYPE_CHECKING:
    from mimicnorm.surgery.residual import Branch


@dataclass(frozen=True, kw_only=True)
class _Standardised(Method):
    """Weights are standardised, except where a single weight makes an output: nothing would be left of it."""

    weights = "standardise"
    own_init = True

    def keeps(self, layer: LayerEdit) -> str:
        return super().keeps(layer) or ("fan-in of at most 1" if layer.fan_in <= 1 else "")

    def layer(self, layer: LayerEdit, branches: Sequence[Branch]) -> LayerEdit:
        why = self.keeps(layer)
        if why:
            return replace(layer, why=why)
        return replace(layer, action="standardise", gain=1 / layer.fed_sd)


@dataclass(frozen=True, kw_only=True)
class GroupNormWS(_Standardised):
    """GroupNorm (Wu and He 2018) for BatchNorm, and weight standardisation (Qiao et al. 2019).

    Args:
        groups: Groups of a GroupNorm. Fewer are taken where they do not divide its channels or would hold too few
            values each.
    """

    name = "groupnorm-ws"
    unit_norms = True

    groups: int = 32

    def __post_init__(self) -> None:
        positive_int(self.groups, "GroupNormWS: groups")

    def norm(self, norm: NormEdit, facts: NormFacts) -> NormEdit:
        from mimicnorm.layers import group_count  # not above: the command line checks methods before torch loads

        groups = group_count(facts.channels, facts.positions, self.groups)
        return replace(norm, action="group", groups=groups, why=f"{groups} groups of each sample's channels")


@dataclass(frozen=True, kw_only=True)
class ScaledWS(_Standardised):
    """Normalizer-free networks (Brock, De, Smith and Simonyan 2021): scaled weight standardisation.

    Weights are standardised, scaled by gamma / sqrt(fan-in) and a learnable gain per output channel. A residual
    block is h + alpha * f(h / beta), with beta the square root of the variance predicted for h: 1 after every
    standardised layer (hence after a projection shortcut), and alpha^2 more after every block. The division is
    folded into the weights of the layers that read h: after the activation, as in the authors' code.

    Args:
        alpha: The fixed factor on residual branches.
        skip_gain: Initial value of the learnable scalar on residual branches, beside alpha (SkipInit). 1 for
            branches that are there from the start.
    """

    name = "scaled-ws"
    unit_layers = True
    scales_bias = True

    alpha: float = 0.2
    skip_gain: float = 0.0

    def __post_init__(self) -> None:
        finite(self.alpha, "ScaledWS: alpha", above=0)
        finite(self.skip_gain, "ScaledWS: skip_gain")

    def branches(self, candidates: list[Branch]) -> list[Branch]:
        return beside_skips(candidates, from_zero=self.skip_gain == 0)

    @property
    def branch_factor(self) -> float:
        return float(self.alpha)

    def branch_scale(self, _: float, /) -> float | None:
        return float(self.skip_gain)  # 1 / beta is in the branch's first layer

    def branch_variance(self, v: float, /) -> float:
        return self.alpha**2 * v  # as if the skip gain were one

    def layer(self, layer: LayerEdit, branches: Sequence[Branch]) -> LayerEdit:
        edit = super().layer(layer, branches)
        if edit.action == "keep":
            return edit
        return replace(edit, weight_factor=edit.gain / math.sqrt(layer.fan_in * layer.v), learns_gain=True)
