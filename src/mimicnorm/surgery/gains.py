"""The gain of a layer, by what feeds it.

A centred layer wants weights of standard deviation g / sqrt(n) with g = 1/sd(phi(z)) times sqrt(n/(n-1)); one
that is not centred, g = 1/rms(phi(z)). Behind a concat the input is a mixture of activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mimicnorm.errors import TheoryError
from mimicnorm.surgery.flow import RESHAPED, carried
from mimicnorm.surgery.graph import Node
from mimicnorm.surgery.ops import Kind
from mimicnorm.theory.activations import ActivationStats, activation_stats, prelu_stats

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
        return "+".join(dict.fromkeys(name for name, _, _ in self.parts))

    @property
    def mean(self) -> float:
        """Of the fed values."""
        return sum(share * s.mean for _, s, share in self.parts)

    @property
    def second_moment(self) -> float:
        """Of the fed values."""
        return sum(share * s.second_moment for _, s, share in self.parts)

    def gain(self, centred: bool, fan_in: int | None) -> float:
        """1/sd of the fed values if centred, else 1/rms; with the exact factor in n, but for standardised weights."""
        if not centred:
            return 1 / math.sqrt(self.second_moment)
        sd = math.sqrt(self.second_moment - self.mean**2)
        return (1.0 if fan_in is None else math.sqrt(fan_in / (fan_in - 1))) / sd


def feed(layer: Node, modules: Mapping[str, nn.Module]) -> Feed:
    """What feeds a layer's call; the network's modules hold the slopes of its PReLUs."""
    merged: dict[tuple[str, ActivationStats], float] = {}
    for name, stats, share in _parts(layer.inputs[0], 1.0, modules):
        merged[name, stats] = merged.get((name, stats), 0.0) + share
    return Feed(tuple((name, stats, share) for (name, stats), share in merged.items()))


def _parts(node: Node, share: float, modules: Mapping[str, nn.Module]) -> list[tuple[str, ActivationStats, float]]:
    while node.kind in _PASSES_ON and (before := carried(node)) is not None:
        node = before
    if node.kind is Kind.ACTIVATION:
        known = activation(node, modules)
        return [(*known, share)] if known is not None else [("identity", activation_stats("identity"), share)]
    if node.kind is Kind.CONCAT:
        sizes = [n.shape.numel() for n in node.inputs]
        operands = zip(node.inputs, sizes, strict=True)
        return [part for n, size in operands for part in _parts(n, share * size / sum(sizes), modules)]
    return [("identity", activation_stats("identity"), share)]


def activation(node: Node, modules: Mapping[str, nn.Module]) -> tuple[str, ActivationStats] | None:
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
        if name == "prelu":
            slopes = [constant_value(c, modules) for c in node.constants]
            return (name, prelu_stats(slopes[0])) if len(slopes) == 1 and slopes[0] is not None else None
        return name, activation_stats(name, None, **parameters)
    except (TheoryError, TypeError, ValueError):
        return None


def constant_value(constant: float | str | None, modules: Mapping[str, nn.Module]) -> Tensor | None:
    """A recorded constant's value, or None where it is not known."""
    if isinstance(constant, float):
        return torch.tensor(constant)
    module, _, name = (constant or "").rpartition(".")
    value = getattr(modules.get(module), name, None) if constant else None
    return value.detach() if isinstance(value, Tensor) and not value.is_meta else None


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
