"""What did not run on the example: it may meet a BatchNorm, or its layer, in another call.

A norm per domain shares its layer with those of other domains, a stem per kind of input shares its BatchNorm with other
stems. An example shows one of them. What is folded into a layer that others use would change their outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from mimicnorm.layers import WEIGHT_LAYERS


def unseen(
    name: str,
    width: int,
    modules: Mapping[str, nn.Module],
    norms: Mapping[str, int],
    used: Collection[str],
    reads: bool = False,
) -> str | None:
    """Say what did not run and may share a BatchNorm or its layer; or return None.

    Args:
        name: The BatchNorm, or what stands in its place.
        width: Its channels.
        modules: All modules by name, in order.
        norms: The channels of all BatchNorms, or of what stands in their places; 0 if they do not show.
        used: The names of those that ran, and of the layers.
        reads: Whether its layers are those that read it, not those before it.
    """
    idle = [n for n in norms if n not in used and norms[n] in (0, width)]
    layers = [n for n, m in modules.items() if isinstance(m, WEIGHT_LAYERS)]
    idle_layers = [n for n in layers if n not in used and _channels(modules[n], reads) == width]
    place = {n: i for i, n in enumerate(modules)}
    path = name.split(".")
    for other in idle:  # norms.1 beside norms.0, target.2.bn beside source.2.bn
        parts = other.split(".")
        alike = len(parts) == len(path) and sum(a != b for a, b in zip(parts, path, strict=True)) == 1
        if alike or not _is_near(other, [n for n in layers if place[n] < place[other]], idle_layers):
            return f"{other} did not run and may share its layer"
    for other in idle_layers:
        if not _is_near(other, [n for n in norms if place[n] > place[other]], idle):
            return f"{other} did not run and may share this BatchNorm"
    return None


def _is_near(name: str, others: Collection[str], idle: Collection[str]) -> bool:
    """Tell whether, in the innermost module around that has any of the others, one of them is idle, too.

    Then both are part of a block that did not run.
    """
    around = name
    while around:
        around = around.rpartition(".")[0]
        inside = [n for n in others if not around or n.startswith(f"{around}.")]
        if inside:
            return not set(inside).isdisjoint(idle)
    return False


def _channels(layer: Any, reads: bool) -> int:
    """Return how many channels a layer reads, or makes."""
    if reads == bool(getattr(layer, "transposed", False)):
        return layer.weight.shape[0]
    return layer.weight.shape[1] * getattr(layer, "groups", 1)
