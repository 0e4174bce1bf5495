"""The base of every method: a method looks at the facts about a layer or BatchNorm and answers with an edit.

``surgery/planning.py`` collects the facts. It asks no method which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from mimicnorm.errors import MimicNormError
from mimicnorm.methods.edits import LayerEdit, NormEdit

if TYPE_CHECKING:
    from mimicnorm.surgery.residual import Branch


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Facts about a weight layer.

    Attributes:
        name: Qualified name.
        kind: Its class.
        role: "owner", "branch end", "gate" or "head".
        fan_in: Weights that make one output.
        depthwise: Whether each output reads a single channel.
        given: "frozen", "sparse" or "parametrized" if its weights must not be drawn, else "".
        fed_by: The activation it reads.
        gain: ``gain(centred, fan_in)`` of the theory for that activation.
        v: Predicted variance of its input before the activation.
        scale: Initial value of the residual scalar, if it ends a branch itself.
        on_raw_input: Whether it reads the model's own input.
        branches: The residual branches of the network.
    """

    name: str
    kind: str
    role: str
    fan_in: int
    depthwise: bool = False
    given: str = ""
    fed_by: str
    gain: Callable[[bool, int | None], float]
    v: float = 1.0
    scale: float | None = None
    on_raw_input: bool = False
    branches: Sequence[Branch] = ()


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Facts about a BatchNorm that is taken out.

    Attributes:
        name: Qualified name.
        kind: Its class.
        role: "post", "pre" or "unused".
        owners: The layers it normalised, by name.
        v: Predicted variance of its input.
        scale: Initial value of the residual scalar, if it ends a branch.
        scale_why: Why it gets that scalar.
        channels: How many channels it has.
        positions: Values per sample and channel.
        before_activation: Whether an activation reads its output.
        removable: Whether it may become an identity: it alone reads the very output of its layers.
        has_beta: Whether it has a beta.
        beta_into: The layer whose bias its beta can become, or None.
        scale_into: The layers whose weights can take its residual scalar; empty if they cannot.
        obstacle: Why beta cannot become a bias, or the norm an identity.
    """

    name: str
    kind: str
    role: str
    owners: tuple[str, ...] = ()
    v: float | None = None
    scale: float | None = None
    scale_why: str = ""
    channels: int = 1
    positions: int = 16
    before_activation: bool = False
    removable: bool = False
    has_beta: bool = True
    beta_into: str | None = None
    scale_into: tuple[str, ...] = ()
    obstacle: str = ""

    def edit(self, action: str, why: str = "", **details: Any) -> NormEdit:
        """Return an edit of this BatchNorm."""
        facts: dict[str, Any] = {"name": self.name, "kind": self.kind, "role": self.role, "owners": self.owners}
        return NormEdit(action=action, why=why, v=self.v, **facts, **details)


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
        own_init: Whether it prescribes initial weights for any network, so that nothing is calibrated.
        scalar_rate: The learning rate of its scalars over that of the rest, where its authors prescribe one.
        min_fan_in: Layers with this fan-in or less are not changed.
        last_norm: Whether the logits get an affine-free BatchNorm.
    """

    name: ClassVar[str]
    removes_norm: ClassVar[bool] = True
    weights: ClassVar[str] = "keep"
    unit_norms: ClassVar[bool] = False
    unit_layers: ClassVar[bool] = False
    needs_branches: ClassVar[bool] = False
    changes_heads: ClassVar[bool] = False
    own_init: ClassVar[bool] = False
    scalar_rate: ClassVar[float] = 1.0
    min_fan_in: ClassVar[int] = 1
    last_norm: ClassVar[bool] = False

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

    def keeps(self, layer: Layer) -> str:
        """Return why a layer's weights stay as they are, or an empty string."""
        if self.weights == "keep":
            return "the method does not centre"
        return layer.given or ("part of a gate" if layer.role == "gate" else "")

    def layer(self, layer: Layer) -> LayerEdit:
        """Decide what happens to a weight layer."""
        why = self.keeps(layer)
        action = "keep" if why else self.weights
        return self._edit(layer, action, layer.gain(action == "centre", layer.fan_in), why=why)

    def norm(self, norm: Norm) -> NormEdit:
        """Decide what replaces a BatchNorm: its beta as a layer's bias, or a shift; a scalar at the end of a branch."""
        if norm.role == "pre":
            if norm.scale is None:
                return norm.edit("shift", f"before {', '.join(norm.owners[:3]) or 'no layer'}")
            return norm.edit("scale", "ends a residual branch", scale=norm.scale, factor=self.branch_factor)
        scalar: dict[str, Any] = {}
        why = norm.scale_why
        if norm.scale is not None:
            if not norm.scale_into:
                return self._scale_after(norm)
            why += f", folded into {', '.join(norm.scale_into)}"
            scalar = {"scale": norm.scale, "factor": self.branch_factor, "scale_into": norm.scale_into}
        if norm.beta_into is not None or (norm.removable and not norm.has_beta):
            return norm.edit("remove", why or f"owned by {norm.owners[0]}", beta_into=norm.beta_into, **scalar)
        return norm.edit("shift", why or norm.obstacle, **scalar)

    def _scale_after(self, norm: Norm) -> NormEdit:
        """A scalar that no layer can take into its weights multiplies the layer's output."""
        return norm.edit("scale", norm.scale_why, scale=norm.scale, factor=self.branch_factor)

    def _edit(self, layer: Layer, action: str, gain: float, **details: Any) -> LayerEdit:
        start = {"frozen": "keep", "parametrized": "keep", "sparse": "scale"}.get(layer.given, "draw")
        return LayerEdit(
            name=layer.name,
            kind=layer.kind,
            role=layer.role if layer.scale is None else "branch end",
            action=action,
            v=layer.v,
            scale=layer.scale,
            factor=1.0 if layer.scale is None else self.branch_factor,
            fan_in=layer.fan_in,
            fed_by=layer.fed_by,
            gain=gain,
            start=start,
            **details,
        )

    def _refuse(self, field: str, use: str) -> NoReturn:
        raise MimicNormError(f"{type(self).__name__}: {field}={getattr(self, field)!r}; use {use}")
