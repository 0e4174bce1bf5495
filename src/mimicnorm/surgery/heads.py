"""The heads of a recorded network: which modules make its outputs, and whether those can be class scores.

A last BN belongs on class scores and nowhere else: it takes the mean and the scale out of whatever it is put on. Class
scores cannot be told from several regression outputs of one head; everything else that shows in the graph is told here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mimicnorm.surgery.flow import RESHAPED, carried, walk_back
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind

_TO_HEAD = (*RESHAPED, Kind.SOFTMAX)
_TO_LAYER = (*_TO_HEAD, Kind.ACTIVATION, Kind.OTHER_NORM)
_TURNS = {
    "permute", "transpose", "t", "adjoint", "movedim", "moveaxis", "swapaxes", "swapdims", "view", "reshape", "flatten",
    "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "as_strided", "unfold", "pixel_shuffle", "ravel",
}  # fmt: skip


@dataclass(frozen=True)
class Head:
    """A module that makes outputs of the network.

    Attributes:
        module: Its qualified name.
        outputs: How many it makes.
        dim: The dimension they lie along: 1 after a convolution, -1 after a matrix product.
    """

    module: str
    outputs: int
    dim: int


@dataclass
class Heads:
    """What stands at the end of a network.

    Attributes:
        heads: The modules behind the model's outputs.
        problems: For each output without an evident head, why.
        not_classes: Why the outputs of these heads cannot all be class scores; None if they can.
        last_norms: BatchNorms on the outputs themselves.
    """

    heads: list[Head] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_classes: str | None = None
    last_norms: list[str] = field(default_factory=list)


def find(graph: Graph) -> Heads:
    """The heads behind the model's outputs."""
    heads: dict[str, Head] = {}
    problems: list[str] = []
    made: list[tuple[int, Node]] = []  # the outputs with a head
    beside: list[str] = []  # what shows that not all outputs are class scores
    goes_on = _before_layers(graph)
    for position, output in enumerate(graph.outputs):
        front, seen, pooled = [output], set(), False
        before = (len(made), len(problems))
        while front:
            node = front.pop()
            if node in seen:
                continue
            seen.add(node)
            pooled = pooled or node.kind is Kind.POOL
            # A loss that the model computes itself may read logits, too; further layers may not.
            read_on = any(u not in seen and goes_on >> u.index & 1 for u in node.users)
            through = node.kind in _TO_HEAD or (node.op == "relu" and pooled)  # SqueezeNet: conv, relu, pool
            shifts = node.kind is Kind.CONSTANT and len(node.inputs) > 1  # value + advantage: two heads
            if through and not shifts and not read_on:
                passed = carried(node)
                front += [passed] if passed is not None else []
            elif (shifts or node.kind in (Kind.SUM, Kind.CONCAT)) and not read_on:
                if node.kind is Kind.SUM and any(walk_back(n, RESHAPED).kind is Kind.INPUT for n in node.inputs):
                    beside.append(f"output {position} is added to the input, as in a denoiser")
                front += node.inputs
            elif node.kind is Kind.LAYER and (node.layer or node.made_by) and not read_on:
                name = node.layer or node.made_by[0]
                head = heads.setdefault(name, head_at(node, name))  # pyrefly: ignore  # at a layer it is evident
                made.append((position, output))
                loses = head is not None and output.shape[1:].numel() < head.outputs
                if loses and not any(n.kind is Kind.SOFTMAX for n in seen):
                    beside.append(f"output {position} {tuple(output.shape)} has fewer values than {name!r} has outputs")
            else:
                problems.append(f"output {position} {tuple(output.shape)} {_no_head(node, read_on)}")
                layer = walk_back(node, _TO_LAYER)
                if (
                    layer.layer is not None
                    and layer is not node
                    and not any(goes_on >> u.index & 1 for u in layer.users)
                ):
                    beside.append(
                        f"output {position} comes from {layer.layer!r} through {node.op}: another kind of output"
                    )
        if len(made) > before[0] and len(problems) > before[1]:
            beside.append(f"only a part of output {position} is made by a head: {problems[-1]}")
    reasons = [*beside, *_shapes(graph, made), *_widths(list(heads.values()))]
    ends = (walk_back(output, _TO_HEAD).norm for output in graph.outputs)
    last_norms = [name for name in ends if name is not None]
    return Heads(list(heads.values()), problems, reasons[0] if reasons else None, last_norms)


def _widths(heads: list[Head]) -> list[str]:
    """Why heads of these widths do not all make class scores."""
    widths = {h.outputs for h in heads}
    if len(widths) > 1:
        listed = ", ".join(f"{h.module or 'the model'}: {h.outputs}" for h in heads)
        return [f"the heads have different numbers of outputs ({listed}), as for boxes and classes or several tasks"]
    if widths == {1}:
        return [
            f"{heads[0].module!r} has a single output, as for a regression, a discriminator or a yes-or-no question"
        ]
    return []


def _shapes(graph: Graph, outputs: list[tuple[int, Node]]) -> list[str]:
    """Why outputs of these shapes are not class scores."""
    sizes = {tuple(node.shape[2:]) for node in graph.outputs if len(node.shape) > 3}
    inputs = [n for n in graph.nodes if n.kind is Kind.INPUT]
    full = any(tuple(n.shape[2:]) in sizes for n in inputs)  # with one other: segmentation and an auxiliary head
    if len(sizes) > 2 or (len(sizes) == 2 and not full):
        listed = ", ".join(" x ".join(map(str, size)) for size in sorted(sizes, reverse=True))
        return [f"the outputs are maps of different sizes ({listed}), as in a feature pyramid"]
    for position, node in outputs:
        for given in (n for n in inputs[:1] if n.dtype.is_floating_point):  # others may be targets or conditions
            same = len(node.shape) > 1 and node.shape[0] == given.shape[0] and node.shape.numel() == given.shape.numel()
            if same or _enlarges(node, given):
                shapes = f"{tuple(node.shape)} is like its input {tuple(given.shape)}"
                return [f"output {position} {shapes}, as in an autoencoder or a denoiser"]
    return []


def _enlarges(output: Node, given: Node) -> bool:
    """Whether an output is an image of the input's channels and a multiple of its size (super-resolution)."""
    if len(output.shape) != len(given.shape) or len(output.shape) < 4 or output.shape[1] != given.shape[1]:
        return False
    return all(o % i == 0 for o, i in zip(output.shape[2:], given.shape[2:], strict=True))


def _before_layers(graph: Graph) -> int:
    """Bit set of what is, or leads to, a weight layer or a BatchNorm."""
    found = 0
    for node in graph.nodes:
        if node.kind in (Kind.LAYER, Kind.NORM):
            found |= node.ancestors
    return found


def _no_head(node: Node, read_on: bool) -> str:
    if node.kind is Kind.INPUT:
        return "is the input itself"
    name = node.layer or node.norm or node.where or node.op
    if read_on:
        return f"comes from {name}, which the rest of the network reads, too"
    if node.kind is Kind.LAYER:
        return f"comes from {node.op} in {node.where or 'the model itself'} with a weight that no layer holds"
    return f"comes from {name} ({node.kind.value}), not from a layer"


def head_at(node: Node, name: str) -> Head | None:
    """A head at a node: its outputs lie along dimension 1 of a convolution's output, else along the last.

    A container may turn what its layer made; then they are where the layer's width is, or it cannot be told.
    """
    layer = walk_back(node, _TO_HEAD)
    turned = walk_back(node, _TO_HEAD, lambda n: n.op in _TURNS).op in _TURNS
    convolved = layer.op.startswith("conv") or (layer.kind is not Kind.LAYER and len(node.shape) == 4)
    dim = 1 if convolved else -1
    width = layer.shape[dim] if layer.kind is Kind.LAYER else node.shape[dim]
    if turned:
        places = [d for d, size in enumerate(node.shape) if d and size == width]
        if len(places) != 1:
            return None
        dim = places[0]
    return Head(name, width, dim)


def reaches_output(node: Node) -> bool:
    """Whether a tensor, or what is made from it without further layers, is an output."""
    front, seen = [node], {node}
    while front:
        current = front.pop()
        if current.is_output:
            return True
        onward = [u for u in current.users if u.kind is not Kind.LAYER and u not in seen]
        seen.update(onward)
        front += onward
    return False


def head_layer(node: Node) -> str | None:
    """The weight layer that makes the outputs returned at a node, if that is evident."""
    return walk_back(node, _TO_HEAD).layer
