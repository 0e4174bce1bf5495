"""Prove a plan before it is carried out, so that a plan without refusals is one that can be carried out.

The surgery is rehearsed on the model itself and undone: classes and registries change, no value does. What is recorded
then must be the graph from before without its norms: code that asks for a class (``isinstance(layer, nn.BatchNorm2d)``)
takes another path once the class is gone. And no sample may see another.

Forward passes that run to their end: ``record`` takes one, and one more if a BatchNorm did not run or code around one
asks for the mode. The rehearsal takes one with a prime as batch size, and one with the example's if the two graphs
differ. Code that asks both for the mode and for what a conversion changes is compared in evaluation mode, too: two
more. Two on real batches decide where samples seem to meet, and one repeats what is to be refused. Calibration takes
one. Nearly all networks need the recording and the rehearsal, and no more.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from mimicnorm.layers import Derived, FixupScalars, GroupNorm, LastNorm, Remains, Scale, Shift, TrainedAffine
from mimicnorm.surgery import code, mixing
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.isolate import instead_of_forward, snapshot
from mimicnorm.surgery.operate import operate
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.plan import Plan, Refusal, Report
from mimicnorm.surgery.record import repeat
from mimicnorm.surgery.recorder import stand_in

_GIVEN_SHAPES = ("view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "as_strided")


def prove(model: nn.Module, planned: Plan, graph: Graph, example: Any, allow_mixing: Collection[str]) -> None:
    """Rehearse a plan; refusals and notes go into it.

    Args:
        model: The network, before its conversion; left as it was.
        planned: The plan, without a refusal so far.
        graph: The network as it was recorded.
        example: As for ``plan``.
        allow_mixing: Names of modules that may work across the batch, with all that is inside them.
    """
    in_training = graph if graph.training or graph.other_mode is None else graph.other_mode
    originals = [in_training]
    changed = [step.name for step in (*planned.norms, *planned.layers, *planned.heads)]
    if any(map(code.names_mode_and_class, code.around(model, changed))):
        with contextlib.suppress(Exception):  # it may not run in evaluation mode
            evaluated = in_training.other_mode or repeat(model, example, Graph(fake=graph.fake, training=False))
            originals.append(evaluated)
    with _rehearsed(model, planned):
        same, suspects = _same_with_another_batch(model, planned, in_training, example)
        try:
            changes = [n for g in originals[same:] if (n := _change(model, planned, g, example)) is not None]
        except Exception as error:
            _refuse_broken(planned, error)
            return
        if suspects and not changes:
            _refuse_mixing(model, planned, example, suspects, allow_mixing)
    if changes:
        _explain_change(planned, changes[0], _same_twice(model, planned, in_training, example))
    elif not graph.outputs:
        planned.notes.append("no tensor is seen in what the model returns, so it could not be compared")
    if not graph.fake:
        planned.notes.append("the network's control flow reads values: without BatchNorm it may take another path")


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


def _same_with_another_batch(
    model: nn.Module, planned: Plan, graph: Graph, example: Any
) -> tuple[bool, dict[str, str]]:
    """Whether a rehearsed network has the same graph on a batch of another size; the modules in which samples may meet.

    False also where there is no such batch: a batch size is written into the model, or values steer it.
    """
    with contextlib.suppress(Exception):
        watched = mixing.watch(model, example, graph)
        if watched is not None:
            return _changed_node(graph, watched[0], planned, same_batch=False) is None, watched[1]
    return False, {"": ""}


def _change(model: nn.Module, planned: Plan, before: Graph, example: Any) -> Node | None:
    """The first operation that a rehearsed network does not do as before, on the example's batch size.

    Where values steer the network, they are those of the original: norms normalise, layers do as they did.
    """
    modules = {model.get_submodule(step.name) for step in (*planned.norms, *planned.layers, *planned.heads)}
    with instead_of_forward(() if before.fake else modules, _as_before):
        return _changed_node(before, repeat(model, example, before), planned)


def _as_before(module: nn.Module, forward: Callable) -> Callable:
    """The forward of a changed module before the change."""
    kind: Any = type(module)
    while issubclass(kind, Derived):
        kind = kind.base
    if kind is not type(module):
        return functools.partial(kind.forward, module)
    normalise = functools.partial(stand_in, fake=False)
    if isinstance(module, Remains):
        others = [child for name, child in module.named_children() if name != "instead"]
        return lambda x: nn.Sequential(*others)(normalise(x))
    return (
        normalise
        if isinstance(module, (nn.Identity, Shift, Scale, FixupScalars, GroupNorm, TrainedAffine))
        else forward
    )


def _same_twice(model: nn.Module, planned: Plan, graph: Graph, example: Any) -> bool:
    """Whether the network itself does the same twice; not so with random numbers that have no seed."""
    return _changed_node(graph, repeat(model, example, graph), planned) is None


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
        if before.constants == after.constants:
            return None
        return Node(-1, "a penalty on weights, or another constant", Kind.OPAQUE, (), torch.Size(()), torch.float32)
    changed = [*_only_here(first, before, second), *_only_here(second, after, first)]
    return (*changed, *after.outputs, *before.outputs)[0]


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
            return node.norm if node.norm is not None else node.layer
        name = node.where
        while name not in self.children:
            if name in self.norms or name in self.layers:
                return name
            if not name:
                break
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
            inside = [place[n] == name and name not in n.made_by for n in node.inputs]  # not what another call returned
            parts = (read[n] if i else frozenset({ids[n]}) for n, i in zip(node.inputs, inside, strict=True))
            read[node] = frozenset().union(*parts)
            key = (name, read[node])
            if name in places.norms and len(read[node]) == 1:
                (ids[node],) = read[node]
                continue
        ids[node] = numbers.setdefault(key, len(numbers))
    return ids


def _explain_change(planned: Plan, changed: Node, same_twice: bool) -> None:
    """Refuse a network that takes another path once converted; if it does so without that, a note is enough."""
    at = f"{changed.op!r} in {changed.where!r}" if changed.where else f"{changed.op!r} in the model's own forward"
    if not same_twice:
        planned.notes.append(
            "the network does not do the same twice (random numbers without a seed?), and without BatchNorm it took "
            f"another path ({at})"
        )
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


def _refuse_mixing(
    model: nn.Module, planned: Plan, example: Any, suspects: dict[str, str], allow_mixing: Collection[str]
) -> None:
    """Refuse a network whose samples see each other by numbers, whatever its modules are called."""
    left = {n.name for n in planned.norms if n.action == "leave"}
    accepted = {name for name in suspects if any(_is_inside(name, a) for a in allow_mixing)}
    starts = {f"{s.name}.weight": s.gain / math.sqrt(s.fan_in) for s in planned.layers if planned.init != "keep"}
    tried = [name for name in suspects if name not in left | accepted]
    around = {name: [name, *_enclosing(name)] for name in tried}
    try:
        named = {n for names in around.values() for n in names}
        changes = mixing.changes(model, example, named, ignored=left, starts=starts) if tried else {}
    except Exception:  # the passes were extra: that they cannot be made does not matter for the conversion
        changes = {}
    known = accepted | {name for name in tried if changes.get(name, 0.0) > 0}
    for name in suspects:
        # Samples that lie along a dimension with others cannot be found again: a module around it may tell.
        judges = [n for n in around.get(name, []) if n == name or not any(_is_inside(k, n) for k in known)]
        judge = next((n for n in judges if not math.isnan(changes.get(n, math.nan))), name)
        change = 0.0 if name not in around else changes.get(judge, math.nan)
        at, by = _readable(model, name), f" ({suspects[name]})" if suspects[name] else ""
        whose = "Its output" if judge == name else f"The output of {_readable(model, judge)}"
        if name in accepted:
            planned.notes.append(f"{at} works across the batch{by}, which allow_mixing= accepts")
        elif math.isnan(change):
            planned.notes.append(f"{at} may work across the batch{by}: that could not be tried")
        elif change > 0:
            planned.refusals.append(
                Refusal(
                    name,
                    f"samples would still see each other: {at} works across the batch{by}, which is taken to be the "
                    f"first dimension of the first argument. {whose} for one sample changes by {change:.1g} of its "
                    "size with the others, and it is not a BatchNorm known here",
                    "If it is a norm, put nn.BatchNorm in its place before converting. If it is meant to mix samples, "
                    f"or that dimension is not the batch (the nodes of a graph), accept it: allow_mixing=({name!r},)",
                )
            )


def _enclosing(name: str) -> list[str]:
    """Return the names of the modules around one, from the innermost to the network itself."""
    parts = name.split(".") if name else []
    return [".".join(parts[:n]) for n in reversed(range(len(parts)))]


def _is_inside(name: str, outer: str) -> bool:
    """Tell whether a module is another one, or is inside of it."""
    return not outer or f"{name}.".startswith(f"{outer}.")


def _readable(model: nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__.removeprefix("LastNormed")
    return f"{name!r} ({kind})" if name else "the network itself"
