"""Read a recorded graph: who owns a BatchNorm, where residual branches end.

Pure functions of the graph; they decide nothing about the method.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind

_TO_OWNER = (Kind.VIEW, Kind.PAD, Kind.DROPOUT)
RESHAPED = (*_TO_OWNER, Kind.POOL, Kind.RESIZE, Kind.CONSTANT)
_TO_LAYERS = (*RESHAPED, Kind.ACTIVATION)
_TO_END = (*_TO_LAYERS, Kind.PRODUCT)
_RELUS, _CLAMPS = ("relu", "relu6"), ("clamp", "clip", "clamp_min", "hardtanh", "threshold")


def carried(node: Node) -> Node | None:
    """The operand that an operation passes on: of a gate, the gated one; None where there is no such one.

    A product carries the operand of its own shape that the other was computed from (squeeze-excite,
    swish), or that the other is broadcast to, or that comes from a BatchNorm; ``x.expand_as(y)`` carries its first
    argument.
    """
    if not node.inputs:
        return None
    if node.kind in (Kind.ACTIVATION, Kind.POOL) and len(set(node.inputs)) > 1:
        return None  # torch.maximum(a, b): neither alone
    if node.kind is not Kind.PRODUCT:
        return node.inputs[0]  # what others only shift comes first
    a, b = node.inputs[:2]
    if a is b:
        return a
    whole = [n for n in (a, b) if n.shape == node.shape]
    for n in whole:
        if (b if n is a else a).ancestors >> n.index & 1:
            return n
    whole = whole if len(whole) == 1 else [n for n in whole if _is_normed(n)]
    return whole[0] if len(whole) == 1 else None


def _is_normed(node: Node) -> bool:
    return walk_back(node, _TO_OWNER).kind is Kind.NORM


def walk_back(node: Node, through: tuple[Kind, ...], stop: Callable[[Node], bool] = lambda _: False) -> Node:
    """Follow carried operands back through operations of some kinds to the first of another kind."""
    while node.kind in through and not stop(node):
        before = carried(node)
        if before is None:
            break
        node = before
    return node


def owner(norm: Node) -> Node | None:
    """The weight layer that alone produces a BatchNorm's input, if nothing but BatchNorms reads its output."""
    node = walk_back(norm.inputs[0], _TO_OWNER)
    alone = node.kind is Kind.LAYER and node.layer is not None and _only_normalised(node)
    return node if alone else None


def before_norm(norm: Node) -> Node:
    """What made a BatchNorm's input: the first operation before views, activations and their like."""
    return walk_back(norm.inputs[0], _TO_LAYERS)


def read_once(node: Node) -> bool:
    """Whether a tensor has one reader: only then may what follows write into it."""
    return len(node.users) + node.is_output == 1


def _only_normalised(node: Node) -> bool:
    """Whether BatchNorms alone read a tensor: one, several (of its chunks, say), through views on the way."""
    if node.is_output or not node.users:
        return False
    handed_on = [u for u in node.users if u.kind in _TO_OWNER and carried(u) is node]
    return all(u.kind is Kind.NORM or (u in handed_on and _only_normalised(u)) for u in node.users)


def on_raw_input(norm: Node) -> bool:
    """Whether a BatchNorm normalises the model's input."""
    return walk_back(norm.inputs[0], RESHAPED).kind is Kind.INPUT


def reached_layers(node: Node) -> list[Node]:
    """The weight layers that a tensor reaches first, through activations, pooling, dropout, views and modulation."""
    layers: list[Node] = []
    front, seen = [(node, user) for user in node.users], set()
    while front:
        before, user = front.pop()
        if user in seen:
            continue
        if user.kind is Kind.LAYER:
            layers += [user] if user.layer is not None else []
        elif _passes(before, user):
            front += [(user, u) for u in user.users]
        else:
            continue  # perhaps it is come upon again, from what it carries
        seen.add(user)
    return sorted(layers, key=lambda n: n.index)


def _passes(before: Node, user: Node) -> bool:
    """Whether an operation that reads a tensor passes it on."""
    if user.kind is Kind.PRODUCT:
        return _self_gate(user) or (carried(user) is before and _modulated(user))
    return user.kind in _TO_LAYERS and not (user.kind is Kind.CONSTANT and carried(user) is not before)


def _modulated(product: Node) -> bool:
    """Whether a tensor is scaled by numbers that come from elsewhere: a conditional norm's gamma."""
    gated = carried(product)
    if gated is None:
        return False
    others = [n for n in product.inputs if n is not gated]
    return all(n.shape != gated.shape and not n.ancestors >> gated.index & 1 for n in others)


def reaches_activation(node: Node) -> bool:
    """Whether an activation reads a tensor, through views, padding and dropout."""
    through = (u for u in node.users if u.kind in _TO_OWNER)
    return any(u.kind is Kind.ACTIVATION for u in node.users) or any(map(reaches_activation, through))


def gate_layers(graph: Graph) -> set[str]:
    """Weight layers that only make gates (squeeze-excite, attention over channels or positions).

    What an output depends on by way of gates alone: cut the edge from each gate to its product, and these layers
    are cut off.
    """
    reached, wanted = 0, 0
    front = list(graph.outputs)
    for output in graph.outputs:
        wanted |= output.ancestors
    while front:
        node = front.pop()
        if reached >> node.index & 1:
            continue
        reached |= 1 << node.index
        gated = carried(node) if node.kind is Kind.PRODUCT and len(set(node.inputs)) > 1 else None
        front += node.inputs if gated is None else (gated,)
    cut_off = wanted & ~reached
    return {n.layer for n in graph.nodes if n.layer is not None and cut_off >> n.index & 1}


def gated_by_sigmoid(product: Node) -> bool:
    """Whether a product is of data and a sigmoid of something learnt: squeeze-excite and its like, but not SiLU."""
    gated = carried(product)
    gates = [walk_back(n, _TO_OWNER) for n in product.inputs if n is not gated]
    return gated is not None and not _self_gate(product) and any(g.op in ("sigmoid", "hardsigmoid") for g in gates)


def _self_gate(product: Node) -> bool:
    """``x * f(x)`` without a weight in f: an activation written out."""
    gated = carried(product)
    if gated is None:
        return False
    front, seen = [product], set()
    while front:
        for parent in front.pop().inputs:
            if parent in seen or gated.ancestors >> parent.index & 1:
                continue
            if parent.kind is Kind.LAYER:
                return False
            seen.add(parent)
            front.append(parent)
    return True


@dataclass(frozen=True)
class Sum:
    """A sum of two or more data-dependent operands, nested ones flattened.

    Attributes:
        node: The last addition.
        operands: What is summed.
        carrier: The operand that gets no scalar (the skip), or None on a tie.
    """

    node: Node
    operands: tuple[Node, ...]
    carrier: Node | None

    @property
    def branches(self) -> tuple[Node, ...]:
        """The operands that are not the carrier."""
        return tuple(n for n in self.operands if n is not self.carrier)


def ends(operand: Node) -> list[Node]:
    """Where an operand of a sum comes from: the first BatchNorm, weight layer, sum, concat or input before it.

    More than one where it is the larger of several tensors.
    """
    stop = walk_back(operand, _TO_END)
    several = stop.kind in (Kind.ACTIVATION, Kind.POOL) and len(set(stop.inputs)) > 1
    return [e for n in dict.fromkeys(stop.inputs) for e in ends(n)] if several else [stop]


def ends_flat(operand: Node) -> bool:
    """Whether an activation without slope at zero (ReLU) stands between an operand of a sum and its end."""
    return _flat_at_zero(walk_back(operand, _TO_END, _flat_at_zero))


def _flat_at_zero(node: Node) -> bool:
    bounds = [*node.settings.get("positional", ()), *node.settings.values()]
    return node.op in _RELUS or (node.op in _CLAMPS and any(b == 0 for b in bounds if isinstance(b, (int, float))))


def summands(node: Node) -> tuple[Node, ...] | None:
    """What a node adds up: the operands of an addition, or the stacked tensors of ``stack(...).sum(0)``."""
    if node.kind is Kind.SUM:
        return node.inputs
    stacked = node.inputs[0] if node.inputs else None
    if node.op in ("sum", "mean") and stacked is not None and stacked.op == "stack":
        return stacked.inputs if read_once(stacked) and len(node.shape) == len(stacked.shape) - 1 else None
    return None


def sums(graph: Graph) -> list[Sum]:
    """Every sum of the graph, in execution order, with its carrier."""
    weights = sum(1 << n.index for n in graph.nodes if n.kind is Kind.LAYER)
    all_sums = []
    for node in graph.nodes:
        if summands(node) is None or (read_once(node) and node.users and node.users[0].kind is Kind.SUM):
            continue  # a nested sum with one reader is part of that reader
        operands = tuple(_flatten(node))
        if len(set(operands)) > 1:
            all_sums.append(Sum(node, operands, _carrier(operands, weights)))
    return all_sums


def _flatten(node: Node) -> list[Node]:
    flat: list[Node] = []
    waiting = list(reversed(summands(node) or ()))
    while waiting:
        operand = waiting.pop()
        if operand.kind is Kind.SUM and read_once(operand):
            waiting += reversed(operand.inputs)
        else:
            flat.append(operand)
    return flat


def own_path(operand: Node, operands: Iterable[Node]) -> int:
    """Bit set of an operand's ancestors that the operands do not all share."""
    shared = -1
    for other in operands:
        shared &= other.ancestors
    return operand.ancestors & ~shared


def _carrier(operands: tuple[Node, ...], weights: int) -> Node | None:
    for operand in operands:
        if all(other.ancestors >> operand.index & 1 for other in operands):
            return operand
    counts = {n: (own_path(n, operands) & weights).bit_count() for n in operands}
    fewest = min(counts.values())
    holders = [n for n, count in counts.items() if count == fewest]
    return holders[0] if fewest == 0 or len(holders) == 1 else None


def uses(graph: Graph) -> Counter[str]:
    """How often each weight layer and each BatchNorm is used."""
    return Counter(name for n in graph.nodes for name in (n.layer, n.norm) if name is not None)
