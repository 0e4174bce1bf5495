"""The base of every method: a method turns the facts about a layer or BatchNorm into an edit.

``surgery/planning.py`` collects the facts. It asks no method which one it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NoReturn

from mimicnorm.errors import MimicNormError
from mimicnorm.methods.edits import LayerEdit, NormEdit

if TYPE_CHECKING:
    from mimicnorm.surgery.residual import Branch


@dataclass(frozen=True, kw_only=True)
class NormFacts:
    """What is possible for a BatchNorm.

    Attributes:
        channels: How many channels it has.
        positions: Values per sample and channel.
        has_beta: Whether it has a beta.
        before_activation: Whether an activation reads its output.
        removable: Whether it may become an identity: it alone reads the very output of its layers.
        beta_into: The layer whose bias its beta can become, or None.
        norm_into: The layer that can take up all of its affine map, or None.
        before_relu: Whether an in-place ReLU, and nothing else, reads its output.
        scale_into: The layers whose weights can take its residual scalar; empty if they cannot.
        obstacle: Why its beta cannot become a bias.
    """

    channels: int = 1
    positions: int = 16
    has_beta: bool = True
    before_activation: bool = False
    removable: bool = False
    beta_into: str | None = None
    norm_into: str | None = None
    before_relu: bool = False
    scale_into: tuple[str, ...] = ()
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to take BatchNorm out of a network. Use one of the subclasses.

    Attributes:
        removes_norm: Whether BatchNorms are taken out at all.
        weights: What becomes of the weights of layers: "keep", "centre", "standardise" or "bias".
        unit_norms: Whether what replaces a BatchNorm normalises, too.
        unit_layers: Whether a changed layer's output has variance 1 whatever its input has.
        needs_branches: Whether a network without residual branches is refused.
        changes_heads: Whether the layers that make the logits are changed, too.
        scales_bias: Whether a branch's scalar multiplies the bias of its last layer, too.
        keeps_statistics: Whether a BatchNorm's affine map stays, with its running statistics as constants.
        own_init: Whether it prescribes initial weights for any network, so that nothing is calibrated.
        scalar_rate: The learning rate of its scalars over that of the rest, where its authors prescribe one.
        min_fan_in: Layers with this fan-in or less are not changed.
        last_norm: Whether the logits get an affine-free BatchNorm; None decides by the network, see ``resolved``.
    """

    name: ClassVar[str]
    removes_norm: ClassVar[bool] = True
    weights: ClassVar[str] = "keep"
    unit_norms: ClassVar[bool] = False
    unit_layers: ClassVar[bool] = False
    needs_branches: ClassVar[bool] = False
    changes_heads: ClassVar[bool] = False
    scales_bias: ClassVar[bool] = False
    keeps_statistics: ClassVar[bool] = False
    own_init: ClassVar[bool] = False
    scalar_rate: ClassVar[float] = 1.0
    min_fan_in: ClassVar[int] = 1
    last_norm: ClassVar[bool | None] = False

    def resolved(self, *, trained: bool = False) -> Method:
        """Return the method with every default decided, for a fresh or a trained network."""
        del trained
        return self

    def for_trained(self) -> Method | None:
        """Return what is done to a trained network (``init="keep"``), or None if the method has no answer."""
        return None

    def scales_logits(self, outputs: int, dense: bool) -> str:
        """Return why a learned scalar multiplies the logits of a last BN, or an empty string.

        Args:
            outputs: How many classes there are.
            dense: Whether a sample has many predictions: one per pixel or token.
        """
        return ""

    # -- residual branches ---------------------------------------------------------------------

    def branches(self, candidates: list[Branch]) -> list[Branch]:
        """Return the residual branches that end in a scalar."""
        return candidates if self.branch_scale(1.0) is not None else []

    def branch_scale(self, _: float, /) -> float | None:
        """Return the initial value of a branch's scalar, given the variance predicted there; or None."""
        return None

    def branch_variance(self, _: float, /) -> float:
        """Return the predicted variance after a branch's scalar, given the one before it."""
        return 1.0

    @property
    def branch_factor(self) -> float:
        """A fixed factor on residual branches, beside the scalar."""
        return 1.0

    @property
    def scale_rule(self) -> str:
        """How a branch's scalar follows from v, for the plan."""
        return f"{self.branch_scale(1.0):g}"

    # -- layers and norms ----------------------------------------------------------------------

    def keeps(self, layer: LayerEdit) -> str:
        """Return why a layer's weights stay as they are, or an empty string."""
        if self.weights == "keep":
            return "the method does not centre"
        if layer.start != "draw":
            return {"keep": "frozen", "scale": "sparse"}[layer.start]
        return "part of a gate" if layer.role == "gate" else ""

    def layer(self, layer: LayerEdit, branches: Sequence[Branch]) -> LayerEdit:
        """Decide what happens to a weight layer.

        Args:
            layer: The facts, as an edit that keeps the layer's weights.
            branches: The residual branches of the network.
        """
        why = self.keeps(layer)
        if why:
            return replace(layer, why=why)
        gain = math.sqrt(layer.fan_in / (layer.fan_in - 1)) / layer.fed_sd
        return replace(layer, action=self.weights, gain=gain)

    def norm(self, norm: NormEdit, facts: NormFacts) -> NormEdit:
        """Decide what replaces a BatchNorm: its beta as a layer's bias, or a shift; a scalar at the end of a branch.

        Args:
            norm: The facts, as an edit that makes it a shift.
            facts: What is possible.
        """
        if norm.scale is not None:
            if not facts.scale_into:
                return replace(norm, action="scale", beta_into=facts.beta_into if self.scales_bias else None)
            norm = replace(
                norm, scale_into=facts.scale_into, why=f"{norm.why}, folded into {', '.join(facts.scale_into)}"
            )
        if facts.beta_into is not None or (facts.removable and not facts.has_beta):
            why = norm.why or f"owned by {norm.owners[0]}"
            return replace(norm, action="remove", beta_into=facts.beta_into, why=why)
        return replace(norm, why=norm.why or facts.obstacle)

    def _refuse(self, field: str, use: str) -> NoReturn:
        raise MimicNormError(f"{type(self).__name__}: {field}={getattr(self, field)!r}; use {use}")
