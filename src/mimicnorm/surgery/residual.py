"""Residual branches: where they end, and the variance they lead one to expect."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from mimicnorm.methods import Method
from mimicnorm.surgery import flow
from mimicnorm.surgery.attention import VARIANCE
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind


@dataclass(frozen=True)
class Branch:
    """An operand of a sum that is not its skip, and that ends in a BatchNorm or layer to be changed.

    Attributes:
        ends: The calls that end it; more than one where it is the larger of several tensors.
        last_layers: For each end, the layers that make it.
        layers: The weight layers on it, except those of gates.
        beside_skip: Whether the sum has a skip at all.
        wakes: Whether a branch that starts at zero would get a gradient: not so if a ReLU comes after its end.
        path: Bit set of the nodes on it.
    """

    ends: tuple[Node, ...]
    last_layers: tuple[tuple[str, ...], ...]
    layers: tuple[str, ...]
    beside_skip: bool
    wakes: bool
    path: int = 0

    @property
    def name(self) -> str:
        """What it ends in."""
        end = self.ends[0]
        return (end.norm if end.norm is not None else end.layer) or "(root)"


def branches(
    graph: Graph,
    is_end: Callable[[Node], bool],
    last_layers: Callable[[Node], tuple[str, ...]],
    gates: Collection[str],
) -> list[Branch]:
    """Return every residual branch whose end can be changed, in execution order.

    Args:
        graph: The network.
        is_end: Whether a call can end a branch.
        last_layers: The layers that make what a call returns.
        gates: Layers that only make gates.
    """
    all_branches = []
    for s in flow.sums(graph):
        for operand in s.branches:
            path = flow.own_path(operand, s.operands)  # an end on the common trunk ends no branch
            ends = tuple(e for e in flow.ends(operand) if path >> e.index & 1 and is_end(e))
            if ends:
                names = (n.layer for n in graph.nodes if n.layer is not None and path >> n.index & 1)
                layers = tuple(dict.fromkeys(name for name in names if name not in gates))
                wakes, lasts = not flow.ends_flat(operand), tuple(map(last_layers, ends))
                all_branches.append(Branch(ends, lasts, layers, s.carrier is not None, wakes, path))
    return all_branches


def ends_around(nodes: Iterable[Node], candidates: Iterable[Branch]) -> set[Node]:
    """Return the calls that end the innermost branch around each node, of nodes that are on a branch."""
    by_length = sorted(candidates, key=lambda branch: branch.path.bit_count())
    innermost = (next((b for b in by_length if b.path >> node.index & 1), None) for node in nodes)
    return {end for branch in innermost if branch is not None for end in branch.ends}


def variance(
    graph: Graph,
    method: Method,
    ends: Collection[Node],
    is_unit: Callable[[Node], bool],
    damped: Collection[Node] = (),
) -> dict[Node, float]:
    """Predict the variance before each activation: 1 after inputs and norms, added at sums, averaged at concats.

    Args:
        graph: The network.
        method: Knows the variance after a branch's scalar.
        ends: The calls that end a branch.
        is_unit: Whether a call makes its output of variance 1 whatever it is given.
        damped: Ends of branches around attention, which start smaller than the others.
    """
    v: dict[Node, float] = {}
    for node in graph.nodes:
        before = [v[n] for n in node.inputs]
        if not before or node.kind is Kind.OTHER_NORM:
            v[node] = 1.0
        elif (summands := flow.summands(node)) is not None:
            alpha = node.settings.get("alpha", 1.0)  # torch.add(a, b, alpha=...)
            powers = (1.0, *[float(alpha) ** 2] * (len(summands) - 1))
            v[node] = sum(p * v[n] for p, n in zip(powers, summands, strict=True))
            v[node] /= len(summands) ** 2 if node.op == "mean" else 1
        elif node.kind is Kind.CONCAT:
            sizes = [n.shape.numel() for n in node.inputs]
            weighted = sum(a * size for a, size in zip(before, sizes, strict=True))
            v[node] = weighted / sum(sizes) if sum(sizes) else 1.0
        elif node.kind is Kind.PRODUCT:
            carried = flow.carried(node)
            v[node] = v[carried] if carried is not None else sum(before) / len(before)
            # A sigmoid's gate starts near 1/2.
            v[node] *= 0.25 if method.unit_layers and flow.gated_by_sigmoid(node) else 1.0
        else:
            v[node] = 1.0 if is_unit(node) else before[0]
        if node in ends:
            v[node] = method.branch_variance(v[node]) * (VARIANCE if node in damped else 1.0)
    return v
