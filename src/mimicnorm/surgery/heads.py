"""The heads of a recorded network: which modules make its outputs, and whether those can be class scores.

A last BN belongs on class scores and nowhere else: it takes the mean and the scale out of whatever it is put on. Class
scores and several regression outputs of one head look alike; every other case shows in the graph and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mimicnorm.errors import MimicNormError
from mimicnorm.methods.edits import HeadEdit
from mimicnorm.surgery.changeable import REPLACED
from mimicnorm.surgery.flow import RESHAPED, carried, walk_back
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.plan import Plan
from mimicnorm.surgery.recorder import is_batch_norm

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
        heads: The modules that make the model's outputs.
        problems: For each output without an evident head, why.
        not_classes: Why the outputs of these heads cannot all be class scores; None if they can.
        last_norms: BatchNorms on the outputs themselves.
    """

    heads: list[Head] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    not_classes: str | None = None
    last_norms: list[str] = field(default_factory=list)


def find(graph: Graph) -> Heads:
    """Find the modules that make the model's outputs."""
    heads: dict[str, Head] = {}
    problems: list[str] = []
    made: list[tuple[int, Node]] = []  # the outputs with a head
    mixed: list[str] = []  # why not all outputs are class scores
    onward = _before_layers(graph)
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
            read_on = any(u not in seen and onward >> u.index & 1 for u in node.users)
            passes = node.kind in _TO_HEAD or (node.op == "relu" and pooled)  # SqueezeNet: conv, relu, pool
            shifts = node.kind is Kind.CONSTANT and len(node.inputs) > 1  # value + advantage: two heads
            if passes and not shifts and not read_on:
                operand = carried(node)
                front += [operand] if operand is not None else []
            elif (shifts or node.kind in (Kind.SUM, Kind.CONCAT)) and not read_on:
                if node.kind is Kind.SUM and any(walk_back(n, RESHAPED).kind is Kind.INPUT for n in node.inputs):
                    mixed.append(f"output {position} is added to the input, as in a denoiser")
                front += node.inputs
            elif node.kind is Kind.LAYER and (node.layer is not None or node.made_by) and not read_on:
                name = node.layer if node.layer is not None else node.made_by[0]
                head = heads.setdefault(name, head_at(node, name))  # pyrefly: ignore  # at a layer it is evident
                made.append((position, output))
                loses = head is not None and output.shape[1:].numel() < head.outputs
                if loses and not any(n.kind is Kind.SOFTMAX for n in seen):
                    mixed.append(f"output {position} {tuple(output.shape)} has fewer values than {name!r} has outputs")
            else:
                problems.append(f"output {position} {tuple(output.shape)} {_no_head(node, read_on)}")
                layer = walk_back(node, _TO_LAYER)
                last = layer is not node and not any(onward >> u.index & 1 for u in layer.users)
                if layer.layer is not None and last:
                    mixed.append(
                        f"output {position} is made by {layer.layer!r} through {node.op}: another kind of output"
                    )
        if len(made) > before[0] and len(problems) > before[1]:
            mixed.append(f"only a part of output {position} is made by a head: {problems[-1]}")
    reasons = [*mixed, *_shapes(graph, made), *_widths(list(heads.values()))]
    ends = (walk_back(output, _TO_HEAD).norm for output in graph.outputs)
    last_norms = [name for name in ends if name is not None]
    return Heads(list(heads.values()), list(dict.fromkeys(problems)), reasons[0] if reasons else None, last_norms)


def _widths(heads: list[Head]) -> list[str]:
    """Say why heads of these widths do not all make class scores."""
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
    """Say why outputs of these shapes are not class scores."""
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
    """Tell whether an output is an image of the input's channels and a multiple of its size (super-resolution)."""
    if len(output.shape) != len(given.shape) or len(output.shape) < 4 or output.shape[1] != given.shape[1]:
        return False
    return all(o % i == 0 for o, i in zip(output.shape[2:], given.shape[2:], strict=True))


def _before_layers(graph: Graph) -> int:
    """Return the bit set of what is, or leads to, a weight layer or a BatchNorm."""
    nodes = 0
    for node in graph.nodes:
        if node.kind in (Kind.LAYER, Kind.NORM):
            nodes |= node.ancestors
    return nodes


def _no_head(node: Node, read_on: bool) -> str:
    if node.kind is Kind.INPUT:
        return "is the input itself"
    place = f"{node.op} in {node.where!r}" if node.where else f"{node.op} in the model's own forward"
    if read_on:
        return f"is made by {place}, and the rest of the network reads it, too"
    if node.kind is Kind.LAYER:
        return f"is made by {place} with a weight that no layer holds"
    return f"is made by {place}, not by a layer"


def head_at(node: Node, name: str) -> Head | None:
    """Return the head at a node: its outputs lie along dimension 1 of a convolution's output, else along the last.

    A container may permute what its layer made: then they lie where the layer's width is. None if that is ambiguous.
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


def outputs_from(node: Node) -> list[Node]:
    """Return the outputs that a tensor is, or that are made from it without further layers."""
    front, seen = [node], {node}
    while front:
        onward = [u for u in front.pop().users if u.kind is not Kind.LAYER and u not in seen]
        seen.update(onward)
        front += onward
    return [n for n in seen if n.is_output]


def head_layer(node: Node) -> str | None:
    """Return the weight layer that makes the outputs returned at a node, if that is evident."""
    return walk_back(node, _TO_HEAD).layer


# -- which of them get a last BN ---------------------------------------------------------------------------------


def choose(model: nn.Module, graph: Graph, head: str | Sequence[str] | None, plan: Plan) -> set[str]:
    """Decide which modules get a last BN; edits, refusals and notes go into the plan.

    Args:
        model: The network.
        graph: The network as it was recorded.
        head: What the user named, or None.
        plan: Its method says whether there is a last BN at all.

    Returns:
        The names of all heads and of the layers in them: no BatchNorm's owner.
    """
    evident = find(graph)
    names = {h.module for h in evident.heads}
    if head is not None:
        given = [head] if isinstance(head, str) else list(head) if isinstance(head, (list, tuple, set)) else []
        if not given or not all(isinstance(n, str) for n in given):
            raise MimicNormError(f"head={head!r}; use the qualified name of a module, or a list of names")
        unique = dict.fromkeys(_first_name(model, name) for name in given)
        chosen = [h for name in unique if (h := _named(model, graph, name, plan, names)) is not None]
    else:
        fits = not plan.method.last_norm or _are_class_scores(evident, plan)
        chosen = evident.heads if fits else []
    if plan.method.last_norm:
        for h in chosen:
            module = model.get_submodule(h.module)
            _check(module, h.module, graph, [other.module for other in chosen], plan)
            why = plan.method.scales_logits(h.outputs, _is_dense(h, graph))
            plan.heads.append(
                HeadEdit(
                    name=h.module,
                    kind=type(module).__name__,
                    outputs=h.outputs,
                    dim=h.dim,
                    logit_scale=bool(why),
                    why=why,
                )
            )
    return names | {h.module for h in chosen}


def _is_dense(head: Head, graph: Graph) -> bool:
    """Tell whether a head makes several predictions per sample: of pixels or tokens, which are not averaged."""
    nodes = [n for n in graph.nodes if n.layer == head.module or head.module in n.made_by]
    shapes = [output.shape for n in nodes for output in outputs_from(n)]
    return any(len(s) > 2 and s.numel() > s[0] * head.outputs for s in shapes)


def _are_class_scores(evident: Heads, plan: Plan) -> bool:
    """Tell whether a last BN fits the heads; refuse it on outputs that are not evidently class scores."""
    remedy = 'Name the module that makes class scores with head="...", or convert without it: last_norm=False'
    if evident.last_norms:
        remedy += (
            f". {evident.last_norms[0]!r} is a BatchNorm on the outputs: it can stay as the last BN, with "
            f"last_norm=False and where=lambda module, name: name != {evident.last_norms[0]!r}"
        )
    if not evident.heads:
        listed = "; ".join((*evident.problems[:3], *["..."][: len(evident.problems) > 3]))
        why = listed or "the output is not a tensor that depends on the input"
        plan.refuse("", f"no evident head for the last BN: {why}", remedy)
        return False
    if evident.not_classes is not None:
        plan.refuse("", f"a last BN belongs on class scores, and {evident.not_classes}", remedy)
        return False
    plan.notes += [f"no last norm there: {p}" for p in evident.problems]
    return True


def _first_name(model: nn.Module, name: str) -> str:
    """Return the first of a shared module's names."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return name
    return next((n for n, m in model.named_modules() if m is module), name)


def _named(model: nn.Module, graph: Graph, name: str, plan: Plan, names: set[str]) -> Head | None:
    """Return the head that a user named, or refuse it; the layer inside it joins ``names``."""
    modules = dict(model.named_modules())
    if name not in modules:
        plan.refuse(name, "head= names no module of the model", "See model.named_modules() for the names")
        return None
    nodes = [n for n in graph.nodes if n.layer == name or name in n.made_by]
    if not nodes:
        plan.refuse(name, "head= names a module that returned no tensor in the example's forward", "Name another")
        return None
    made = next((n for n in nodes if n.layer == name), nodes[0])
    if not any(map(outputs_from, nodes)) and not is_batch_norm(modules[name]):
        plan.refuse(name, "head= names a module whose output goes into further layers", "Name the last one")
        return None
    inside = head_layer(made)  # of a container, the layer in it that makes the logits
    if inside is not None:
        names.add(inside)
    head = head_at(made, name)
    if head is None:
        plan.refuse(
            name,
            f"head= names a module whose output {tuple(made.shape)} does not show along which dimension classes lie",
            f"Name the layer inside it{f', {inside!r}' if inside else ''}",
        )
    return head


def _check(module: Any, name: str, graph: Graph, heads: list[str], plan: Plan) -> None:
    """Refuse a head that cannot take a last BN, and note what is unusual about it."""
    made = [n for n in graph.nodes if n.layer == name or name in n.made_by]
    around = [h for h in heads if h != name and (h == "" or name.startswith(f"{h}."))]
    if is_batch_norm(module):
        plan.refuse(name, "head= names a BatchNorm, and the last BN would take its place", "Name a layer")
    elif around:
        plan.refuse(name, f"is inside {around[0] or 'the model'!r}, and both are to be heads", "Name one of them")
    elif "forward" in module.__dict__:
        plan.refuse(name, *REPLACED)
    elif hasattr(module, "last_norm"):
        plan.refuse(name, "has an attribute 'last_norm' of its own, and the last BN goes by that name", "Rename it")
    elif any(n.dtype.is_complex for n in made):
        plan.refuse(
            name,
            "makes complex numbers, and a BatchNorm normalises real ones",
            "Leave the last BN out with last_norm=False",
        )
    if len(made) > 1:
        plan.notes.append(
            f"the head {name!r} runs {len(made)} times in a pass: each is normalised by itself in training, and their "
            "running statistics are shared"
        )
    if hasattr(module, "parametrizations"):
        plan.notes.append(
            f"the weight of the head {name!r} is parametrized, which cannot be undone on a converted head: do it "
            "before, if ever"
        )
