"""Which layers can take up a factor and an addend per channel, as the recorded graph shows it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from mimicnorm.deploy.affine import Affine
from mimicnorm.layers import LastNormed, has_own_forward
from mimicnorm.surgery import probe
from mimicnorm.surgery.flow import read_once
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind

_RESHAPES = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "unflatten", "contiguous", "clone", "view_as")
_RESHAPES += ("reshape_as", "ravel")
_MEANS = ("mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
_FRESH = (Kind.LAYER, Kind.SUM, Kind.CONCAT, Kind.POOL)

Calls = list[tuple[Node, Node]]
Modules = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Place:
    """The layers that take an affine up: on their output channels (``after``), or on their input channels."""

    layers: tuple[str, ...]
    after: bool


def calls_of(graph: Graph, name: str) -> Calls:
    """Input and output of a module that does arithmetic per channel, for each of its calls."""
    pairs = []
    for out in graph.nodes:
        if name in out.made_by:
            x = out
            while x.where == name and (x is out or name not in x.made_by):  # it may be called on its own output
                x = x.inputs[0]
            pairs.append((x, out))
    return pairs


def find_place(graph: Graph, modules: Modules, calls: Calls, affine: Affine) -> Place | None:
    """Find the layers that can do what a module between them does, such that it becomes an identity; None if none can.

    An identity passes its input on. So either nothing else reads that input, or nothing writes into the output: an
    in-place activation must not overwrite a skip connection. A module that changes the memory format, for views after
    it, may go where layers alone read its output. What leads to no output may not be among the readers that are
    recorded: then it stays apart.
    """
    if not all(any(u.where == out.where for u in x.users) for x, out in calls):
        return None
    relaid = any(out.op == "contiguous" for _, out in calls)
    if affine.is_identity:
        alone = not relaid and all(read_once(x) and not x.tapped and x.kind in _FRESH for x, _ in calls)
        return Place((), True) if alone or _readers(graph, modules, calls, affine) else None
    name = None if relaid else _producer(graph, modules, [x for x, _ in calls], affine)
    if name is None and (readers := _readers(graph, modules, calls, affine)):
        return Place(readers, False)
    if name is None and not relaid and affine.scale is None and len(calls) == 1:
        name = _addend(graph, modules, calls[0][1], affine)
    return None if name is None else Place((name,), True)


def _producer(graph: Graph, modules: Modules, inputs: list[Node], affine: Affine) -> str | None:
    """The layer that makes these tensors, and nothing else."""
    made = [_layer_call(x, affine.channel_dim % len(x.shape)) for x in inputs]
    names = {node.layer if node is not None else None for node in made}
    name = names.pop()
    if names or name is None or set(graph.calls(name)) != set(made) or not _applies_its_own(name, modules, graph):
        return None
    return name


def _readers(graph: Graph, modules: Modules, calls: Calls, affine: Affine) -> tuple[str, ...]:
    """The layers that alone read a module's output, without padding; empty if anything else does."""
    outputs = [out for _, out in calls]
    users = [u for out in outputs for u in out.users]
    names = dict.fromkeys(u.layer for u in users)
    if any(out.is_output or out.tapped for out in outputs):
        return ()
    for name in names:
        if name is None or not set(graph.calls(name)) <= set(users) or not _applies_its_own(name, modules, graph):
            return ()
        dims = {len(out.shape) - 1 if isinstance(modules[name], nn.Linear) else 1 for out in outputs}
        same = affine.width == 1 or dims == {affine.channel_dim % len(out.shape) for out in outputs}
        if not same or not is_unpadded(modules[name]):
            return ()
    return tuple(map(str, names))


def _addend(graph: Graph, modules: Modules, out: Node, affine: Affine) -> str | None:
    """A layer that makes another operand of the sum that reads a shifted tensor, as in RepVGG."""
    if not read_once(out) or out.tapped:
        return None
    sums = [u for u in out.users if _adds(u)]
    while sums:
        total = sums.pop()
        for operand in (n for n in total.inputs if n is not out and n.shape == total.shape):
            if _adds(operand) and read_once(operand) and not operand.tapped:
                sums.append(operand)
            elif (name := _producer(graph, modules, [operand], affine)) is not None:
                return name
    return None


def _layer_call(node: Node, dim: int) -> Node | None:
    """The call of a layer that makes a tensor, with its output channels along ``dim``, by reshapes and means alone.

    None if there is none, or if anything else reads what it makes.
    """
    while read_once(node) and not node.tapped:
        if node.kind is Kind.LAYER:
            channels = 1 if node.op.startswith("conv") else len(node.shape) - 1
            return node if channels == dim else None
        if node.op not in (*_RESHAPES, *_MEANS):
            return None
        before = node.inputs[0]
        if node.op in _MEANS and any(d <= dim for d in _reduced(node, before)):
            return None
        if node.op in _RESHAPES:  # in the order of memory, a channel stays one if as many values come before it
            ahead, size = node.shape[:dim].numel(), node.shape[dim]
            places = [d for d, n in enumerate(before.shape) if n == size and before.shape[:d].numel() == ahead]
            if not places or node.dtype != before.dtype:
                return None
            dim = places[0]
        node = before
    return None


def _reduced(node: Node, before: Node) -> list[int]:
    """The dimensions that a mean is taken over; -1 if the call does not say."""
    rank = len(before.shape)
    if node.op != "mean":
        return list(range(rank - int(node.op[-2]), rank))
    return [int(word) % rank for word in node.arguments if word.lstrip("-").isdigit()] or [-1]


def _adds(node: Node) -> bool:
    """Whether a node is ``a + b``, without a factor."""
    return node.kind is Kind.SUM and node.op == "add" and not node.settings


def _applies_its_own(name: str, modules: Modules, graph: Graph) -> bool:
    """Whether a layer applies its weight and bias as PyTorch's own does, in every use; foreign forwards are probed."""
    calls = graph.calls(name)
    if not all(call.inside_module and not call.derived_weight and call.inputs for call in calls):
        return False
    layer = copy.copy(modules[name])
    layer.__class__ = own_class(layer)
    probed = probe.layer(layer, calls[0].inputs[0].shape)
    return probed.takes_bias and probed.follows


def is_unpadded(layer: Any) -> bool:
    """Whether every output of a layer is a sum over as many inputs, none of them padding."""
    if has_own_forward(own_class(layer)) or getattr(layer, "transposed", False):
        return False
    padding = getattr(layer, "padding", 0)
    return padding == "valid" or not any(padding if isinstance(padding, tuple) else (padding,))


def own_class(layer: Any) -> type[nn.Module]:
    """A layer's class; of a head, its class without the last BN."""
    return layer.base if isinstance(layer, LastNormed) else type(layer)
