"""Decide everything before anything is touched: who owns which BatchNorm, what becomes of it, what refuses.

``plan`` is pure. It records the model once, reads the graph, and returns a ``Plan`` that accounts for every
BatchNorm; ``convert_`` carries it out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import RefusedError
from mimicnorm.layers import fan_in, group_count, has_own_forward
from mimicnorm.methods import GroupNormWS, Method, as_method
from mimicnorm.surgery import attention, flow, probe, residual
from mimicnorm.surgery.assumptions import without_formula
from mimicnorm.surgery.changeable import REPLACED, Ways, why_not
from mimicnorm.surgery.gains import feed
from mimicnorm.surgery.given_weights import given, notes_on_given
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.isolate import untouched
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.ownership import Ownership
from mimicnorm.surgery.preconditions import Where, accepts, check_arguments, looks_trained
from mimicnorm.surgery.proof import prove
from mimicnorm.surgery.record import record
from mimicnorm.surgery.recorder import is_batch_norm
from mimicnorm.surgery.steps import OWN_INIT, LayerStep, NormStep, Plan, count, few

_DONE = {"centre": "centred", "standardise": "standardised"}


def plan(
    model: nn.Module,
    method: Method,
    *,
    example: Any,
    init: str | None = "auto",
    head: str | Sequence[str] | None = None,
    where: Where | None = None,
    allow_mixing: Collection[str] = (),
) -> Plan:
    """Work out how a network would be converted, without touching it.

    Args:
        model: Any module with BatchNorm.
        method: What to do, e.g. ``MimicNorm()``.
        example: A tensor, call arguments (tuple or dict), or a shape such as ``(2, 3, 224, 224)``.
        init: Starting weights: "theory", "calibrate", "auto" (theory where every operation on the way has a
            formula, else calibrate), or None to leave every weight as it is.
        head: Qualified name(s) of the module(s) that make the logits; found by data flow if not given.
        where: ``where(module, qualified_name)`` is False for a BatchNorm that stays as it is. It is asked about
            BatchNorms only.
        allow_mixing: Qualified names of modules that are meant to work across the batch. Everything else must keep
            samples apart, or the network is refused.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
        >>> from mimicnorm.methods import MimicNorm
        >>> plan(net, MimicNorm(), example=(2, 8, 6, 6)).totals()["centred"]
        1
    """
    method = as_method(method)
    check_arguments(model, init, where, allow_mixing)
    norms = {name: m for name, m in model.named_modules() if is_batch_norm(m)}
    if not norms:
        raise RefusedError(
            f"{type(model).__name__} has no BatchNorm: there is nothing to convert. "
            "(A network that was fused or converted elsewhere has lost them already.)"
        )
    left = {name for name, m in norms.items() if where is not None and not accepts(where, m, name)}
    graph = record(model, example)
    if not method.removes_norm:
        owners = Ownership(model, method, norms, set(norms), graph)
        owners.find_heads(head)  # a name that is not a module's is refused whatever the method
        steps = [NormStep(name, type(m).__name__, "left", "leave", why="the method") for name, m in norms.items()]
        return dataclasses.replace(owners.plan, norms=steps, init=None, init_why="the network as it is")
    with untouched(model):
        for m in model.modules():
            m.training = False  # to look at the weight of a spectral norm in training mode is to change it
        planned = _Planner(model, method, norms, left, graph, init).build(head)
    if planned.ok:
        prove(model, planned, graph, example, allow_mixing)
    return planned


class _Planner(Ownership):
    """The state of one planning: who is who, and what has been decided so far."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        norms: dict[str, nn.Module],
        left: set[str],
        graph: Graph,
        init: str | None,
    ):
        super().__init__(model, method, norms, left, graph)
        self.init, self.uses = init, flow.uses(graph)
        self.probes: dict[str, probe.LayerProbe] = {}

    def build(self, head: str | Sequence[str] | None) -> Plan:
        self.find(head)
        self.given = given(self.model, self.roles)
        self.fan_in = {name: self._fan_in(name) for name in self.roles}
        self.kept = {name: self._why_kept(name, role) for name, (_, role) in self.roles.items()}
        branches = self._branches()
        ends = {end for branch in branches for end in branch.ends}
        method = self.method
        products = attention.unbounded_products(self.graph, {*self.owned, *self.reached, *self.roles})
        around = residual.ends_around((p.node for p in products), [] if method.own_init else branches)
        self.smaller = dict.fromkeys(around, attention.VARIANCE)
        variance = residual.variance(
            self.graph, ends, method.branch_variance, self._resets, gates=method.gains, smaller=self.smaller
        )
        layers = self._layer_steps(branches, ends, variance)
        self._norm_steps(ends, variance, layers)
        self.plan.layers = list(layers.values())
        self.plan.gates = [n for n in self.modules if n in self.gates and n not in self.roles and self._has_weight(n)]
        self._init(variance)
        if products and method.instead != "group":
            self.plan.notes.append(attention.note(products, bool(self.smaller)))
        if len(self.left) == len(self.norms):
            self.refuse("", "where= leaves every BatchNorm, so there is nothing to convert", "Let it accept some")
        return self.plan

    # -- residual branches ---------------------------------------------------------------------

    def _branches(self) -> list[residual.Branch]:
        """The branches that the method ends with a scalar."""
        if not self.method.branches:
            return []
        found, dead = residual.branches(self.graph, self._can_end, self.gates), []
        if self.method.only_beside_skips:
            found = [b for b in found if b.beside_skip]
        if self.method.zeroes:
            found = [b for b in found if all(self._last_layers(e) for e in b.ends)]
        if self.method.zeroes or self.method.branch_scale(1.0) == 0.0:
            dead = [str(b.ends[0].norm or b.ends[0].layer) for b in found if not b.wakes]
            found = [b for b in found if b.wakes]
            if dead:
                self.plan.notes.append(
                    f"a ReLU comes behind the branches that end in {few(dead)}: at zero they would stay zero, so they "
                    "are no residual branches here"
                )
        if self.method.needs_branches and not found:
            none = "no residual branch without a ReLU behind it" if dead else "none"
            self.refuse(
                "",
                f"{type(self.method).__name__} is made for residual branches, and this network has {none}",
                "Use another method, such as MimicNorm() or ScaledWS()",
            )
        return found

    def _can_end(self, call: Node) -> bool:
        """Whether a call can end a branch: of a BatchNorm that is taken out, or of a layer that is changed."""
        return call.norm in self.owned or call.norm in self.reached or (call.layer in self.roles and call.norm is None)

    def _branch_scale(self, calls: list[Node], v: float) -> float | None:
        """The scalar that a branch starts with which ends in these calls."""
        scale = self.method.branch_scale(v)
        return None if scale is None else scale * math.sqrt(min(self.smaller.get(c, 1.0) for c in calls))

    def _last_layers(self, end: Node) -> list[str]:
        """The layers that make what ends a branch."""
        calls = [end] if end.norm is None else self.owned.get(end.norm, [])
        return [c.layer for c in calls if c.layer is not None]

    def _resets(self, call: Node) -> bool:
        """Whether a call's output has variance 1 whatever its input has."""
        if call.kind is Kind.NORM:
            return call.norm in self.left or self.method.instead == "group"
        return self.method.gains and call.layer in self.roles and not self.kept[call.layer]

    # -- steps ---------------------------------------------------------------------------------

    def _layer_steps(
        self, branches: list[residual.Branch], ends: set[Node], v: dict[Node, float]
    ) -> dict[str, LayerStep]:
        steps: dict[str, LayerStep] = {}
        factors = residual.fixup_factors(branches, self._last_layers) if self.method.zeroes else {}
        factors |= {name: (0.0, "starts at zero: the head") for name, (_, role) in self.roles.items() if role == "head"}
        for name, (call, role) in sorted(self.roles.items(), key=lambda item: item[1][0].index):
            module, n, fed, before = self.modules[name], self.fan_in[name], feed(call, self.modules), v[call.inputs[0]]
            self.probes[name] = probe.layer(module, call.inputs[0].shape)
            why = self.kept[name]
            scale = None
            if call in ends:  # a branch end without a BatchNorm of its own
                scale, role = self._branch_scale([call], before), "branch end"
            action = "keep" if why else self.method.weights
            starts = self.init is not None and self.given.get(name) != "frozen"
            ways = Ways(self.probes[name], self._has_weight(name), self._inside(name))
            if problem := why_not(module, action, scale is not None, starts, ways):
                self.refuse(name, *problem)
            gain = fed.gain(action in ("centre", "standardise"), None if action == "standardise" else n)
            if not why and name in factors:
                gain, why = gain * factors[name][0], factors[name][1]
            step = LayerStep(name, type(module).__name__, role, action, n, fed.name, gain, scale, before, None, why)
            step = dataclasses.replace(
                step, start={"frozen": "keep", "sparse": "scale"}.get(self.given.get(name, ""), "draw")
            )
            if action == "standardise" and self.method.gains:
                step = dataclasses.replace(step, factor=gain / math.sqrt(n * before), learns_gain=True)
            if scale is not None:
                step = dataclasses.replace(step, output_factor=self.method.branch_factor)
            if action == "bias":
                step = dataclasses.replace(step, on_raw_input=flow.on_raw_input(call))
            steps[name] = step
        small = [n for n, step in steps.items() if step.why == self._too_small]
        if small:
            self.plan.notes.append(
                f"{count(len(small), 'layer')} ({few(small)}) not centred for a {self._too_small}: on small images "
                "two networks trained better with a smaller min_fan_in, which centres the first layer (docs/compare.md)"
            )
        return steps

    def _fan_in(self, name: str) -> int:
        module = self.modules[name]
        weight: Tensor = module.weight  # pyrefly: ignore
        transposed = bool(getattr(module, "transposed", False))
        return fan_in(weight, getattr(module, "groups", 1), transposed, getattr(module, "stride", ()))

    def _why_kept(self, name: str, role: str) -> str:
        """Why a layer is not centred, standardised or given a bias before it; or an empty string."""
        weights = self.method.weights
        if weights == "keep":
            return "the method does not centre"
        if name in self.given:
            return self.given[name]
        if role == "gate":
            return "part of a gate"
        module = self.modules[name]
        groups = getattr(module, "groups", 1)
        if weights == "centre" and groups > 1 and groups == getattr(module, "in_channels", 0):
            return "depthwise"
        if weights == "bias" or self.fan_in[name] > self.method.min_fan_in:
            return ""
        return self._too_small

    @property
    def _too_small(self) -> str:
        return f"fan-in of at most {self.method.min_fan_in}"

    def _has_weight(self, name: str) -> bool:
        """Whether a layer's weight is a parameter of its own, not computed from others."""
        return isinstance(self.modules[name]._parameters.get("weight"), nn.Parameter)

    def _inside(self, name: str) -> bool:
        """Whether every use of a layer's weight is a call of the layer."""
        return all(call.inside_module for call in self.graph.calls(name))

    def _norm_steps(self, ends: set[Node], v: dict[Node, float], layers: dict[str, LayerStep]) -> None:
        for name, module in self.norms.items():
            calls = self.graph.calls(name)
            kind = type(module).__name__
            if name in self.left:
                self.plan.norms.append(NormStep(name, kind, "left", "leave", why="where="))
                continue
            shape = self.graph.norm_inputs.get(name, calls[0].shape if calls else None)
            probed = probe.norm(module, shape)
            if "forward" in module.__dict__:
                self.refuse(name, *REPLACED)
                continue
            if probed is None or self._does_more(name):
                self.refuse(
                    name,
                    f"{kind} does more than normalise and run its children, so nothing can stand for it",
                    "Leave it out with where=, or replace it with nn.BatchNorm and what else it does",
                )
                continue
            rest: dict[str, Any] = {"keeps": probed.children, "channel_dim": probed.channel_dim}
            if not calls:
                groups = self._groups(module, shape, probed.channel_dim)
                becomes = "shift" if groups is None else "group"
                self.plan.notes.append(
                    f"{name} never ran on the example: it becomes a {becomes}, and nothing is done to its layer for it"
                )
                why = "never called on the example"
                self.plan.norms.append(NormStep(name, kind, "unused", becomes, why=why, groups=groups, **rest))
                continue
            variance = v[calls[0].inputs[0]]
            scale = self._branch_scale(calls, variance) if any(c in ends for c in calls) else None
            step = self._owned_step if name in self.owned else self._pre_step
            if self.method.instead == "group":
                rest["groups"] = groups = self._groups(module, shape, probed.channel_dim)
                rest["why"] = f"{groups} groups of each sample's channels"
                step = self._group_step
            elif self.method.instead == "scalar":
                step = self._scalar_step
            self.plan.norms.append(dataclasses.replace(step(name, kind, calls, variance, scale, layers), **rest))

    def _groups(self, norm: nn.Module, shape: torch.Size | None, channel_dim: int) -> int | None:
        """How many groups the GroupNorm in a BatchNorm's place has, or None if there is none."""
        if not isinstance(self.method, GroupNormWS):
            return None
        positions = 16 if shape is None else math.prod(shape[1:]) // shape[channel_dim]
        return group_count(probe.channels(norm), positions, self.method.groups)

    def _group_step(self, name, kind, calls, v, scale, layers) -> NormStep:
        del calls, scale, layers
        role, owners = self._role(name)
        return NormStep(name, kind, role, "group", owners, v=v)

    def _scalar_step(self, name, kind, calls, v, scale, layers) -> NormStep:
        """Fixup: a multiplier where a branch ends, a bias before an activation, both single numbers."""
        del layers
        role, owners = self._role(name)
        step = NormStep(name, kind, role, "shift", owners, scale=scale, v=v, scalar=True)
        if scale is not None:
            return dataclasses.replace(step, action="scale", why="ends a residual branch")
        if any(flow.reaches_activation(c) for c in calls):
            return dataclasses.replace(step, why="scalar bias before an activation")
        if role == "post" and all(flow.read_once(o) for o in self.owned[name]) and self._direct(name, calls):
            return dataclasses.replace(step, action="remove", why=f"owned by {owners[0]}, before no activation")
        return dataclasses.replace(step, why="its input is read by others, too")

    def _role(self, name: str) -> tuple[str, tuple[str, ...]]:
        """Whether a BatchNorm is "post" or "pre", and the layers it normalised."""
        role = "post" if name in self.owned else "pre"
        calls = self.owned[name] if name in self.owned else self.reached.get(name, ())
        return role, tuple(dict.fromkeys(c.layer for c in calls if c.layer))

    def _owned_step(self, name, kind, calls, v, scale, layers) -> NormStep:
        owner, (_, owners) = self.owned[name][0], self._role(name)
        layer = layers[owners[0]]
        # Layer and BatchNorm meet in every call of either, and in nothing else: they may be used as one.
        read_once = all(flow.read_once(o) and not o.tapped for o in self.owned[name])
        paired = len(owners) == 1 and self.uses[layer.name] == len(calls) == len(set(self.owned[name]))
        sharer, tapped = self._may_share(name), any(o.tapped for o in self.owned[name])
        alone = paired and read_once and self._inside(layer.name) and sharer is None
        why = ""
        factor = self.method.branch_factor
        direct = self._direct(name, calls)
        foldable = alone and direct and self._takes_beta(name, layer.name, owner)
        if scale is not None:
            rule = {"sqrt": "1/sqrt(v)", "linear": "1/v"}.get(str(self.method.residual), f"{scale:g}")
            why = f"ends a residual branch: scalar {rule}"
            why += f", times sqrt({attention.VARIANCE:g}): attention" if any(c in self.smaller for c in calls) else ""
        if scale is not None and not (alone and layer.action in _DONE and self.probes[layer.name].scales):
            if foldable and self.method.scales_bias:
                layers[layer.name] = dataclasses.replace(layer, beta_from=name)
            return NormStep(name, kind, "post", "scale", owners, scale=scale, factor=factor, v=v, why=why)
        if scale is not None:
            end = {"scale": scale, "output_factor": factor, "role": "branch end"}
            layer = layers[layer.name] = dataclasses.replace(layer, **end)
            why += f", folded into {layer.name}"
        beta = getattr(self.norms[name], "bias", None) is not None
        if foldable or (not beta and read_once and direct):
            if beta:
                layers[layer.name] = dataclasses.replace(layer, beta_from=name)
            return NormStep(name, kind, "post", "remove", owners, v=v, why=why or f"owned by {layer.name}")
        reason = "beta cannot become its layer's bias" if alone else "its layer is also used without it"
        reason = (
            reason if beta else "between it and its layer is a view, which an in-place activation must not write into"
        )
        reason = f"{sharer} did not run and may share its layer" if sharer is not None else reason
        reason = reason if read_once else "its layer's output is read more than once"
        reason = "a hook or an attribute may keep its layer's output" if tapped else reason
        return NormStep(name, kind, "post", "shift", owners, v=v, why=why or reason)

    def _direct(self, name: str, calls: list[Node]) -> bool:
        """Whether a BatchNorm reads its layers' outputs themselves; without it, a view would be handed on."""
        return all(c.inputs[0] is o for c, o in zip(calls, self.owned[name], strict=True))

    def _may_share(self, name: str) -> str | None:
        """A BatchNorm beside this one, of its width, that did not run: another domain's norm of the same layer, say."""
        parent, width = name.rpartition(".")[0], probe.channels(self.norms[name])
        unseen = (n for n in self.norms if n not in self.left and not self.uses[n] and n.rpartition(".")[0] == parent)
        return next((n for n in unseen if probe.channels(self.norms[n]) == width), None)

    def _does_more(self, name: str) -> bool:
        """Whether a BatchNorm was seen to do more in training than its probe in evaluation mode shows."""
        silent = (Kind.NORM, Kind.VIEW, Kind.PAD, Kind.CONCAT, Kind.CONSTANT)  # the probe sees constants
        inside = (n for n in self.graph.nodes if n.where == name and n.kind not in silent)
        return isinstance(self.norms[name], _BatchNorm) and any(n.users or n.is_output for n in inside)

    def _takes_beta(self, name: str, layer: str, call: Node) -> bool:
        """Whether a BatchNorm's beta can become (or join) the bias of the layer directly before it."""
        beta, module = getattr(self.norms[name], "bias", None), self.modules[layer]
        own = getattr(module, "bias", None)
        channels = 1 if call.op.startswith("conv") else len(call.shape) - 1  # where the layer puts its outputs
        if beta is None or channels != 1 or beta.shape != call.shape[1:2] or beta.dtype != module.weight.dtype:
            return False
        if own is None or not self.probes[layer].takes_bias:
            return self.probes[layer].takes_bias
        shared = sum(p is own for m in self.modules.values() for p in m._parameters.values()) > 1
        return own.requires_grad == beta.requires_grad and not shared  # else one would be frozen or trained by another

    def _pre_step(self, name, kind, calls, v, scale, layers) -> NormStep:
        del calls, layers
        _, owners = self._role(name)
        if scale is not None:
            step = NormStep(name, kind, "pre", "scale", owners, scale=scale, v=v, why="ends a residual branch")
            return dataclasses.replace(step, factor=self.method.branch_factor)
        why = f"before {', '.join(owners[:3])}" if owners else "before no layer"
        return NormStep(name, kind, "pre", "shift", owners, v=v, why=why)

    # -- starting weights ----------------------------------------------------------------------

    def _init(self, v: dict[Node, float]) -> None:
        init = self.init
        trained = [n for n, m in self.norms.items() if n not in self.left and looks_trained(m)]
        if init == "auto" and trained:
            self.refuse(
                trained[0],
                f"the network looks trained ({count(len(trained), 'BatchNorm')} with running statistics other than 0 "
                "and 1, or with betas that differ where there are none), and converting sets new starting weights",
                'Say so with init="theory" or init="calibrate"; init=None keeps every weight (a checkpoint follows)',
            )
        if init == "calibrate" and self.method.own_init:
            self.refuse("", f"{type(self.method).__name__} {OWN_INIT}", 'Use init="theory", or None to keep them')
        if init == "auto" and self.method.own_init:
            self.plan.init, self.plan.init_why = "theory", "the method prescribes them"
        elif init == "auto":
            behind = 0
            for call, _ in self.roles.values():
                behind |= call.ancestors
            reasons = [f"no formula for the weights of {n}, which stay ({why})" for n, why in self.given.items()]
            centring = {n for n in self.roles if self.method.weights in _DONE and not self.kept[n]} | self.left
            nodes = (n for n in self.graph.nodes if behind >> n.index & 1)
            for step in self.plan.layers:  # of centred weights, the probe has shown that they are applied as they are
                own_forward = has_own_forward(type(self.modules[step.name])) and not self.probes[step.name].centres
                if own_forward and step.action == "keep":
                    reasons.append(f"no formula for the forward of {step.name} ({step.kind})")
            why = reasons[0] if reasons else without_formula(nodes, self.roles, v, self.modules, centring)
            self.plan.init = "calibrate" if why else "theory"
            self.plan.init_why = why or "every operation on the way has a formula"
        else:
            self.plan.init, self.plan.init_why = init, "asked for"
        self.plan.notes += notes_on_given(self.modules, self.given, self.plan.layers, self.plan.init is not None)
        if self.plan.init == "calibrate" and self.plan.gates:
            layers = count(len(self.plan.gates), "layer")
            self.plan.notes.append(
                f"{layers} of gates will be scaled down where needed, so that gates start near constant"
            )
