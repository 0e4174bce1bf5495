"""The gain of a layer, by what feeds it.

A centred layer wants weights of standard deviation g / sqrt(n) with g = 1/sd(phi(z)) times sqrt(n/(n-1)); one
that is not centred, g = 1/rms(phi(z)). Behind a concat the input is a mixture of activations.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass

from mimicnorm.flow import carried
from mimicnorm.ops import Kind
from mimicnorm.record import Node
from mimicnorm.theory.activations import ActivationStats, activation_stats
from mimicnorm.theory.errors import TheoryError

_DRIFT_LIMIT = 1.0 + 1e-6


@dataclass(frozen=True)
class Feed:
    """What the input of a layer went through since it was last Gaussian.

    Attributes:
        parts: (activation name, its statistics, share of the input).
        obstacles: Operations on the way that have no formula; empty where the gain is exact.
    """

    parts: tuple[tuple[str, ActivationStats, float], ...]
    obstacles: tuple[str, ...]

    @property
    def name(self) -> str:
        """The activation, or the mixture, in a word."""
        return "+".join(dict.fromkeys(name for name, _, _ in self.parts))

    def gain(self, centred: bool, fan_in: int) -> float:
        """1/sd of the fed values with the exact factor in n if centred, else 1/rms."""
        mean = sum(share * s.mean for _, s, share in self.parts)
        second = sum(share * s.second_moment for _, s, share in self.parts)
        if not centred:
            return 1 / math.sqrt(second)
        return math.sqrt(fan_in / (fan_in - 1)) / math.sqrt(second - mean**2)

    @property
    def drifts(self) -> bool:
        """Whether an activation amplifies a deviation of the variance from layer to layer (dV/dq > 1)."""
        return any(s.variance_slope > _DRIFT_LIMIT for _, s, _ in self.parts)


def feed(layer: Node, planned: Container[str]) -> Feed:
    """What feeds a layer's call; ``planned`` are the layers whose scale will be set."""
    obstacles: dict[str, None] = {}
    parts: dict[str, tuple[ActivationStats, float]] = {}
    for name, stats, share in _parts(layer.inputs[0], 1.0, obstacles, planned):
        parts[name] = (stats, share + (parts[name][1] if name in parts else 0.0))
    return Feed(tuple((name, stats, share) for name, (stats, share) in parts.items()), tuple(obstacles))


def _parts(
    node: Node, share: float, obstacles: dict[str, None], planned: Container[str]
) -> list[tuple[str, ActivationStats, float]]:
    while True:
        if node.kind is Kind.ACTIVATION:
            return [(*_activation(node, obstacles), share)]
        if node.kind is Kind.CONCAT:
            sizes = [n.shape.numel() for n in node.inputs]
            found = []
            for operand, size in zip(node.inputs, sizes, strict=True):
                found += _parts(operand, share * size / sum(sizes), obstacles, planned)
            return found
        if node.kind not in (
            Kind.VIEW,
            Kind.PAD,
            Kind.DROPOUT,
            Kind.POOL,
            Kind.RESIZE,
            Kind.CONSTANT,
            Kind.PRODUCT,
            Kind.SOFTMAX,
        ):
            if node.kind is Kind.OPAQUE or (node.kind is Kind.SUM and _sums_activations(node)):
                obstacles[f"{node.op} of activations" if node.kind is Kind.SUM else node.op] = None
            if node.kind is Kind.LAYER and node.layer not in planned:
                obstacles[f"layer {node.layer or node.where} without BatchNorm"] = None
            return [("identity", activation_stats("identity"), share)]
        if node.kind in (Kind.RESIZE, Kind.PRODUCT, Kind.SOFTMAX):
            obstacles["gate" if node.kind is Kind.PRODUCT else node.op] = None
        elif node.kind is Kind.POOL and "max" not in node.op:
            obstacles[node.op] = None
        elif node.kind is Kind.CONSTANT and node.op not in ("add", "sub"):
            obstacles[f"{node.op} by a constant"] = None
        before = carried(node)
        if before is None:
            return [("identity", activation_stats("identity"), share)]
        node = before


def _sums_activations(node: Node) -> bool:
    return any(n.kind in (Kind.ACTIVATION, Kind.POOL) for n in node.inputs)


def _activation(node: Node, obstacles: dict[str, None]) -> tuple[str, ActivationStats]:
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
        return name, activation_stats(name, **parameters)
    except (TheoryError, TypeError, ValueError):
        obstacles[node.op] = None
        return node.op, activation_stats("identity")


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
