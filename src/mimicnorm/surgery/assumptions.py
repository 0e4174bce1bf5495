"""Whether the theory's assumptions hold for a recorded network: if not, its weights are calibrated on a batch."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping

from torch import nn

from mimicnorm.surgery.gains import activation, constant_value, feed
from mimicnorm.surgery.graph import Node
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.taps import Taps, taps

_DRIFT_LIMIT = 1.01  # per layer: 1.6 over 50 layers
_BEND_LIMIT = 0.1  # relative error of the variance after an activation that is not homogeneous, to first order
_TAPS_LIMIT = 2.0  # factor on the variance of one layer, up or down: 3x3 on 2x2 after a ReLU leaves 0.56
_COPIES_ELSEWHERE = ("fold", "unfold", "masked_select")  # views that add up, pad or choose by value


def without_formula(
    nodes: Iterable[Node],
    planned: Container[str],
    v: Mapping[Node, float],
    modules: Mapping[str, nn.Module],
    centring: Container[str],
) -> str | None:
    """The first operation on the way whose effect on the variance the theory does not give, in words.

    Max pooling and zero padding count as covered, as in the paper: they move the variance by a bounded factor. Where
    most taps of a layer fall on padding, they do not.

    Args:
        nodes: The operations.
        planned: The layers that are given their initial weights.
        v: The predicted variance of each tensor.
        modules: Of the network, by name.
        centring: Layers that are centred, and BatchNorms that stay: what takes a constant out of its input.
    """
    for node in nodes:
        reason = None
        if node.kind in (Kind.RESIZE, Kind.SOFTMAX, Kind.OPAQUE) or node.op == "masked_fill":
            reason = node.op
        elif node.kind is Kind.PRODUCT:
            reason = "a gate or product"
        elif node.kind is Kind.POOL and "max" not in node.op:
            reason = node.op
        elif node.kind is Kind.CONSTANT:
            reason = _constant(node, modules, centring)
        elif node.kind is Kind.LAYER and (node.layer is None or node.layer not in planned):
            reason = f"layer {node.layer or node.op!r} without BatchNorm"
        elif node.kind is Kind.LAYER and node.layer is not None:
            counts, fed = taps(node, modules[node.layer]), feed(node, modules)
            factor = counts.variance(fed.mean, fed.second_moment, node.layer in centring)
            if not 1 / _TAPS_LIMIT < factor < _TAPS_LIMIT:
                return _few_taps(node.layer, counts, factor)
        elif node.kind is Kind.ACTIVATION:
            known = activation(node, modules)
            if known is None:
                reason = node.op
            elif known[1].variance_slope > _DRIFT_LIMIT:
                return f"under {known[0]} the variance drifts with depth"
            elif abs(math.log(v[node.inputs[0]]) * (known[1].variance_slope - 1)) > _BEND_LIMIT:
                reason = f"{node.op} of a variance that is not 1"
        if reason is not None:
            return f"no formula for {reason}{f' in {node.where}' if node.where else ''}"
    return None


def _few_taps(name: str, counts: Taps, factor: float) -> str:
    share = counts.acting / counts.counted
    return (
        f"only {share:.0%} of the taps of {name} ({counts.geometry}) meet its input: variance {factor:.2g} instead of 1"
    )


def _constant(node: Node, modules: Mapping[str, nn.Module], centring: Container[str]) -> str | None:
    """Why the theory does not cover an operation with a constant; None if that is zero, or taken out again."""
    if node.op not in ("add", "sub"):
        return f"{node.op} by a constant"
    if len(set(node.inputs)) > 1:  # FiLM
        return f"{node.op} of a shift computed from data"
    values = [constant_value(c, modules) for c in node.constants]
    if values and all(value is not None and not value.any() for value in values):
        return None
    one_number = values and all(value is not None and value.numel() == 1 for value in values)
    return None if one_number and _taken_out(node, modules, centring) else f"{node.op} of a constant other than zero"


def _taken_out(node: Node, modules: Mapping[str, nn.Module], centring: Container[str]) -> bool:
    """Whether all that reads a tensor first takes one number added to it out again: centred layers without padding."""
    for user in node.users:
        if user.kind is Kind.LAYER:
            counts = taps(user, modules[user.layer]) if user.layer is not None and user.layer in centring else None
            if counts is None or counts.acting < counts.kernel:
                return False
        elif user.kind is Kind.NORM:
            if user.norm is None or user.norm not in centring:
                return False
        elif not (_moves_values(user) and _taken_out(user, modules, centring)):
            return False
    return True


def _moves_values(node: Node) -> bool:
    """Whether an operation only moves or chooses values, or adds a constant to them."""
    if node.kind is Kind.CONSTANT:
        return node.op in ("add", "sub") and len(set(node.inputs)) == 1
    return (node.kind is Kind.VIEW and node.op not in _COPIES_ELSEWHERE) or (
        node.kind is Kind.POOL and "max_pool" in node.op
    )
