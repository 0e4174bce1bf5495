"""The gain of a layer, by what feeds it; and whether the theory covers a network at all.

A centred layer wants weights of standard deviation g / sqrt(n) with g = 1/sd(phi(z)) times sqrt(n/(n-1)); one
that is not centred, g = 1/rms(phi(z)). Behind a concat the input is a mixture of activations.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from mimicnorm.flow import RESHAPED, carried
from mimicnorm.graph import Node
from mimicnorm.ops import Kind
from mimicnorm.theory.activations import ActivationStats, activation_stats
from mimicnorm.theory.errors import TheoryError

_DRIFT_LIMIT = 1.01  # per layer: 1.6 over 50 layers
_BEND_LIMIT = 0.1  # relative error of the variance behind an activation that is not homogeneous, to first order
_PASSES_ON = (*RESHAPED, Kind.PRODUCT, Kind.SOFTMAX)


@dataclass(frozen=True)
class Feed:
    """What the input of a layer went through since it was last Gaussian.

    Attributes:
        parts: (activation name, its statistics, share of the input).
    """

    parts: tuple[tuple[str, ActivationStats, float], ...]

    @property
    def name(self) -> str:
        """The activation, or the mixture, in a word."""
        return "+".join(name for name, _, _ in self.parts)

    def gain(self, centred: bool, fan_in: int | None) -> float:
        """1/sd of the fed values if centred, else 1/rms; with the exact factor in n, but for standardised weights."""
        mean = sum(share * s.mean for _, s, share in self.parts)
        second = sum(share * s.second_moment for _, s, share in self.parts)
        if not centred:
            return 1 / math.sqrt(second)
        return (1.0 if fan_in is None else math.sqrt(fan_in / (fan_in - 1))) / math.sqrt(second - mean**2)


def feed(layer: Node) -> Feed:
    """What feeds a layer's call."""
    merged: dict[str, tuple[ActivationStats, float]] = {}
    for name, stats, share in _parts(layer.inputs[0], 1.0):
        merged[name] = (stats, share + (merged[name][1] if name in merged else 0.0))
    return Feed(tuple((name, stats, share) for name, (stats, share) in merged.items()))


def _parts(node: Node, share: float) -> list[tuple[str, ActivationStats, float]]:
    while node.kind in _PASSES_ON and (before := carried(node)) is not None:
        node = before
    if node.kind is Kind.ACTIVATION:
        known = activation(node)
        return [(*known, share)] if known is not None else [("identity", activation_stats("identity"), share)]
    if node.kind is Kind.CONCAT:
        sizes = [n.shape.numel() for n in node.inputs]
        operands = zip(node.inputs, sizes, strict=True)
        return [part for n, size in operands for part in _parts(n, share * size / sum(sizes))]
    return [("identity", activation_stats("identity"), share)]


def without_formula(nodes: Iterable[Node], planned: Container[str], v: Mapping[Node, float]) -> str | None:
    """The first operation on the way whose effect on the variance the theory does not give, in words.

    Max pooling and zero padding count as covered, as in the paper: they move the variance by a bounded factor.

    Args:
        nodes: The operations.
        planned: The layers that are given their starting weights.
        v: The predicted variance of each tensor.
    """
    for node in nodes:
        reason = None
        if node.kind in (Kind.RESIZE, Kind.SOFTMAX, Kind.OPAQUE):
            reason = node.op
        elif node.kind is Kind.PRODUCT:
            reason = "a gate or product"
        elif node.kind is Kind.POOL and "max" not in node.op:
            reason = node.op
        elif node.kind is Kind.CONSTANT and node.op not in ("add", "sub"):
            reason = f"{node.op} by a constant"
        elif node.kind is Kind.LAYER and (node.layer is None or node.layer not in planned):
            reason = f"layer {node.layer or node.op!r} without BatchNorm"
        elif node.kind is Kind.ACTIVATION:
            known = activation(node)
            if known is None:
                reason = node.op
            elif known[1].variance_slope > _DRIFT_LIMIT:
                return f"under {known[0]} the variance drifts with depth"
            elif abs(math.log(v[node.inputs[0]]) * (known[1].variance_slope - 1)) > _BEND_LIMIT:
                reason = f"{node.op} of a variance that is not 1"
        if reason is not None:
            return f"no formula for {reason}{f' in {node.where}' if node.where else ''}"
    return None


def activation(node: Node) -> tuple[str, ActivationStats] | None:
    """Name and statistics of a recorded activation with its settings, or None if no formula is known."""
    given = dict(node.settings)
    positional = given.pop("positional", [])
    name, parameters = node.op, {}
    if name == "gelu" and "tanh" in (given.get("approximate"), *positional):
        name = "gelu_tanh"
    elif name in ("leaky_relu", "elu", "celu"):
        key = "negative_slope" if name == "leaky_relu" else "alpha"
        value = given.get(key, positional[0] if positional else None)
        parameters = {} if value is None else {key: float(value)}
    elif name in ("clamp", "clip", "clamp_min", "hardtanh"):
        name, parameters = _clamp(name, positional, given)
    try:
        return name, activation_stats(name, None, **parameters)
    except (TheoryError, TypeError, ValueError):
        return None


def _clamp(name: str, positional: list, given: dict) -> tuple[str, dict[str, float]]:
    low, high = (*positional, None, None)[:2]
    low = given.get("min", given.get("min_val", low))
    high = given.get("max", given.get("max_val", high))
    if name == "hardtanh":
        low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
    if low == 0 and high is None:
        return "relu", {}
    if low is None or high is None:
        return name, {}
    return "hardtanh", {"min_val": float(low), "max_val": float(high)}
