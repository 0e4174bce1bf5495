"""Decide everything before anything is touched: what becomes of each BatchNorm and its layers, and what refuses.

``plan`` is pure. It records the model, reads the graph, asks the method for one edit per BatchNorm and layer, and
proves the result; ``convert_`` carries it out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import RefusedError
from mimicnorm.layers import WEIGHT_LAYERS, fan_in
from mimicnorm.methods import Method, as_method
from mimicnorm.methods.edits import LayerEdit, NormEdit
from mimicnorm.surgery import attention, changeable, flow, heads, keeping, probe, residual, roles, starting
from mimicnorm.surgery.folding import Folder, uses_are_calls
from mimicnorm.surgery.gains import feed
from mimicnorm.surgery.given_weights import given
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.isolate import untouched
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.plan import Plan, count, first_names
from mimicnorm.surgery.preconditions import Where, accepts, check_arguments
from mimicnorm.surgery.proof import prove
from mimicnorm.surgery.record import record
from mimicnorm.surgery.recorder import is_batch_norm

_SILENT = (Kind.NORM, Kind.VIEW, Kind.PAD, Kind.CONCAT, Kind.CONSTANT)  # what a probe in evaluation mode sees, too


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
        init: Initial weights: "theory", "calibrate", "auto" (theory where every operation on the way has a formula,
            else calibrate), or None to leave every weight as it is. "keep" is for a trained network: in evaluation mode
            the converted one computes the same; running statistics become constants, gammas and betas stay trainable.
        head: Qualified name(s) of the module(s) that make the logits; derived from the data flow if not given.
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
    check_arguments(model, init, where, allow_mixing)
    planned = Plan(_for_network(as_method(method), init))
    norms = {name: m for name, m in model.named_modules() if is_batch_norm(m)}
    if not norms and planned.method.removes_norm:
        raise RefusedError(
            f"{type(model).__name__} has no BatchNorm: there is nothing to convert. "
            "(A network that was fused or converted elsewhere has lost them already.)"
        )
    left = {name for name, m in norms.items() if where is not None and not accepts(where, m, name)}
    graph = record(model, example)
    head_names = heads.choose(model, graph, head, planned)
    if not planned.method.removes_norm:
        planned.norms = [_leave(name, m, "the method") for name, m in norms.items()]
        planned.init_why = "the network as it is"
        return planned
    if len(left) == len(norms):
        planned.refuse("", "where= leaves every BatchNorm, so there is nothing to convert", "Let it accept some")
    if planned.method.keeps_statistics:
        keeping.refuse_statistics({name: m for name, m in norms.items() if name not in left}, planned)
        keeping.refuse_trained_heads(model, planned)
    with untouched(model):
        for m in model.modules():
            m.training = False  # reading the weight of a spectral norm in training mode changes it
        _Planner(model, planned, graph, norms, left, head_names).decide(init)
    if planned.ok:
        prove(model, planned, graph, example, allow_mixing)
    return planned


def _for_network(method: Method, init: str | None) -> Method:
    """Return the method as it is applied to a fresh network, or to a trained one."""
    resolved = method.resolved(trained=init == "keep")
    if init != "keep":
        return resolved
    trained = resolved.for_trained()
    if trained is None:
        raise RefusedError(
            f'{type(method).__name__}() cannot keep what a trained network computes (init="keep"): use MimicNorm(), '
            "WeightMean(), LastBN() or NoNorm()"
        )
    return trained


def _leave(name: str, norm: nn.Module, why: str) -> NormEdit:
    return NormEdit(name=name, kind=type(norm).__name__, role="left", action="leave", why=why)


class _Planner:
    """The state of one planning: the graph, the roles, and what has been decided so far."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        graph: Graph,
        norms: dict[str, nn.Module],
        left: set[str],
        head_names: set[str],
    ):
        self.plan, self.method, self.graph = plan, plan.method, graph
        self.norms, self.left = norms, left
        self.modules = dict(model.named_modules())
        self.removed = [name for name in norms if name not in left]
        self._refuse_functional_norms()
        self.roles = roles.assign(graph, self.removed, head_names, plan)
        self.given = given(model, {n.layer for n in graph.nodes if n.layer is not None})
        self.probes: dict[str, probe.LayerProbe] = {}

    def decide(self, init: str | None) -> None:
        """Decide about every layer and BatchNorm, then about the initial weights."""
        drafts = self._drafts()
        branches = self._branches()
        self.ends = {end for branch in branches for end in branch.ends}
        planned = {*self.roles.owned, *self.roles.reached, *self.roles.layers}
        products = attention.unbounded_products(self.graph, planned)
        around = [] if self.method.own_init else branches
        self.damped = residual.ends_around((p.node for p in products), around)
        self.v = residual.variance(self.graph, self.method, self.ends, self._is_unit(drafts), self.damped)
        self.starts = init not in (None, "keep")
        layers = {name: self._layer_edit(draft, branches) for name, draft in drafts.items()}
        layers = {
            name: self._checked(edit, changeable.why_not_tied(name, self.modules, layers))
            for name, edit in layers.items()
        }
        self._note_small(layers)
        self._norm_edits(layers)
        self.plan.layers = list(layers.values())
        self.plan.gates = [n for n in self.modules if n in self.roles.gates and n not in layers and self._has_weight(n)]
        obstacles = starting.obstacles(self.plan, self.modules, self.graph, self.left, self.probes, self.v)
        starting.choose(self.plan, self.modules, obstacles, init)
        if products and not self.method.unit_norms and self.starts:
            self.plan.notes.append(attention.note(products, bool(self.damped)))

    def _refuse_functional_norms(self) -> None:
        for name in dict.fromkeys(self.graph.functional_norms):
            self.plan.refuse(
                name,
                "calls F.batch_norm on data without being a BatchNorm module, so it cannot be taken out",
                "Use nn.BatchNorm there (in a ModuleList, not a plain list), or convert the rest without this module",
            )
        for name in self.graph.norm_inputs:
            if not self.graph.calls(name) and name not in self.left:
                self.plan.refuse(
                    name,
                    "ran, but in a way that could not be followed",
                    "Leave it out with where=, or use a plain nn.BatchNorm there",
                )

    # -- residual branches ---------------------------------------------------------------------

    def _branches(self) -> list[residual.Branch]:
        """Return the branches that the method ends with a scalar."""
        method = self.method
        candidates = residual.branches(self.graph, self.roles.can_end, self.roles.last_layers, self.roles.gates)
        chosen = method.branches(candidates)
        scalars = method.branch_scale(1.0) is not None
        dead = [b.name for b in candidates if scalars and b not in chosen and b.beside_skip and not b.wakes]
        if dead:
            self.plan.notes.append(
                f"a ReLU comes after the branches that end in {first_names(dead)}: a branch that starts at zero would "
                "stay zero there, so they are not treated as residual branches"
            )
        if method.needs_branches and not chosen:
            none = "no residual branch without a ReLU after it" if dead else "none"
            self.plan.refuse(
                "",
                f"{type(method).__name__} is made for residual branches, and this network has {none}",
                "Use another method, such as MimicNorm() or ScaledWS()",
            )
        return chosen

    def _scalar(self, calls: list[Node]) -> dict[str, Any]:
        """Return the residual scalar of a branch that ends in one of these calls, as fields of an edit."""
        scale = self.method.branch_scale(self.v[calls[0].inputs[0]]) if not self.ends.isdisjoint(calls) else None
        if scale is None:
            return {}
        why = f"ends a residual branch: scalar {self.method.scale_rule}"
        if not self.damped.isdisjoint(calls):
            scale *= math.sqrt(attention.VARIANCE)
            why += f", times sqrt({attention.VARIANCE:g}): attention"
        return {"scale": scale, "factor": self.method.branch_factor, "why": why}

    def _is_unit(self, drafts: dict[str, LayerEdit]) -> Callable[[Node], bool]:
        """Return the predicate of calls whose output has variance 1 whatever their input has."""

        def is_unit(call: Node) -> bool:
            if call.kind is Kind.NORM:
                return call.norm in self.left or self.method.unit_norms
            changed = call.layer is not None and call.layer in drafts and not self.method.keeps(drafts[call.layer])
            return self.method.unit_layers and changed

        return is_unit

    # -- layers --------------------------------------------------------------------------------

    def _drafts(self) -> dict[str, LayerEdit]:
        """Return the facts about each layer, except for variances and scalars."""
        drafts = {}
        for name, (call, role) in sorted(self.roles.layers.items(), key=lambda item: item[1][0].index):
            draft = self._draft(name, call, role)
            if not self._has_weight(name) and self.method.keeps(draft):
                draft = dataclasses.replace(draft, start="keep")
            drafts[name] = draft
        return drafts

    def _draft(self, name: str, call: Node, role: str, **facts: Any) -> LayerEdit:
        module: Any = self.modules[name]
        weight: Tensor = module.weight
        groups, transposed = getattr(module, "groups", 1), bool(getattr(module, "transposed", False))
        fed = feed(call, self.modules)
        return LayerEdit(
            name=name,
            kind=type(module).__name__,
            role=role,
            fan_in=fan_in(weight, groups, transposed, getattr(module, "stride", ())),
            depthwise=groups > 1 and groups == getattr(module, "in_channels", 0),
            fed_by=fed.name,
            fed_mean=fed.mean,
            fed_rms=math.sqrt(fed.second_moment),
            gain=1 / math.sqrt(fed.second_moment),
            on_raw_input=flow.on_raw_input(call),
            start={"frozen": "keep", "sparse": "scale"}.get(self.given.get(name, ""), "draw"),
            **facts,
        )

    def _has_weight(self, name: str) -> bool:
        """Tell whether a layer's weight is a parameter, not computed from others."""
        return isinstance(self.modules[name]._parameters.get("weight"), nn.Parameter)

    def _layer_edit(self, draft: LayerEdit, branches: list[residual.Branch]) -> LayerEdit:
        call = self.roles.layers[draft.name][0]
        scalar = self._scalar([call])  # a branch end without a BatchNorm
        edit = self.method.layer(dataclasses.replace(draft, v=self.v[call.inputs[0]], **scalar), branches)
        self.probes[draft.name] = probe.layer(self.modules[draft.name], call.inputs[0].shape)
        if scalar:
            whole = edit.action in ("keep", "bias") and not self.probes[draft.name].scales_uncentred
            edit = dataclasses.replace(edit, role="branch end", scales_output=whole)
        return self._checked(edit, self._why_not(edit, bool(scalar)))

    def _checked(self, edit: LayerEdit, problem: tuple[str, str] | None) -> LayerEdit:
        """Return an edit that can be carried out, or refuse it."""
        if problem and self.method.keeps_statistics:  # always right: the layer as it is, and its BatchNorm by itself
            return dataclasses.replace(edit, action="keep", centring=None, why=problem[0])
        if problem:
            self.plan.refuse(edit.name, *problem)
        return edit

    def _why_not(self, edit: LayerEdit, scaled: bool) -> tuple[str, str] | None:
        """Say why a layer cannot be changed as planned, and what to do; or return None."""
        name, starts = edit.name, self.starts and edit.start != "keep"
        ways = changeable.Ways(self.probes[name], self._has_weight(name), uses_are_calls(self.graph, name))
        return changeable.why_not(self.modules[name], edit.action, scaled, starts, ways)

    def _note_small(self, layers: dict[str, LayerEdit]) -> None:
        """Say which layers would be centred if their fan-in were larger."""
        if self.method.weights != "centre":
            return
        drawn = [e for e in layers.values() if e.start == "draw" and e.role != "gate" and not e.depthwise]
        small = [e.name for e in drawn if e.fan_in <= self.method.min_fan_in]
        if small:
            self.plan.notes.append(
                f"{count(len(small), 'layer')} ({first_names(small)}) not centred: fan-in of at most "
                f"min_fan_in={self.method.min_fan_in}"
            )

    # -- BatchNorms ----------------------------------------------------------------------------

    def _norm_edits(self, layers: dict[str, LayerEdit]) -> None:
        """Decide about every BatchNorm, and move betas and residual scalars into the layers that take them."""
        edit_of = functools.partial(self._edit_with_scalar, layers=layers)
        folder = Folder(self.graph, self.modules, self.removed, self.roles, edit_of, self.probes, self.method)
        for name, module in self.norms.items():
            if name in self.left:
                self.plan.norms.append(_leave(name, module, "where="))
                continue
            calls = self.graph.calls(name)
            shape = self.graph.norm_inputs.get(name, calls[0].shape if calls else None)
            probed = self._probe(name, module, shape)
            if probed is None:
                continue
            draft = self._norm_draft(name, calls, children=probed.children, channel_dim=probed.channel_dim)
            positions = 16 if shape is None else math.prod(shape[1:]) // shape[probed.channel_dim]
            edit = self.method.norm(draft, folder.facts(name, positions))
            if edit.beta_into is not None:
                taker = layers[edit.beta_into]
                action = "trained" if edit.action == "fold" else taker.action
                layers[edit.beta_into] = dataclasses.replace(taker, beta_from=name, action=action)
            for layer in edit.scale_into:
                scalar = {"scale": edit.scale, "factor": edit.factor, "role": "branch end"}
                scalar["scales_bias"] = self.method.scales_bias
                layers[layer] = dataclasses.replace(layers.get(layer) or self._edit_of_part(layer), **scalar)
            if not calls:
                self.plan.notes.append(
                    f"{name} never ran on the example: it becomes its own {edit.action}, as does a BatchNorm of its "
                    "width that may share its layer"
                )
            self.plan.norms.append(edit)
        idle = [n for n, m in self.modules.items() if isinstance(m, WEIGHT_LAYERS) and n not in folder.used]
        if idle:
            self.plan.notes.append(
                f"{count(len(idle), 'layer')} ({first_names(idle)}) never ran on the example and stay as they are"
            )
        self._note_scales()
        keeping.note_affines(self.plan, self.graph, self.modules)

    def _edit_with_scalar(self, name: str, layers: dict[str, LayerEdit]) -> LayerEdit | None:
        """Return the edit of a layer that is to take a residual scalar into its weight; None if it cannot."""
        edit = layers.get(name) or self._edit_of_part(name)
        if self.method.keeps_statistics:
            edit = dataclasses.replace(edit, action="trained")
        return edit if self._why_not(edit, scaled=True) is None else None

    def _edit_of_part(self, name: str) -> LayerEdit:
        """Return the edit of a layer that no BatchNorm follows directly: it makes a part of a concat."""
        call = self.graph.calls(name)[0]
        self.probes[name] = probe.layer(self.modules[name], call.inputs[0].shape)
        return self.method.layer(self._draft(name, call, "branch end", v=self.v[call.inputs[0]]), ())

    def _note_scales(self) -> None:
        """Say what residual scalars cost that no weight can take."""
        names = [n.name for n in self.plan.norms if n.action == "scale" and not n.scalar]
        calls = [call for name in names for call in self.graph.calls(name)]
        if calls:
            saved = sum(math.prod(c.shape[1:]) * c.dtype.itemsize for c in calls) / 2**20
            self.plan.notes.append(
                f"{count(len(names), 'residual scalar')} ({first_names(names)}) multiply activations, which are saved "
                f"for backward ({saved:.2f} MiB per sample): the layer before is shared, or an activation is between"
            )

    def _norm_draft(self, name: str, calls: list[Node], **facts: Any) -> NormEdit:
        kind = type(self.modules[name]).__name__
        if not calls:
            return NormEdit(name=name, kind=kind, role="unused", **facts)
        role, owners = self.roles.of_norm(name)
        v = self.v[calls[0].inputs[0]]
        return NormEdit(name=name, kind=kind, role=role, owners=owners, v=v, **self._scalar(calls), **facts)

    def _probe(self, name: str, module: nn.Module, shape: Any) -> probe.NormProbe | None:
        """Probe a BatchNorm of any class; refuse it and return None if nothing can replace it."""
        if "forward" in module.__dict__:
            self.plan.refuse(name, *changeable.REPLACED)
            return None
        inside = (n for n in self.graph.nodes if n.where == name and n.kind not in _SILENT)
        does_more = isinstance(module, _BatchNorm) and any(n.users or n.is_output for n in inside)
        does_more |= any(is_batch_norm(m) for m in module.modules() if m is not module)  # for other samples, say
        probed = None if does_more else probe.norm(module, shape)
        if probed and self.method.keeps_statistics and not probe.evaluates_as_affine(module, shape, probed):
            self.plan.refuse(
                name,
                f"{type(module).__name__} does not apply its running statistics, gamma and beta as BatchNorm does",
                "Leave it out with where=",
            )
        if probed is None:
            self.plan.refuse(
                name,
                f"{type(module).__name__} does more than normalise and run its children, so nothing can replace it",
                "Leave it out with where=, or replace it with nn.BatchNorm and what else it does",
            )
        return probed
