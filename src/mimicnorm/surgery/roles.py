"""Who is who in a recorded network: which layers each BatchNorm normalised, which layers end branches or make gates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from mimicnorm.surgery import flow
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.plan import Plan

_MATRIX_PRODUCTS = ("einsum", "matmul", "mm", "bmm", "addmm", "baddbmm", "tensordot", "mv")


@dataclass
class Roles:
    """What layers and BatchNorms are to each other.

    Attributes:
        heads: Layers that make the outputs.
        gates: Layers that only make gates.
        owned: BatchNorm -> the layer calls whose output it normalises ("post").
        reached: BatchNorm -> the layer calls that read its output first ("pre").
        layers: Layer to be changed -> its first call and its role.
    """

    heads: set[str]
    gates: set[str]
    owned: dict[str, list[Node]] = field(default_factory=dict)
    reached: dict[str, list[Node]] = field(default_factory=dict)
    layers: dict[str, tuple[Node, str]] = field(default_factory=dict)

    def of_norm(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Return whether a BatchNorm is "post" or "pre", and the layers it normalised."""
        calls = self.owned[name] if name in self.owned else self.reached.get(name, [])
        names = dict.fromkeys(c.layer for c in calls if c.layer is not None)
        return "post" if name in self.owned else "pre", tuple(names)

    def last_layers(self, end: Node) -> tuple[str, ...]:
        """Return the layers that make what ends a branch."""
        calls = [end] if end.norm is None else self.owned.get(end.norm, [])
        return tuple(c.layer for c in calls if c.layer is not None)

    def can_end(self, call: Node) -> bool:
        """Tell whether a call can end a branch: of a BatchNorm that is taken out, or of a layer that is changed."""
        return call.norm in self.owned or call.norm in self.reached or (call.layer in self.layers and call.norm is None)


def assign(graph: Graph, norms: Iterable[str], heads: set[str], plan: Plan) -> Roles:
    """Give every layer and BatchNorm its role; what refuses goes into the plan.

    Args:
        graph: The network.
        norms: The BatchNorms to be taken out.
        heads: Layers that make the outputs.
        plan: Gets refusals and notes.
    """
    roles = Roles(heads, flow.gate_layers(graph))
    bare = [name for name in norms if (calls := graph.calls(name)) and not _owners(roles, name, calls, plan)]
    _branch_last_layers(graph, roles, plan)
    method = plan.method
    if method.changes_heads:
        for call in graph.nodes:
            if call.layer is not None and call.layer in heads and call.norm is None:
                roles.layers.setdefault(call.layer, (call, "head"))
    stands_alone = method.unit_norms or method.keeps_statistics  # what replaces a BatchNorm needs no changed layer
    if bare and not roles.layers and not stands_alone:
        plan.refuse(
            bare[0],
            f"{type(method).__name__} changes convolutions and linear layers, and no BatchNorm follows one",
            "Put bare weights into nn.Linear or nn.Conv, or use NoNorm() to take the BatchNorms out only",
        )
    elif not roles.layers and roles.reached and method.weights != "keep":
        plan.notes.append(
            "no layer is changed: no BatchNorm is beside a convolution or linear layer other than the head"
        )
    return roles


def _owners(roles: Roles, name: str, calls: list[Node], plan: Plan) -> bool:
    """Find the layers of one BatchNorm; False if the weight before it belongs to no layer that can be changed."""
    if any(flow.on_raw_input(call) for call in calls) and not plan.method.keeps_statistics:
        plan.refuse(
            name or "(root)",
            "this BatchNorm normalises the model's own input: data normalisation, not a hidden layer",
            f"Leave it out with where=lambda module, name: name != {name!r}, or normalise the data and remove it",
        )
        return True
    owners = [flow.owner(call) for call in calls]
    if all(o is not None for o in owners):
        roles.owned[name] = [o for o in owners if o is not None]
        for call in roles.owned[name]:
            _take(roles, call, "gate" if call.layer in roles.gates else "owner", plan)
        return True
    reached = [layer for call in calls for layer in flow.reached_layers(call)]
    roles.reached[name] = [r for r in reached if r.layer not in roles.heads and r.layer not in roles.gates]
    for call in roles.reached[name]:
        _take(roles, call, "owner", plan)
    producer = flow.before_norm(calls[0])
    product = producer.op in _MATRIX_PRODUCTS and len(producer.inputs) == 1
    if plan.method.weights == "keep" or producer.layer is not None or not (producer.kind is Kind.LAYER or product):
        return True
    plan.notes.append(
        f"{name}: its input is made by {producer.op} in {producer.where or 'the model itself'}, not by a convolution "
        "or linear layer, so the weight there is neither changed nor initialised"
    )
    return False


def _take(roles: Roles, call: Node, role: str, plan: Plan) -> None:
    assert call.layer is not None
    if call.layer in roles.heads and plan.method.last_norm:
        plan.refuse(
            call.layer,
            "is the head, yet a BatchNorm follows it",
            'Name the layer that makes the logits with head="...", or leave the last BN out with last_norm=False',
        )
    roles.layers.setdefault(call.layer, (call, role))


def _branch_last_layers(graph: Graph, roles: Roles, plan: Plan) -> None:
    """Take the last layers of pre-activation branches: no BatchNorm follows them, yet they end what one began."""
    pre = [c for name in roles.reached for c in graph.calls(name)]
    removed = pre + [c for name in roles.owned for c in graph.calls(name)]
    joins = [(s.operands, removed) for s in flow.sums(graph)]
    # A concat joins whole feature maps as often as branches: there the branch must begin with a BatchNorm.
    concats = [n for n in graph.nodes if n.kind is Kind.CONCAT and n.op not in ("overwrite", "stack")]
    joins += [(n.inputs, pre) for n in concats]
    outside = roles.heads | roles.gates
    for operands, begins in joins:
        for operand in operands:
            path = flow.own_path(operand, operands)
            for last in flow.ends(operand):
                if last.layer is None or last.layer in outside or last.layer in roles.layers:
                    continue
                began = any(path >> c.index & 1 for c in begins)
                if began and any(path >> c.index & 1 and last in flow.reached_layers(c) for c in removed):
                    _take(roles, last, "branch end", plan)
