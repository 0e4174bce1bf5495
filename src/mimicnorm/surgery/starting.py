"""Decide how initial weights are set: by the theory where it covers the network, else calibrated on a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from mimicnorm.layers import has_own_forward
from mimicnorm.surgery.assumptions import without_formula
from mimicnorm.surgery.given_weights import notes_on_given
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.plan import OWN_INIT, Plan, count
from mimicnorm.surgery.preconditions import looks_trained
from mimicnorm.surgery.probe import LayerProbe


def choose(plan: Plan, modules: Mapping[str, nn.Module], obstacles: Iterator[str], init: str | None) -> None:
    """Set ``plan.init`` and ``plan.init_why``; refuse what would overwrite trained weights.

    Args:
        plan: Edits of all layers and norms.
        modules: The network's, by name.
        obstacles: What the theory does not cover; read only if the user leaves the choice.
        init: What the user asked for.
    """
    method = plan.method
    trained = [n.name for n in plan.norms if n.action != "leave" and looks_trained(modules[n.name])]
    if init == "auto" and trained:
        plan.refuse(
            trained[0],
            f"the network looks trained ({count(len(trained), 'BatchNorm')} with running statistics and affine "
            "parameters that have moved), and converting sets new initial weights",
            'Keep what it computes with init="keep". To train it anew, confirm with init="theory" or init="calibrate"; '
            "init=None leaves the weights and drops the BatchNorms, for a checkpoint that is loaded afterwards",
        )
    if init == "calibrate" and method.own_init:
        plan.refuse("", f"{type(method).__name__} {OWN_INIT}", 'Use init="theory", or None to keep them')
    if init != "auto":
        plan.init, plan.init_why = init, "asked for"
    elif method.own_init:
        plan.init, plan.init_why = "theory", "the method prescribes them"
    else:
        why = next(obstacles, None)
        plan.init = "calibrate" if why else "theory"
        plan.init_why = why or "every operation on the way has a formula"
    plan.notes += notes_on_given(modules, plan.layers, plan.init not in (None, "keep"))
    if plan.init == "calibrate" and plan.gates:
        layers = count(len(plan.gates), "layer")
        plan.notes.append(f"{layers} of gates will be scaled down where needed, so that gates start near constant")


def obstacles(
    plan: Plan,
    modules: Mapping[str, nn.Module],
    graph: Graph,
    left: set[str],
    probes: Mapping[str, LayerProbe],
    v: Mapping[Node, float],
) -> Iterator[str]:
    """Yield what the theory does not cover, in words.

    Args:
        plan: Edits of all layers.
        modules: The network's, by name.
        graph: The network.
        left: BatchNorms that stay.
        probes: What each layer allows.
        v: The predicted variance of each tensor.
    """
    for edit in plan.layers:
        if edit.start != "draw":
            yield f"no formula for the weights of {edit.name}, which stay as they are"
    for edit in plan.layers:  # the probe has shown that centred weights are applied as they are
        if edit.action == "keep" and has_own_forward(type(modules[edit.name])) and not probes[edit.name].centres:
            yield f"no formula for the forward of {edit.name} ({edit.kind})"
    before = 0
    for edit in plan.layers:
        before |= graph.calls(edit.name)[0].ancestors
    nodes = (n for n in graph.nodes if before >> n.index & 1)
    centring = {e.name for e in plan.layers if e.action in ("centre", "standardise")} | left
    why = without_formula(nodes, {e.name for e in plan.layers}, v, modules, centring)
    if why is not None:
        yield why
