"""Decide everything before anything is touched: who owns which BatchNorm, what becomes of it, what refuses.

``plan`` is pure. It records the model once, reads the graph, and returns a ``Plan`` that accounts for every
BatchNorm; ``convert_`` carries it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mimicnorm import flow, probe
from mimicnorm.errors import MimicNormError, RefusedError
from mimicnorm.gains import feed, without_formula
from mimicnorm.graph import Graph, Node
from mimicnorm.layers import LastNorm, LastNormed, WeightMean, fan_in
from mimicnorm.methods import Method, as_method
from mimicnorm.ops import Kind
from mimicnorm.record import is_batch_norm, record
from mimicnorm.steps import HeadStep, LayerStep, NormStep, Plan, Refusal, count

Where = Callable[[nn.Module, str], bool]
INITS = ("auto", "theory", "calibrate", None)


def plan(
    model: nn.Module,
    method: Method,
    *,
    example: Any,
    init: str | None = "auto",
    head: str | Sequence[str] | None = None,
    where: Where | None = None,
) -> Plan:
    """Work out how a network would be converted, without touching it.

    Args:
        model: Any module with BatchNorm.
        method: What to do, e.g. ``MimicNorm()``.
        example: A tensor, call arguments (tuple or dict), or a shape such as ``(2, 3, 224, 224)``.
        init: Starting weights: "theory", "calibrate", "auto" (theory where every operation on the way has a
            formula, else calibrate), or None to leave every weight as it is.
        head: Qualified name(s) of the module(s) that make the logits; found by data flow if not given.
        where: ``where(module, qualified_name)`` is False for a BatchNorm that stays as it is.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
        >>> from mimicnorm.methods import MimicNorm
        >>> plan(net, MimicNorm(), example=(2, 8, 6, 6)).totals()["centred"]
        1
    """
    method = as_method(method)
    _check_arguments(model, init, where)
    norms = {name: m for name, m in model.named_modules() if is_batch_norm(m)}
    if not norms:
        raise RefusedError(
            f"{type(model).__name__} has no BatchNorm: there is nothing to convert. "
            "(A network that was fused or converted elsewhere has lost them already.)"
        )
    if not method.removes_norm:
        steps = [NormStep(name, type(m).__name__, "left", "leave", why="the method") for name, m in norms.items()]
        return Plan(method, steps, init=None, init_why="the network as it is")
    left = {name for name, m in norms.items() if where is not None and not _accepts(where, m, name)}
    return _Planner(model, method, norms, left, record(model, example), init).build(head)


def _accepts(where: Where, module: nn.Module, name: str) -> bool:
    try:
        return bool(where(module, name))
    except TypeError as error:
        raise MimicNormError(f"where must take (module, qualified_name): {error}") from error


def _check_arguments(model: Any, init: Any, where: Any) -> None:
    if not isinstance(model, nn.Module):
        raise MimicNormError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if init not in INITS:
        raise MimicNormError(f'init={init!r}; use "auto", "theory", "calibrate" or None')
    if where is not None and not callable(where):
        raise MimicNormError("where must be a function (module, qualified_name) -> bool")
    if torch.is_inference_mode_enabled():
        raise MimicNormError("parameters made inside torch.inference_mode cannot be trained: call this outside of it")
    for name, m in model.named_modules():
        if isinstance(m, (DistributedDataParallel, DataParallel)):
            raise RefusedError(
                f"{name or 'the model'} is wrapped in {type(m).__name__}. Convert the .module inside, then wrap it."
            )
        if isinstance(m, torch._dynamo.OptimizedModule):
            raise RefusedError(f"{name or 'the model'} is compiled. Convert the plain module, then torch.compile it.")
        if isinstance(m, torch.jit.ScriptModule) and any(is_batch_norm(child) for child in m.modules()):
            raise RefusedError(f"{name or 'the model'} is a TorchScript module. Convert the Python module behind it.")
        if isinstance(m, LazyModuleMixin) and m.has_uninitialized_params():  # pyrefly: ignore
            raise RefusedError(f"{name or 'the model'} is lazy and has no shape yet. Run the model once, then convert.")
        if type(m).__name__.startswith("FSDP"):
            raise RefusedError(f"{name or 'the model'} is sharded ({type(m).__name__}). Convert first, then shard.")
        if isinstance(m, (WeightMean, LastNormed, LastNorm)) or "_mimicnorm" in m.__dict__:
            raise RefusedError(
                f"{name or 'the model'} was converted before. Convert a fresh model; "
                "to set its starting weights again use mimicnorm.init_."
            )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.is_inference():
            raise RefusedError(
                f"{name} was made inside torch.inference_mode, so it cannot be trained. Build the model outside."
            )


class _Planner:
    """The state of one planning: graph, modules, and what has been decided so far."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        norms: dict[str, nn.Module],
        left: set[str],
        graph: Graph,
        init: str | None,
    ):
        self.method, self.norms, self.left, self.graph, self.init = method, norms, left, graph, init
        self.modules = dict(model.named_modules())
        self.uses = flow.uses(graph)
        self.sums = flow.sums(graph)
        self.plan = Plan(method)
        self.gates = flow.gate_layers(graph)
        self.head_names: set[str] = set()
        self.owned: dict[str, list[Node]] = {}  # BatchNorm -> the layer calls that own it ("post")
        self.reached: dict[str, list[Node]] = {}  # BatchNorm -> the layer calls it reaches first ("pre")
        self.roles: dict[str, tuple[Node, str]] = {}  # layer -> its first call and its role
        self.probes: dict[str, probe.LayerProbe] = {}

    def build(self, head: str | Sequence[str] | None) -> Plan:
        self._functional_norms()
        self._heads(head)
        self._owners()
        self._branch_last_layers()
        ends = self._branch_ends()
        variance = self._variance(ends)
        layers = self._layer_steps(ends, variance)
        self._norm_steps(ends, variance, layers)
        self.plan.layers = list(layers.values())
        self._init()
        if len(self.left) == len(self.norms):
            self.refuse("", "where= leaves every BatchNorm, so there is nothing to convert", "Let it accept some")
        return self.plan

    def refuse(self, name: str, reason: str, remedy: str) -> None:
        self.plan.refusals.append(Refusal(name, reason, remedy))

    # -- what may stop it ----------------------------------------------------------------------

    def _functional_norms(self) -> None:
        for name in dict.fromkeys(self.graph.functional_norms):
            self.refuse(
                name,
                "calls F.batch_norm on data without being a BatchNorm module, so it cannot be taken out",
                "Use nn.BatchNorm there (in a ModuleList, not a plain list), or convert the rest without this module",
            )
        for name in self.graph.norm_inputs:
            if not self.graph.calls(name) and name not in self.left:
                self.refuse(
                    name,
                    "ran, but in a way that could not be followed",
                    "Leave it out with where=, or use a plain nn.BatchNorm there",
                )

    def _heads(self, head: str | Sequence[str] | None) -> None:
        if head is not None:
            names = [head] if isinstance(head, str) else list(head) if isinstance(head, (list, tuple, set)) else []
            if not names or not all(isinstance(n, str) for n in names):
                raise MimicNormError(f"head={head!r}; use the qualified name of a module, or a list of names")
            found = [h for n in names if (h := self._named_head(n)) is not None]
        else:
            found, problems = flow.logits(self.graph)
            if not found and self.method.last_norm:
                why = "; ".join(problems) or "the output is not a tensor that depends on the input"
                self.refuse(
                    "",
                    f"no evident head for the last BN: {why}",
                    'Name the module that makes the logits with head="...", or leave it out with last_norm=False',
                )
            elif problems and self.method.last_norm:
                self.plan.notes += [f"no last norm there: {p}" for p in problems]
        self.head_names |= {h.module for h in found}
        if self.method.last_norm:
            kinds = {h.module: type(self.modules[h.module]).__name__ for h in found}
            self.plan.heads = [HeadStep(h.module, kinds[h.module], h.classes, h.dim) for h in found]

    def _named_head(self, name: str) -> flow.Logits | None:
        if name not in self.modules:
            self.refuse(name, "head= names no module of the model", "See model.named_modules() for the names")
            return None
        nodes = [n for n in self.graph.nodes if n.layer == name or name in n.made_by]
        if not nodes:
            self.refuse(name, "head= names a module that returned no tensor in the example's forward", "Name another")
            return None
        made = next((n for n in nodes if n.layer == name), nodes[0])
        inside = flow.head_layer(made)  # of a container, the layer in it that makes the logits
        if inside is not None:
            self.head_names.add(inside)
        return flow.logits_at(made, name)

    # -- owners --------------------------------------------------------------------------------

    def _owners(self) -> None:
        for name in self.norms:
            calls = self.graph.calls(name)
            if name in self.left or not calls:
                continue
            if any(flow.on_raw_input(call) for call in calls):
                self.refuse(
                    name or "(root)",
                    "this BatchNorm normalises the model's own input: data normalisation, not a hidden layer",
                    "Leave it out with where=lambda module, name: name != "
                    f"{name!r}, or normalise the data and remove it",
                )
                continue
            owners = [flow.owner(call) for call in calls]
            if all(o is not None for o in owners):
                self.owned[name] = [o for o in owners if o is not None]
                for o in self.owned[name]:
                    self._take(o, "gate" if o.layer in self.gates else "owner")
            else:
                reached = [layer for call in calls for layer in flow.reached_layers(call)]
                keep = [r for r in reached if r.layer not in self.head_names and r.layer not in self.gates]
                self.reached[name] = keep
                for r in keep:
                    self._take(r, "owner")

    def _take(self, call: Node, role: str) -> None:
        assert call.layer is not None
        if call.layer in self.head_names:
            self.refuse(call.layer, "is the head, yet a BatchNorm follows it", "Name the layer that makes the logits")
        self.roles.setdefault(call.layer, (call, role))

    def _branch_last_layers(self) -> None:
        """The last layer of a pre-activation branch has no BatchNorm behind it, yet it ends what one began."""
        pre = [c for name in self.reached for c in self.graph.calls(name)]
        removed = pre + [c for name in self.owned for c in self.graph.calls(name)]
        groups = [(s.operands, removed) for s in self.sums]
        # A concat joins whole feature maps as often as branches: there the branch must begin with a BatchNorm.
        concats = [n for n in self.graph.nodes if n.kind is Kind.CONCAT and n.op not in ("overwrite", "stack")]
        groups += [(n.inputs, pre) for n in concats]
        for operands, begins in groups:
            for operand in operands:
                own = flow.own_path(operand, operands)
                for last in flow.ends(operand):
                    outside = last.layer is None or last.layer in self.head_names or last.layer in self.gates
                    if outside or last.layer in self.roles:
                        continue
                    began = any(own >> c.index & 1 for c in begins)
                    if began and any(own >> c.index & 1 and last in flow.reached_layers(c) for c in removed):
                        self._take(last, "branch end")

    # -- sums, scalars, variance ---------------------------------------------------------------

    def _branch_ends(self) -> set[Node]:
        """The calls (of BatchNorms or converted layers) that end a residual branch."""
        if self.method.residual is None:
            return set()
        ends: set[Node] = set()
        for s in self.sums:
            for branch in s.branches:
                own = flow.own_path(branch, s.operands)  # an end on the common trunk ends no branch
                for e in flow.ends(branch):
                    removed = e.norm in self.owned or e.norm in self.reached
                    if own >> e.index & 1 and (removed or (e.layer in self.roles and e.norm is None)):
                        ends.add(e)
        return ends

    def _variance(self, ends: set[Node]) -> dict[Node, float]:
        """Predicted variance before each activation: 1 after inputs, norms and branch ends; added at sums."""
        v: dict[Node, float] = {}
        for node in self.graph.nodes:
            before = [v[n] for n in node.inputs]
            left = node.kind is Kind.NORM and node.norm in self.left
            if not before or node.kind is Kind.OTHER_NORM or left or node in ends:
                v[node] = 1.0
            elif (summands := flow.summands(node)) is not None:
                v[node] = sum(v[n] for n in summands) / (len(summands) ** 2 if node.op == "mean" else 1)
            elif node.kind is Kind.CONCAT:
                sizes = [n.shape.numel() for n in node.inputs]
                v[node] = sum(a * s for a, s in zip(before, sizes, strict=True)) / sum(sizes)
            elif node.kind is Kind.PRODUCT:
                kept = flow.carried(node)
                v[node] = v[kept] if kept is not None else sum(before) / len(before)
            else:
                v[node] = before[0]
        return v

    # -- steps ---------------------------------------------------------------------------------

    def _layer_steps(self, ends: set[Node], v: dict[Node, float]) -> dict[str, LayerStep]:
        steps: dict[str, LayerStep] = {}
        for name, (call, role) in sorted(self.roles.items(), key=lambda item: item[1][0].index):
            module = self.modules[name]
            fed = feed(call)
            weight: Tensor = module.weight  # pyrefly: ignore
            n = fan_in(
                weight,
                getattr(module, "groups", 1),
                bool(getattr(module, "transposed", False)),
                getattr(module, "stride", ()),
            )
            self.probes[name] = probe.layer(module, call.inputs[0].shape)
            why = self._why_not_centred(module, n, role)
            scale = None
            if call in ends:  # a branch end without a BatchNorm of its own
                scale, role = self.method.branch_scale(v[call.inputs[0]]), "branch end"
            if problem := self._cannot_change(name, changes=not why or scale is not None, centre=not why):
                self.refuse(name, *problem)
            kind = type(module).__name__
            action = "keep" if why else "centre"
            gain = fed.gain(not why, n)
            steps[name] = LayerStep(name, kind, role, action, n, fed.name, gain, scale, v[call.inputs[0]], None, why)
        return steps

    def _why_not_centred(self, module: nn.Module, n: int, role: str) -> str:
        """Why a layer keeps its mean, or an empty string."""
        groups = getattr(module, "groups", 1)
        if not self.method.centres:
            return "the method does not centre"
        if role == "gate":
            return "part of a gate"
        if groups > 1 and groups == getattr(module, "in_channels", 0):
            return "depthwise"
        return "" if n > self.method.min_fan_in else f"fan-in of at most {self.method.min_fan_in}"

    def _cannot_change(self, name: str, changes: bool, centre: bool) -> tuple[str, str] | None:
        """Why a layer cannot be given another forward or other weights, and what to do; or None."""
        module = self.modules[name]
        if (changes or self.init is not None) and not isinstance(module._parameters.get("weight"), nn.Parameter):
            return (
                "its weight is computed from other parameters (weight norm, a parametrization), so what would be "
                "centred and initialised is not what the optimizer sees",
                "Remove it first (torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, "
                "remove_spectral_norm or prune.remove), or leave its BatchNorm with where=",
            )
        if changes and not self._inside(name):
            return (
                "its weight is used by a function outside its own forward, which would not be changed",
                "Call the module itself, or leave its BatchNorm with where=",
            )
        if centre and not self.probes[name].centres:
            return (
                f"{type(module).__name__} has a forward of its own, and its weight-mean version gives another output",
                "Leave its BatchNorm with where=, or use a plain layer",
            )
        return None

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
            if probed is None:
                self.refuse(
                    name,
                    f"{kind} does more than normalise and run its children, so nothing can stand for it",
                    "Leave it out with where=, or replace it with nn.BatchNorm and what else it does",
                )
                continue
            rest = {"keeps": probed.children, "channel_dim": probed.channel_dim}
            if not calls:
                self.plan.notes.append(
                    f"{name} never ran on the example: it becomes a shift, its layer is not converted"
                )
                step = NormStep(name, kind, "unused", "shift", why="never called on the example", **rest)
                self.plan.norms.append(step)
                continue
            variance = v[calls[0].inputs[0]]
            scale = self.method.branch_scale(variance) if any(c in ends for c in calls) else None
            step = self._owned_step if name in self.owned else self._pre_step
            self.plan.norms.append(dataclasses.replace(step(name, kind, calls, variance, scale, layers), **rest))

    def _owned_step(self, name, kind, calls, v, scale, layers) -> NormStep:
        owner = self.owned[name][0]
        owners = tuple(dict.fromkeys(o.layer for o in self.owned[name] if o.layer))
        layer = layers[owners[0]]
        # Layer and BatchNorm meet in every call of either, and in nothing else: they may be used as one.
        read_once = all(flow.read_once(o) for o in self.owned[name])
        paired = len(owners) == 1 and self.uses[layer.name] == len(calls) == len(set(self.owned[name]))
        alone = paired and read_once and self._inside(layer.name)
        why = ""
        if scale is not None:
            why = f"ends a residual branch: scalar 1/{'sqrt(v)' if self.method.residual == 'sqrt' else 'v'}"
        if scale is not None and not (alone and layer.action == "centre" and self.probes[layer.name].scales):
            return NormStep(name, kind, "post", "scale", owners, scale=scale, v=v, why=why)
        direct = all(c.inputs[0] is o for c, o in zip(calls, self.owned[name], strict=True))
        foldable = alone and direct and self._takes_beta(name, layer.name, owner)
        if scale is not None:
            layer = layers[layer.name] = dataclasses.replace(layer, scale=scale, role="branch end")
            why += f", folded into {layer.name}"
        beta = getattr(self.norms[name], "bias", None) is not None
        if foldable or (not beta and read_once):
            if beta:
                layers[layer.name] = dataclasses.replace(layer, beta_from=name)
            return NormStep(name, kind, "post", "remove", owners, v=v, why=why or f"owned by {layer.name}")
        reason = "beta cannot become its layer's bias" if alone else "its layer is also used without it"
        reason = reason if read_once else "its layer's output is read more than once"
        return NormStep(name, kind, "post", "shift", owners, v=v, why=why or reason)

    def _takes_beta(self, name: str, layer: str, call: Node) -> bool:
        """Whether a BatchNorm's beta can become (or join) the bias of the layer directly before it."""
        beta, module = getattr(self.norms[name], "bias", None), self.modules[layer]
        own = getattr(module, "bias", None)
        channels = 1 if call.op.startswith("conv") else len(call.shape) - 1  # where the layer puts its outputs
        if beta is None or channels != 1 or beta.shape != call.shape[1:2] or beta.dtype != module.weight.dtype:
            return False
        if own is None:
            return self.probes[layer].takes_bias
        return own.requires_grad == beta.requires_grad  # else one would be frozen, or trained, by the other

    def _pre_step(self, name, kind, calls, v, scale, layers) -> NormStep:
        del calls, layers
        owners = tuple(dict.fromkeys(r.layer for r in self.reached.get(name, ()) if r.layer))
        if scale is not None:
            return NormStep(name, kind, "pre", "scale", owners, scale=scale, v=v, why="ends a residual branch")
        why = f"before {', '.join(owners[:3])}" if owners else "before no layer"
        return NormStep(name, kind, "pre", "shift", owners, v=v, why=why)

    # -- starting weights ----------------------------------------------------------------------

    def _init(self) -> None:
        init = self.init
        trained = [n for n, m in self.norms.items() if n not in self.left and looks_trained(m)]
        if init == "auto" and trained:
            self.refuse(
                trained[0],
                f"the network looks trained (running statistics are not 0 and 1 in "
                f"{count(len(trained), 'BatchNorm')}), and converting sets new starting weights",
                'Say so with init="theory" or init="calibrate"; init=None keeps every weight (a checkpoint follows)',
            )
        if init == "auto":
            behind = 0
            for call, _ in self.roles.values():
                behind |= call.ancestors
            why = without_formula((n for n in self.graph.nodes if behind >> n.index & 1), self.roles)
            self.plan.init = "calibrate" if why else "theory"
            self.plan.init_why = why or "every operation on the way has a formula"
        else:
            self.plan.init, self.plan.init_why = init, "asked for"


def looks_trained(norm: nn.Module) -> bool:
    """Whether a BatchNorm has seen data: running statistics other than 0 and 1."""
    mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor) or mean.is_meta or var.is_meta:
        return False
    return bool((mean != 0).any() or (var != 1).any())
