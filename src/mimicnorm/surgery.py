"""Carry out a plan: the surgery, whole or not at all.

Modules keep their identity: a layer changes its class to one derived from its own, a BatchNorm becomes what is
left of it. The converted network is run once on fake tensors; should that fail, everything is put back.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm import mixing
from mimicnorm.errors import CheckError, InitError, MimicNormError, RefusedError
from mimicnorm.init import initialise
from mimicnorm.isolate import snapshot
from mimicnorm.layers import (
    FixupLayer,
    FixupScalars,
    GroupNorm,
    LastNorm,
    LastNormed,
    Remains,
    Scale,
    ScaledOutput,
    Shift,
    Standardisation,
    Standardised,
    WeightMean,
    centre_,
    fixup_,
    last_norm_,
    scale_output_,
    standardise_,
)
from mimicnorm.methods import Method
from mimicnorm.planning import Where, plan
from mimicnorm.probe import channels
from mimicnorm.record import is_batch_norm, record
from mimicnorm.steps import OWN_INIT, LayerStep, NormStep, Plan


@dataclass
class Report(Plan):
    """The plan that was carried out, and what an optimizer built before it would miss.

    Attributes:
        new_parameters: (qualified name, parameter) of every trainable parameter that did not exist before.
        moved_parameters: Old key -> new key of betas that live on as, or were added to, a layer's bias or a shift.
    """

    new_parameters: list[tuple[str, Parameter]] = field(default_factory=list)
    moved_parameters: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            **super().as_dict(),
            "new_parameters": [name for name, _ in self.new_parameters],
            "moved_parameters": dict(self.moved_parameters),
        }


_CHANGED = {"centre": WeightMean, "standardise": Standardised, "bias": FixupLayer}


def convert_(
    model: nn.Module,
    method: Method,
    *,
    example: Any,
    init: str | None = "auto",
    head: str | Sequence[str] | None = None,
    where: Where | None = None,
) -> Report:
    """Take BatchNorm out of a network, in place; arguments as for ``plan``.

    Convert first, then build the optimizer, compile, wrap or shard. Either all of it happens or an error is
    raised and the model is as it was.

    Example:
        >>> from mimicnorm.methods import MimicNorm
        >>> net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 4))
        >>> report = convert_(net, MimicNorm(), example=(2, 8, 6, 6))
        >>> type(net[0]).__name__, type(net[1]).__name__, report.init
        ('WeightMeanConv2d', 'Identity', 'theory')
    """
    planned = plan(model, method, example=example, init=init, head=head, where=where)
    planned.require()
    return _carry_out(model, planned, example, where)


def convert(model: nn.Module, method: Method, *, example: Any, **kwargs: Any) -> nn.Module:
    """A converted deep copy; the argument is untouched. Keywords as for ``convert_``."""
    planned = plan(model, method, example=example, **kwargs)
    planned.require()
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise MimicNormError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}). "
            "Convert it in place with convert_."
        ) from error
    _carry_out(twin, planned, example, kwargs.get("where"))
    return twin


def _carry_out(model: nn.Module, planned: Plan, example: Any, where: Where | None) -> Report:
    report = Report(**planned.__dict__)
    if not report.method.removes_norm:
        return report
    with _all_or_nothing(model, report):
        _operate(model, report)
        model._mimicnorm = planned  # pyrefly: ignore  # for check and init_; not in the state dict
        suspects = _still_runs(model, report, example)
        if report.init is not None:
            initialise(model, report, report.init, example)
        if suspects:
            _refuse_mixing(model, report, example, suspects, where)
    return report


def init_(model: nn.Module, init: str = "theory", *, example: Any = None) -> None:
    """Set the starting weights of a converted network, apart from the surgery.

    For models that were converted with ``init=None``, on the meta device, or are reset for another run.

    Args:
        model: A converted network, or one that contains it.
        init: "theory", or "calibrate" (needs ``example``).
        example: As for ``convert_``; real data is best.
    """
    for prefix, root in _conversions(model):
        done: Plan = root._mimicnorm  # pyrefly: ignore
        with _all_or_nothing(root, done):
            if done.method.own_init and init == "calibrate":
                raise InitError(f'{type(done.method).__name__} {OWN_INIT}: use init="theory"')
            if prefix and init == "calibrate":
                raise CheckError(f"calibrate runs the converted network itself: call init_ on {prefix.rstrip('.')!r}")
            initialise(root, done, init, example)


def check(model: nn.Module) -> None:
    """Raise ``CheckError`` if a converted network is no longer whole.

    A head that was replaced (``model.fc = ...``, ``reset_classifier``) loses its LastNorm; a layer that was
    replaced loses its centring; a BatchNorm may have come back.
    """
    problems: list[str] = []
    for prefix, root in _conversions(model):
        modules = dict(root.named_modules())
        done: Plan = root._mimicnorm  # pyrefly: ignore
        for head in done.heads:
            if not isinstance(modules.get(head.name), LastNormed):
                problems.append(
                    f"{prefix}{head.name}: the head was replaced and its LastNorm is gone; "
                    "put it back with mimicnorm.layers.last_norm_(head, LastNorm(classes))"
                )
        for step in done.layers:
            kept = ScaledOutput if step.scale is not None else nn.Module
            wanted = _CHANGED.get(step.action, kept)
            if not isinstance(modules.get(step.name), wanted):
                problems.append(f"{prefix}{step.name}: the layer was replaced and is no longer {wanted.__name__}")
        left = {n.name for n in done.norms if n.action == "leave"}
        for name, m in modules.items():
            if is_batch_norm(m) and not isinstance(m, LastNorm) and name not in left:
                problems.append(f"{prefix}{name}: a {type(m).__name__} has come back")
    if problems:
        raise CheckError("the converted network is no longer whole:\n" + "\n".join(f"  - {p}" for p in problems))


def _conversions(model: nn.Module) -> list[tuple[str, nn.Module]]:
    if not isinstance(model, nn.Module):
        raise MimicNormError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    found = [(f"{n}." if n else "", m) for n, m in model.named_modules() if "_mimicnorm" in m.__dict__]
    if not found:
        raise CheckError(f"{type(model).__name__} was not converted by mimicnorm")
    return found


def _still_runs(model: nn.Module, report: Report, example: Any) -> dict[str, str]:
    """Run the converted network on fake tensors: code that reads a BatchNorm's attributes shows here.

    Returns:
        The modules in which samples may still see each other, each with an operation that works across the batch.
    """
    found = None
    with _without_last_norms(model), contextlib.suppress(Exception):  # of another batch size, or of missing values
        found = mixing.suspects(model, example, _left(report))
    if found is not None:
        return found
    try:
        with _without_last_norms(model):
            record(model, example)
    except MimicNormError as error:
        cause, where = error.__cause__ or error, getattr(error, "where", "")
        raise RefusedError(
            f"without its BatchNorms the network does not run any more ({f'in {where!r}: ' if where else ''}"
            f"{type(cause).__name__}: {cause}), so it was put back as it was. Leave the BatchNorms that its code reads "
            "with where="
        ) from error
    return {"": ""}


def _refuse_mixing(
    model: nn.Module, report: Report, example: Any, suspects: dict[str, str], where: Where | None
) -> None:
    """Refuse a network whose samples see each other by numbers, whatever its modules are called."""
    try:
        with _without_last_norms(model):
            changes = mixing.changes(model, example, _left(report), suspects)
    except Exception:  # the passes were extra: that they cannot be made says nothing about the conversion
        changes = dict.fromkeys(suspects, math.nan)
    for name, change in changes.items():
        module = model.get_submodule(name)
        at = f"{name!r} ({type(module).__name__})" if name else "the network itself"
        by = f" ({suspects[name]})" if suspects[name] else ""
        if math.isnan(change):
            report.notes.append(f"{at} may work across the batch{by}: that could not be tried")
        elif change > 0 and _leaves(where, module, name):
            report.notes.append(f"{at} works across the batch{by} and was left by where=")
        elif change > 0:
            raise RefusedError(
                f"samples would still see each other: {at} works across the batch{by}, its output for one sample "
                f"changes by {change:.1g} of its size with the others, and it is no BatchNorm that is known here. So "
                "the network was put back as it was. Put nn.BatchNorm in its place before converting. If it is meant "
                "to do that, or the first dimension of the first argument is not the batch, leave it: "
                f"where=lambda module, name: name != {name!r}"
            )


def _leaves(where: Where | None, module: nn.Module, name: str) -> bool:
    try:
        return where is not None and not where(module, name)
    except Exception:  # written with BatchNorms in mind: it has nothing to say about this module
        return False


def _left(report: Report) -> set[str]:
    return {n.name for n in report.norms if n.action == "leave"}


@contextlib.contextmanager
def _without_last_norms(model: nn.Module) -> Iterator[None]:
    """Let logits pass as they are: an example of one sample is enough, and the last norm mixes samples by design."""
    norms = [m for m in model.modules() if isinstance(m, LastNorm)]
    for norm in norms:
        norm.intercept = torch.Tensor.clone
    try:
        yield
    finally:
        for norm in norms:
            norm.intercept = None


# -- the surgery -------------------------------------------------------------------------------------------------


def _operate(model: nn.Module, report: Report) -> None:
    modules = dict(model.named_modules())
    betas = {n.name: _as_parameter(getattr(modules[n.name], "bias", None)) for n in report.norms}
    for step in report.layers:
        _operate_on_layer(modules[step.name], step, betas, report)
    moved = {step.beta_from for step in report.layers}
    for n in report.norms:
        if n.action != "leave":
            owner = modules[n.owner[0]] if n.owner else None
            _operate_on_norm(modules[n.name], n, None if n.name in moved else betas[n.name], owner, report)
    for h in report.heads:
        head = modules[h.name]
        like = next((p for p in head.parameters() if p.is_floating_point()), torch.empty(0))
        norm = LastNorm(h.classes, h.dim, device=like.device, dtype=like.dtype)
        norm.train(head.training)
        last_norm_(head, norm)


def _operate_on_layer(layer: nn.Module, step: LayerStep, betas: dict[str, Parameter | None], report: Report) -> None:
    weight: Tensor = layer.weight  # pyrefly: ignore

    def new(name: str, value: float, size: int = 1) -> Parameter:
        return _new(report, f"{step.name}.{name}", value, weight, weight.requires_grad, size)

    scale = new("residual_scale", step.scale) if step.scale is not None else None
    if step.action == "centre":
        centre_(layer, scale)
    elif step.action == "standardise":
        gain = new("gain", 1.0, _outputs(layer)) if step.learns_gain else None
        standardise_(layer, Standardisation(step.factor, step.output_factor), gain, scale)
    elif step.action == "bias":
        fixup_(layer, None if step.on_raw_input else new("input_bias", 0.0), scale)
    elif scale is not None:
        scale_output_(layer, scale)
    beta = betas.get(step.beta_from) if step.beta_from is not None else None
    if beta is None:
        return
    own = layer.bias
    report.moved_parameters[f"{step.beta_from}.bias"] = f"{step.name}.bias"
    if own is None:
        layer.register_parameter("bias", beta)
    else:  # two biases in a row are one
        with torch.no_grad():
            own.add_(beta.to(own))  # pyrefly: ignore


def _new(report: Report, name: str, value: float, like: Tensor, trains: bool, size: int = 1) -> Parameter:
    """A parameter that did not exist before, and a line about it in the report if it is trained."""
    parameter = Parameter(torch.full((size,), value, device=like.device, dtype=like.dtype), requires_grad=trains)
    report.new_parameters += [(name, parameter)] * trains
    return parameter


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _as_parameter(t: Any) -> Parameter | None:
    if t is None or isinstance(t, Parameter):
        return t
    return Parameter(t.detach().clone(), requires_grad=False)  # a frozen BatchNorm keeps it as a buffer


def _operate_on_norm(
    norm: nn.Module, step: NormStep, beta: Parameter | None, owner: nn.Module | None, report: Report
) -> None:
    instead: nn.Module | None = None
    prefix = f"{step.name}.instead." if step.keeps else f"{step.name}."
    if step.action == "group":
        gamma = _as_parameter(getattr(norm, "weight", None))
        eps = float(getattr(norm, "eps", 1e-5))
        assert step.groups is not None
        instead = GroupNorm(step.groups, channels(norm), gamma, beta, step.channel_dim, eps)
        if step.keeps:
            report.moved_parameters |= {f"{step.name}.{k}": f"{prefix}{k}" for k, _ in instead.named_parameters()}
    elif step.action in ("shift", "scale"):
        known = (beta, next(iter(norm.buffers()), None), torch.empty(0))
        like: Any = owner.weight if owner is not None else next(t for t in known if t is not None)
        trains = owner is None or like.requires_grad
        scale = None
        if step.action == "scale":
            assert step.scale is not None
            scale = _new(report, f"{prefix}residual_scale", step.scale, like, trains)
        if step.scalar:
            instead = FixupScalars(_new(report, f"{prefix}scalar_bias", 0.0, like, trains), scale)
        elif scale is not None:
            instead = Scale(scale, beta, step.channel_dim, step.factor)
        else:
            instead = Shift(beta, step.channel_dim)
            if beta is not None:
                report.moved_parameters[f"{step.name}.bias"] = f"{prefix}bias"
    if instead is not None:
        instead.train(norm.training)
    if step.keeps:
        children = dict(norm.named_children())
        become(norm, Remains(instead, {n: children[n] for n in step.keeps}))
    else:
        become(norm, instead if instead is not None else nn.Identity())


def become(module: nn.Module, other: nn.Module) -> None:
    """Let a module take the class and state of another; it stays the same object, with its flag and its hooks.

    Plain public attributes stay readable, too: code that asks a BatchNorm for its ``num_features`` goes on working.
    """
    plain = {k: v for k, v in module.__dict__.items() if not k.startswith("_")}
    hooks = {
        k: v for k, v in module.__dict__.items() if k.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
    }
    training = module.training
    module.__class__ = type(other)
    module.__dict__.clear()
    module.__dict__.update({**plain, **other.__dict__, **hooks})
    module.training = training


@contextlib.contextmanager
def _all_or_nothing(model: nn.Module, done: Plan) -> Iterator[None]:
    """Put classes, attributes, registries, values that may be written and the random state back if anything raises."""
    restore, named = snapshot(model), dict(model.named_modules())
    changed = [*(s.name for s in (*done.layers, *done.norms)), *done.gates]
    written = {id(p): p for name in changed for p in named[name].parameters()} | {id(b): b for b in model.buffers()}
    values = [(t, t.detach().clone()) for t in written.values()]
    random, on_cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    except BaseException:
        restore()
        for t, value in values:
            t.data.copy_(value)
        torch.set_rng_state(random)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)
        raise
