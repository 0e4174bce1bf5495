"""Residual branches: where they end, how deep they are, and the variance they lead one to expect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from mimicnorm.surgery import flow
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind


@dataclass(frozen=True)
class Branch:
    """An operand of a sum that is not its skip, and that ends in a BatchNorm or layer to be changed.

    Attributes:
        ends: The calls that end it; more than one where it is the larger of several tensors.
        layers: The weight layers on it, but those of gates.
        beside_skip: Whether the sum has a skip at all.
        wakes: Whether a branch that starts at zero would get a gradient: not so if a ReLU comes after its end.
        path: Bit set of the nodes on it.
    """

    ends: tuple[Node, ...]
    layers: tuple[str, ...]
    beside_skip: bool
    wakes: bool
    path: int = 0


def branches(graph: Graph, is_end: Callable[[Node], bool], gates: set[str]) -> list[Branch]:
    """Every residual branch whose end can be changed, in execution order."""
    found = []
    for s in flow.sums(graph):
        for operand in s.branches:
            own = flow.own_path(operand, s.operands)  # an end on the common trunk ends no branch
            ends = tuple(e for e in flow.ends(operand) if own >> e.index & 1 and is_end(e))
            if ends:
                calls = (n for n in graph.nodes if n.layer is not None and own >> n.index & 1)
                layers = tuple(dict.fromkeys(n.layer for n in calls if n.layer is not None and n.layer not in gates))
                found.append(Branch(ends, layers, s.carrier is not None, not flow.ends_flat(operand), own))
    return found


def ends_around(nodes: Iterable[Node], found: Iterable[Branch]) -> set[Node]:
    """The calls that end the innermost branch around each node, of nodes that are on a branch."""
    by_length = sorted(found, key=lambda branch: branch.path.bit_count())
    innermost = (next((b for b in by_length if b.path >> node.index & 1), None) for node in nodes)
    return {end for branch in innermost if branch is not None for end in branch.ends}


def fixup_factors(found: Iterable[Branch], last: Callable[[Node], Iterable[str]]) -> dict[str, tuple[float, str]]:
    """Fixup's factor on each layer's starting weights, and why: 0 at a branch's end, else L^(-1/(2m-2)).

    A layer on several branches, one inside the other, goes by the innermost.

    Args:
        found: The L branches.
        last: The layers that make what a call ends a branch with.
    """
    found = sorted(found, key=lambda branch: -len(branch.layers))
    factors: dict[str, tuple[float, str]] = {}
    for branch in found:
        m = len(branch.layers)
        if m > 1:
            factor = len(found) ** (-1 / (2 * m - 2))
            factors |= dict.fromkeys(branch.layers, (factor, f"one of {m} layers in one of {len(found)} branches"))
    ends = (name for branch in found for end in branch.ends for name in last(end))
    return factors | dict.fromkeys(ends, (0.0, "starts at zero: the last layer of its branch"))


def variance(
    graph: Graph,
    ends: set[Node],
    behind: Callable[[float], float],
    resets: Callable[[Node], bool],
    gates: bool = False,
    smaller: Mapping[Node, float] | None = None,
) -> dict[Node, float]:
    """Predicted variance before each activation: 1 after inputs and norms; added at sums, averaged at concats.

    Args:
        graph: The network.
        ends: The calls that end a branch.
        behind: The variance behind a branch's scalar, given the one before it.
        resets: Whether a call makes its output of variance 1 whatever it is given.
        gates: Whether to count a sigmoid's gate as the factor of 1/2 that it starts near.
        smaller: Factors on the variance of ends that start smaller than the others.
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
            v[node] = sum(a * s for a, s in zip(before, sizes, strict=True)) / sum(sizes)
        elif node.kind is Kind.PRODUCT:
            kept = flow.carried(node)
            v[node] = v[kept] if kept is not None else sum(before) / len(before)
            v[node] *= 0.25 if gates and flow.gated_by_sigmoid(node) else 1.0
        else:
            v[node] = 1.0 if resets(node) else before[0]
        if node in ends:
            v[node] = behind(v[node]) * (smaller or {}).get(node, 1.0)
    return v
