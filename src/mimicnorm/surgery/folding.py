"""Whether a BatchNorm's beta can become its layer's bias, and its residual scalar go into its layers' weights.

If not, the BatchNorm becomes a ``Shift`` or a ``Scale``. Both are always right, but a ``Scale`` saves its input for
backward.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mimicnorm.methods.base import Method, NormFacts
from mimicnorm.methods.edits import LayerEdit
from mimicnorm.surgery import code, flow, probe
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.roles import Roles
from mimicnorm.surgery.unseen import unseen

_LINEAR_POOLS = ("mean", "avg_pool1d", "avg_pool2d", "avg_pool3d")
_LINEAR_POOLS += ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")


class Folder:
    """Looks at each BatchNorm and its layers.

    Args:
        graph: The network.
        modules: Its modules, by name.
        norms: The names of the BatchNorms to be taken out.
        roles: The layers of each.
        edit_of: What is planned for a layer with a scalar in its weight; None if it cannot take one.
        probes: What each layer allows.
        method: Knows which layers take a scalar.
    """

    def __init__(
        self,
        graph: Graph,
        modules: Mapping[str, nn.Module],
        norms: Collection[str],
        roles: Roles,
        edit_of: Callable[[str], LayerEdit | None],
        probes: Mapping[str, probe.LayerProbe],
        method: Method,
    ):
        self.graph, self.modules = graph, modules
        self.roles, self.edit_of, self.probes, self.method = roles, edit_of, probes, method
        self.uses: Counter[str] = flow.uses(graph)
        in_other_mode = flow.uses(graph.other_mode) if graph.other_mode is not None else ()
        self.used = {*self.uses, *graph.used_elsewhere, *(n for n in in_other_mode if n not in norms)}
        self.widths = {name: probe.channels(modules[name]) for name in norms}

    def facts(self, name: str, positions: int) -> NormFacts:
        """Return what is possible for a BatchNorm that has so many values per sample and channel."""
        module, calls = self.modules[name], self.graph.calls(name)
        facts = NormFacts(
            channels=probe.channels(module),
            positions=positions,
            has_beta=getattr(module, "bias", None) is not None,
            before_activation=any(flow.reaches_activation(c) for c in calls),
            before_relu=bool(calls) and all(map(_before_relu, calls)),
            scale_into=self._scale_into(name, calls),
            obstacle=f"before {', '.join(self.roles.of_norm(name)[1][:3]) or 'no layer'}",
        )
        if not calls:
            return replace(facts, obstacle="never called on the example")
        return self._after_layers(name, calls, facts) if name in self.roles.owned else facts

    def _after_layers(self, name: str, calls: list[Node], facts: NormFacts) -> NormFacts:
        """Add what the layers before a BatchNorm can take up."""
        owned, (_, owners) = self.roles.owned[name], self.roles.of_norm(name)
        layer = owners[0]
        read_once = all(flow.read_once(o) and not o.tapped for o in owned)
        # Layer and BatchNorm meet in every call of either, and in nothing else: they may be used as one.
        paired = len(owners) == 1 and self.uses[layer] == len(calls) == len(set(owned))
        unseen = self._unseen(name)
        alike = self._alike_in_other_mode(name, (layer,))
        alone = paired and read_once and alike and uses_are_calls(self.graph, layer) and unseen is None
        direct = all(c.inputs[0] is o for c, o in zip(calls, owned, strict=True))
        takes_beta = alone and direct and self._takes_beta(name, layer, owned[0])
        obstacle = "beta cannot become its layer's bias" if alone else "its layer is also used without it"
        if not facts.has_beta:
            obstacle = "between it and its layer is a view, which an in-place activation must not write into"
        if unseen is not None:
            obstacle = unseen
        if not read_once:
            obstacle = "its layer's output is read more than once"
        if not alike:
            obstacle = f"in {'evaluation' if self.graph.training else 'training'} mode its layer is used without it"
        if any(o.tapped for o in owned):
            obstacle = "a hook or an attribute may keep its layer's output"
        return replace(
            facts,
            removable=direct and read_once and alike,
            beta_into=layer if takes_beta else None,
            norm_into=layer if alone and direct and self._takes_norm(name, layer, owned[0]) else None,
            obstacle=obstacle,
        )

    def _scale_into(self, name: str, calls: list[Node]) -> tuple[str, ...]:
        """Return the layers whose weights can take the scalar of a BatchNorm; empty if one of them cannot.

        They make its input by linear operations (views, concats, average pooling), and nothing else reads them.
        """
        producers = _producers(calls)
        names = dict.fromkeys(n.layer for n in producers)
        if self._unseen(name) is not None or any(not self._takes_scale(n, producers) for n in names):
            return ()
        layers = tuple(n for n in names if n is not None)
        if not self._alike_in_other_mode(name, layers):
            return ()
        if len(calls) > 1 and len(layers) > 1:
            return ()  # one scalar for several branches would become several, each planned for the first of them
        trained = {self.modules[n]._parameters["weight"].requires_grad for n in layers}  # pyrefly: ignore
        return layers if len(trained) == 1 else ()  # the scalar of a frozen layer is frozen

    def _alike_in_other_mode(self, name: str, layers: tuple[str, ...]) -> bool:
        """Tell whether these layers make nothing but this BatchNorm's input in the other mode, too."""
        other = self.graph.other_mode
        if other is None:
            return True
        producers = _producers(other.calls(name))
        calls = [call for layer in layers for call in other.calls(layer)]
        dropped = other.training and bool(self.graph.norms() - other.norms())
        if dropped and any(code.names_mode(self.modules[_around_both(name, layer)]) for layer in layers):
            return False  # what a block reads in training is not known if it was dropped by chance
        if not calls and not other.calls(name):
            return True
        return all(c in producers for c in calls) and all(uses_are_calls(other, layer) for layer in layers)

    def _takes_scale(self, name: str | None, producers: list[Node]) -> bool:
        if name is None or name in self.roles.heads or name in self.roles.gates:
            return False
        if not set(self.graph.calls(name)) <= set(producers) or (edit := self.edit_of(name)) is None:
            return False
        takes = self.probes[name].scales_uncentred if edit.action == "keep" else self.probes[name].scales
        return takes and edit.scale is None and (edit.action == "standardise" or self.method.branch_factor == 1.0)

    def _unseen(self, name: str) -> str | None:
        """Say what did not run and may share a BatchNorm or its layer; or return None."""
        return unseen(name, probe.channels(self.modules[name]), self.modules, self.widths, self.used)

    def _takes_norm(self, name: str, layer: str, call: Node) -> bool:
        """Tell whether a layer can take up the trained BatchNorm directly after it."""
        edit = self.edit_of(layer)
        mean = getattr(self.modules[name], "running_mean", None)
        module = self.modules[layer]
        computed = getattr(module, "bias", None) is not None and module._parameters.get("bias") is None
        return edit is not None and not computed and self.probes[layer].keeps and _fits(mean, module, call)

    def _takes_beta(self, name: str, layer: str, call: Node) -> bool:
        """Tell whether a BatchNorm's beta can become (or join) the bias of the layer directly before it."""
        beta: Any = getattr(self.modules[name], "bias", None)
        module = self.modules[layer]
        if not _fits(beta, module, call):
            return False
        bias = getattr(module, "bias", None)
        if bias is None or not self.probes[layer].takes_bias:
            return self.probes[layer].takes_bias
        if module._parameters.get("bias") is None:
            return False  # it is computed from others (a parametrization), and what is added to it would be lost
        shared = sum(p is bias for m in self.modules.values() for p in m._parameters.values()) > 1
        return bias.requires_grad == beta.requires_grad and not shared  # else one would be frozen or trained by another


def _around_both(name: str, other: str) -> str:
    """Return the name of the innermost module that has both inside."""
    pairs = zip(name.split("."), other.split("."), strict=False)
    return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _producers(calls: list[Node]) -> list[Node]:
    """Return the layers that make the input of some calls by linear operations; empty if anything else reads them."""
    on_the_way, front = set(calls), [c.inputs[0] for c in calls]
    producers: list[Node] = []
    while front:
        node = front.pop()
        if node in on_the_way:
            continue
        on_the_way.add(node)
        if node.kind is Kind.LAYER:
            producers.append(node)
        elif _is_linear(node):
            front += node.inputs if node.kind is Kind.CONCAT else node.inputs[:1]  # others are masks and indices
        else:
            return []
    before = on_the_way.difference(calls)
    if any(n.tapped or n.is_output or not on_the_way.issuperset(n.users) for n in before):
        return []
    return sorted(producers, key=lambda n: n.index)


def _fits(per_channel: Any, layer: Any, call: Node) -> bool:
    """Tell whether values of a BatchNorm lie along a layer's outputs and have its weight's type."""
    channels = 1 if call.op.startswith("conv") else len(call.shape) - 1  # where the layer puts its outputs
    if per_channel is None or channels != 1:
        return False
    return per_channel.shape == call.shape[1:2] and per_channel.dtype == layer.weight.dtype


def _before_relu(call: Node) -> bool:
    """Tell whether an in-place ReLU, and nothing else, reads a BatchNorm's output."""
    return flow.read_once(call) and not call.tapped and all(u.op == "relu" and u.in_place for u in call.users)


def _is_linear(node: Node) -> bool:
    """Tell whether an operation on data gives s times the output for s times the input."""
    if node.kind is Kind.PAD:
        given = (*node.settings.get("positional", ())[1:], node.settings.get("value"))
        return not any(value for value in given if isinstance(value, (int, float)))
    if node.kind is Kind.CONCAT:  # what is not data has no scalar
        return sum(n.shape.numel() for n in node.inputs) >= node.shape.numel()
    if node.kind is Kind.DROPOUT:
        return "alpha" not in node.op  # it puts in other numbers than zero
    # An overwrite with one operand writes a constant; after a detach a scalar would not train.
    return node.op in _LINEAR_POOLS or (node.kind is Kind.VIEW and node.op not in ("overwrite", "detach"))


def uses_are_calls(graph: Graph, layer: str) -> bool:
    """Tell whether every use of a layer's weight is a call of the layer."""
    return layer not in graph.used_elsewhere and all(call.inside_module for call in graph.calls(layer))
