"""Prove a plan before it is carried out, so that a plan without refusals is one that can be carried out.

The surgery is rehearsed on the model itself and undone: classes and registries change, no value does. What is recorded
then must be the graph from before without its norms: code that asks for a class (``isinstance(layer, nn.BatchNorm2d)``)
takes another path once the class is gone. And no sample may see another.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from mimicnorm.layers import Derived, FixupScalars, GroupNorm, LastNorm, Remains, Scale, Shift
from mimicnorm.surgery import mixing
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.isolate import instead_of_forward, snapshot
from mimicnorm.surgery.operate import operate
from mimicnorm.surgery.plan import Plan, Refusal, Report
from mimicnorm.surgery.record import repeat

_GIVEN_SHAPES = ("view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "as_strided")


def prove(model: nn.Module, planned: Plan, graph: Graph, example: Any, allow_mixing: Collection[str]) -> None:
    """Rehearse a plan; what refuses or is worth knowing goes into it.

    Args:
        model: The network, before its conversion; left as it was.
        planned: The plan, without a refusal so far.
        graph: The network as it was recorded.
        example: As for ``plan``.
        allow_mixing: Names of modules that may work across the batch, with all that is inside them.
    """
    evaluated = _evaluated(model, planned, graph, example)
    with _rehearsed(model, planned):
        watched, suspects = _watched(model, graph, example)
        compared = [evaluated] if evaluated is not None else []
        if watched is None or _changed_node(graph, watched, planned, same_batch=False) is not None:
            compared.insert(0, graph)  # perhaps it differs for the batch size alone: the example's own decides
        try:
            pairs = [(b, repeat(model, example, b, follow=_called_directly(b))) for b in compared]
        except Exception as error:
            _refuse_broken(planned, error)
            return
        changes = [(b, node) for b, a in pairs if (node := _changed_node(b, a, planned)) is not None]
        if suspects and not changes:
            _judge(model, planned, example, suspects, allow_mixing)
    if changes:
        before, node = changes[0]
        _explain_change(planned, node, _excuse(model, planned, before, example))
    elif not graph.outputs:
        planned.notes.append("no tensor is seen in what the model returns, so it could not be compared")


def _evaluated(model: nn.Module, planned: Plan, graph: Graph, example: Any) -> Graph | None:
    """The network as it runs in evaluation mode, where the code around what is changed asks for the mode at all."""
    changed = [step.name for step in (*planned.norms, *planned.layers, *planned.heads)]
    around = {name.rsplit(".", i)[0] for name in changed for i in range(1, name.count(".") + 1)} | {""}
    with contextlib.suppress(Exception):
        asks = any(_mentions(model.get_submodule(name), "training") for name in around)
        return (
            repeat(model, example, Graph(fake=graph.fake, training=False, seed=graph.seed))
            if asks and graph.training
            else None
        )
    return None


def _mentions(module: nn.Module, attribute: str) -> bool:
    """Whether the code of a module's class, as far as it is not PyTorch's, names an attribute."""
    classes = [cls for cls in type(module).__mro__ if not cls.__module__.startswith("torch.")]
    methods = [value for holder in (module, *classes) for value in vars(holder).values() if callable(value)]
    codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
    return any(attribute in _names(code) for code in codes if code is not None)


def _names(code: CodeType) -> set[str]:
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _excuse(model: nn.Module, planned: Plan, before: Graph, example: Any) -> str:
    """What else than its code explains that a network takes another path; empty if nothing does."""
    with contextlib.suppress(Exception):
        if _changed_node(before, repeat(model, example, before), planned) is not None:
            return "the network does not do the same twice (random numbers without a seed?)"
        if not before.fake and _same_on_same_values(model, planned, before, example):
            return "the network's control flow reads values"
    return ""


def _same_on_same_values(model: nn.Module, planned: Plan, before: Graph, example: Any) -> bool:
    """Whether a network takes the same path with other classes but the same values.

    Its norms pass on what they are given, before and after; its layers do as they did.
    """
    follow = _called_directly(before)
    bare = repeat(model, example, before, norms_pass=True)
    with _rehearsed(model, planned):
        modules = {model.get_submodule(step.name) for step in (*planned.norms, *planned.layers, *planned.heads)}
        with instead_of_forward(modules, _as_it_was):
            after = repeat(model, example, before, follow=follow, norms_pass=True)
    return _changed_node(bare, after, planned) is None


def _as_it_was(module: nn.Module, forward: Callable) -> Callable:
    """A changed module's forward without the change: a layer's own, nothing of a norm but its other children."""
    kind: Any = type(module)
    while issubclass(kind, Derived):
        kind = kind.base
    if kind is not type(module):
        return functools.partial(kind.forward, module)
    if isinstance(module, Remains):
        others = [child for name, child in module.named_children() if name != "instead"]
        return nn.Sequential(nn.Identity(), *others).forward
    return torch.Tensor.clone if isinstance(module, (nn.Identity, Shift, Scale, FixupScalars, GroupNorm)) else forward


@contextlib.contextmanager
def _rehearsed(model: nn.Module, planned: Plan) -> Iterator[None]:
    """The network as the plan would make it, its last norms passing logits on as they are."""
    restore = snapshot(model)
    try:
        operate(model, Report(**planned.__dict__))
        for m in model.modules():
            if isinstance(m, LastNorm):
                m.intercept = torch.Tensor.clone
        yield
    finally:
        restore()


def _watched(model: nn.Module, graph: Graph, example: Any) -> tuple[Graph | None, dict[str, str]]:
    """The graph of a batch of another size, if it can be had, and the modules in which samples may meet."""
    follow = _called_directly(graph)
    with contextlib.suppress(Exception):  # a batch size written into the model, or values that fake tensors lack
        watched = mixing.watch(model, example, graph, follow)
        if watched is not None and graph.training:
            return watched
        if watched is not None:  # recorded in evaluation mode: samples may meet in training only
            in_training = mixing.watch(model, example, Graph(), follow)
            assert in_training is not None
            return watched[0], {**watched[1], **in_training[1]}
    return None, {"": ""}


def _called_directly(graph: Graph) -> set[str]:
    """Modules whose forward was called past their hooks, as in ``layer.forward(x)``."""
    named = ((n.layer or n.norm, n.where) for n in graph.nodes)
    return {name for name, where in named if name and where != name and not where.startswith(f"{name}.")}


# -- the same graph, without its norms ---------------------------------------------------------------------------


def _changed_node(before: Graph, after: Graph, planned: Plan, same_batch: bool = True) -> Node | None:
    """The first operation of a converted network that the original did not do, or did and it does not; or None.

    Two operations are the same if they have the same function and arguments, run in the same module and read the same.
    Norms that are taken out count as their input, a call of a layer that is changed as one operation.
    """
    numbers: dict[tuple, int] = {}
    first, second = (_numbered(graph, _Places(planned), numbers, same_batch) for graph in (before, after))
    taps = [{ids[n] for n in ids if n.tapped} for ids in (first, second)]
    outputs = [[ids[n] for n in graph.outputs] for graph, ids in ((before, first), (after, second))]
    if outputs[0] == outputs[1] and taps[0] == taps[1]:
        return None
    changed = [*_only_here(first, before, second), *_only_here(second, after, first)]
    # What follows a change is changed, too: better to name an operation that is there more or less often.
    counts = [Counter((n.op, n.where) for n in ids) for ids in (first, second)]
    telling = [n for n in changed if counts[0][n.op, n.where] != counts[1][n.op, n.where]]
    return (*telling, *changed, *after.outputs, *before.outputs)[0]


def _only_here(ids: dict[Node, int], graph: Graph, others: dict[Node, int]) -> list[Node]:
    """The operations on the way to an output or a tap that the other graph lacks, though it has all that they read."""
    reached, known = 0, set(others.values())
    for node in (*graph.outputs, *(n for n in graph.nodes if n.tapped)):
        reached |= node.ancestors
    unknown = (n for n in graph.nodes if reached >> n.index & 1 and ids[n] not in known)
    return [n for n in unknown if all(ids[i] in known for i in n.inputs)]


class _Places:
    """Which module that a plan changes an operation is part of, if any."""

    def __init__(self, planned: Plan):
        self.norms = {n.name for n in planned.norms if n.action != "leave"}
        self.norms |= {f"{h.name}.last_norm".lstrip(".") for h in planned.heads}
        self.layers = {step.name for step in planned.layers}
        self.children = {f"{n.name}.{child}".lstrip(".") for n in planned.norms for child in n.children}

    def of(self, node: Node) -> str | None:
        """The module's name; None for an operation that has to be as it was."""
        if node.norm in self.norms or node.layer in self.layers:
            return node.norm or node.layer
        name = node.where
        while name and name not in self.children:
            if name in self.norms or name in self.layers:
                return name
            name = name.rpartition(".")[0]
        return None


def _numbered(graph: Graph, places: _Places, numbers: dict[tuple, int], same_batch: bool) -> dict[Node, int]:
    """Give every operation a number that is equal for equal operations, in both graphs."""
    ids: dict[Node, int] = {}
    read: dict[Node, frozenset[int]] = {}  # by a changed module, up to this operation of it
    place: dict[Node, str | None] = {}
    for node in graph.nodes:
        place[node] = name = places.of(node)
        if name is None:
            arguments = node.arguments if same_batch or node.op not in _GIVEN_SHAPES else ()
            key: tuple = (node.op, node.where, arguments, *(ids[n] for n in node.inputs))
            if not node.inputs:  # the model's inputs, by their order
                key = (*key, sum(not n.inputs and n.where == node.where for n in graph.nodes[: node.index]))
        else:
            parts = (read[n] if place[n] == name else frozenset({ids[n]}) for n in node.inputs)
            read[node] = frozenset().union(*parts)
            key = (name, read[node])
            if name in places.norms and len(read[node]) == 1:
                (ids[node],) = read[node]
                continue
        ids[node] = numbers.setdefault(key, len(numbers))
    return ids


def _explain_change(planned: Plan, changed: Node, excuse: str) -> None:
    """Refuse a network that takes another path once converted; if something excuses it, a note is enough."""
    at = f"{changed.op!r} in {changed.where!r}" if changed.where else f"{changed.op!r} in the model's own forward"
    if excuse:
        planned.notes.append(f"{excuse}, and without BatchNorm it took another path ({at})")
        return
    planned.refusals.append(
        Refusal(
            changed.where,
            "without its BatchNorms the network takes another path: its code asks for the class or for an attribute "
            f"of a layer that the conversion changes, and {at} is not as before",
            "Let the code not depend on the class (a flag set in __init__, an attribute such as num_features), or "
            "leave the BatchNorms it asks for with where=",
        )
    )


def _refuse_broken(planned: Plan, error: Exception) -> None:
    cause, where = error.__cause__ or error, getattr(error, "where", "")
    planned.refusals.append(
        Refusal(
            where,
            f"without its BatchNorms the network does not run any more ({type(cause).__name__}: {cause})",
            "Leave the BatchNorms that its code reads with where=",
        )
    )


# -- no sample sees another --------------------------------------------------------------------------------------


def _judge(
    model: nn.Module, planned: Plan, example: Any, suspects: dict[str, str], allow_mixing: Collection[str]
) -> None:
    """Refuse a network whose samples see each other by numbers, whatever its modules are called."""
    left = {n.name for n in planned.norms if n.action == "leave"}
    suspects = {name: op for name, op in suspects.items() if name not in left}
    starts = {f"{s.name}.weight": s.gain / math.sqrt(s.fan_in) for s in planned.layers}
    try:
        changes = mixing.changes(model, example, suspects, ignored=left, starts=starts)
    except Exception:  # the passes were extra: that they cannot be made says nothing about the conversion
        changes = dict.fromkeys(suspects, math.nan)
    for name, change in changes.items():
        kind = type(model.get_submodule(name)).__name__
        kind = kind.removeprefix("LastNormed") if name in {h.name for h in planned.heads} else kind
        at, by = (
            f"{name!r} ({kind})" if name else "the network itself",
            f" ({suspects[name]})" if suspects[name] else "",
        )
        allowed = any(name == a or not a or name.startswith(f"{a}.") for a in allow_mixing)
        if math.isnan(change):
            planned.notes.append(f"{at} may work across the batch{by}: that could not be tried")
        elif change > 0 and allowed:
            planned.notes.append(f"{at} works across the batch{by}, which allow_mixing= accepts")
        elif change > 0:
            planned.refusals.append(
                Refusal(
                    name,
                    f"samples would still see each other: {at} works across the batch{by}, its output for one sample "
                    f"changes by {change:.1g} of its size with the others, and it is not a BatchNorm known here",
                    "Put nn.BatchNorm in its place before converting. If it is meant to mix samples, or the first "
                    f"dimension of the first argument is not the batch, accept it with allow_mixing=({name!r},)",
                )
            )
