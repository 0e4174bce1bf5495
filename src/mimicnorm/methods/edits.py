"""What a method asks for: one edit per BatchNorm, per layer, per head. ``surgery/operate.py`` carries them out.

The planner fills in the facts, the method decides on the action.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What happens to one module.

    Attributes:
        name: Qualified name.
        kind: Its class.
        role: What it is in the network: see the subclasses.
        action: What is done to it: a key of ``surgery.operate.ACTIONS``.
        v: Predicted variance of its input.
        scale: Initial value of the residual scalar that it gets, or None.
        factor: A fixed factor beside that scalar.
        why: The reason, in one clause.
    """

    name: str
    kind: str
    role: str
    action: str
    v: float = 1.0
    scale: float | None = None
    factor: float = 1.0
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerEdit(Edit):
    """What happens to a weight layer that a BatchNorm normalised.

    The role is "owner" (of a BatchNorm after or before it), "branch end", "gate" or "head"; the action "centre",
    "standardise", "bias" (a scalar bias before it), "keep" or "trained" (as it was trained).

    Attributes:
        fan_in: Weights that make one output.
        depthwise: Whether each output reads a single channel.
        fed_by: The activation it reads, or a mixture of them.
        fed_mean: Mean of what it reads.
        fed_rms: Root mean square of what it reads.
        gain: Initial weights have standard deviation gain / sqrt(fan_in).
        beta_from: The BatchNorm whose beta becomes its bias, or which a trained layer takes up; or None.
        scales_bias: Whether the residual scalar multiplies its bias, too.
        scales_output: Whether it multiplies the output: a foreign forward does not just apply the weight.
        weight_factor: What standardised weights are multiplied with.
        learns_gain: Whether it gets a learnable gain per output channel.
        on_raw_input: Whether it reads the model's own input.
        centring: Of a centred layer: "forward" (the weight, in each forward) or "backward" (its gradient). None in a
            trained network for a layer that is not centred.
        start: How its initial weights are made: "draw", "scale" (zeros stay zero) or "keep".
    """

    action: str = "keep"
    fan_in: int
    depthwise: bool = False
    fed_by: str
    fed_mean: float
    fed_rms: float
    gain: float
    beta_from: str | None = None
    scales_bias: bool = False
    scales_output: bool = False
    weight_factor: float = 1.0
    learns_gain: bool = False
    on_raw_input: bool = False
    centring: str | None = "forward"
    start: str = "draw"

    @property
    def fed_sd(self) -> float:
        """Standard deviation of what it reads."""
        return math.sqrt(self.fed_rms**2 - self.fed_mean**2)


@dataclass(frozen=True, kw_only=True)
class NormEdit(Edit):
    """What happens to a BatchNorm.

    The role is "post" (after its layers), "pre" (before them), "unused" or "left"; the action "remove", "shift",
    "scale", "group" or "leave"; of a trained one "fold" (its layer takes it up) or "affine".

    Attributes:
        owners: The layers it normalised, by name.
        children: Its own children that stay (dropout, activation).
        channel_dim: The dimension that its beta lies along.
        scalar: Whether the shift is a scalar (Fixup) in place of its beta.
        groups: Groups of the GroupNorm that replaces it.
        beta_into: The layer whose bias its beta becomes, or which takes it up; or None.
        before_relu: Of an affine: whether an in-place ReLU, and nothing else, reads its output.
        scale_into: The layers that take its residual scalar into their weights.
    """

    action: str = "shift"
    owners: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    channel_dim: int = 1
    scalar: bool = False
    groups: int | None = None
    beta_into: str | None = None
    before_relu: bool = False
    scale_into: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadEdit(Edit):
    """A module whose ``outputs`` class scores, along dimension ``dim``, get a LastNorm.

    Attributes:
        logit_scale: Whether a learned scalar multiplies the normalised scores.
    """

    role: str = "head"
    action: str = "last norm"
    outputs: int
    dim: int
    logit_scale: bool = False
