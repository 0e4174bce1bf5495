"""Carry out a plan: the surgery, whole or not at all; and what can be asked of a converted network afterwards."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mimicnorm.errors import CheckError, InitError, MimicNormError
from mimicnorm.layers import (
    OFF_CENTRE,
    FixupLayer,
    LastNorm,
    LastNormed,
    OriginalKeys,
    ScaledWeight,
    Standardised,
    TrainedLayer,
    WeightMean,
)
from mimicnorm.methods import Method
from mimicnorm.surgery.example import float_shape
from mimicnorm.surgery.init import initialise
from mimicnorm.surgery.isolate import snapshot
from mimicnorm.surgery.operate import operate
from mimicnorm.surgery.plan import OWN_INIT, Plan, Report
from mimicnorm.surgery.planning import plan
from mimicnorm.surgery.preconditions import Where
from mimicnorm.surgery.recorder import is_batch_norm

_CHANGED = {"centre": WeightMean, "standardise": Standardised, "bias": FixupLayer, "trained": TrainedLayer}


def convert_(
    model: nn.Module,
    method: Method,
    *,
    example: Any,
    init: str | None = "auto",
    head: str | Sequence[str] | None = None,
    where: Where | None = None,
    allow_mixing: Collection[str] = (),
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
    planned = plan(model, method, example=example, init=init, head=head, where=where, allow_mixing=allow_mixing)
    planned.require()
    return _carry_out(model, planned, example)


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
    _carry_out(twin, planned, example)
    return twin


def _carry_out(model: nn.Module, planned: Plan, example: Any) -> Report:
    report = Report(**planned.__dict__)
    if not report.method.removes_norm:
        return report
    with _all_or_nothing(model, report):
        for bias, beta in operate(model, report):
            with torch.no_grad():
                bias.add_(beta.to(bias))
        for layer in model.modules():
            if isinstance(layer, WeightMean) and layer.centring == "backward":
                layer.project_()
        planned.example_shape = float_shape(example)
        model._mimicnorm = planned  # pyrefly: ignore  # for check and init_; not in the state dict
        keys_of = _all_keys(model)
        moved = {keys_of(old): keys_of(new) for old, new in report.moved_parameters.items()}
        report.moved_parameters = {old: _nearest(old, new) for olds, new in moved.items() for old in olds}
        if report.init == "keep":
            norms = [n.name for n in report.norms if n.action != "leave"]
            dropped = [key for name in norms for key in keys_of(f"{name}.num_batches_tracked".lstrip("."))]
            model.register_load_state_dict_pre_hook(OriginalKeys(moved, dropped))
        elif report.init is not None:
            initialise(model, report, report.init, example)
    return report


def _all_keys(model: nn.Module) -> Callable[[str], tuple[str, ...]]:
    """Return the function that gives all keys of a module's tensor: a module may be registered under several names."""
    names: dict[nn.Module, list[str]] = {}
    for name, m in model.named_modules(remove_duplicate=False):
        names.setdefault(m, []).append(name)

    def keys_of(key: str) -> tuple[str, ...]:
        module, _, attribute = key.rpartition(".")
        return tuple(f"{name}.{attribute}".lstrip(".") for name in names[model.get_submodule(module)])

    return keys_of


def _nearest(old: str, new: Sequence[str]) -> str:
    """Of a tensor's new keys, the one that has most in common with an old one: body.1.weight goes to body.0.gamma."""
    return max(new, key=lambda key: sum(map(operator.eq, old.split("."), key.split("."))))


def init_(model: nn.Module, init: str = "theory", *, example: Any = None) -> None:
    """Set the initial weights of a converted network, apart from the surgery.

    For models that were converted with ``init=None``, on the meta device, or are reset for another run.

    Args:
        model: A converted network, or one that contains it.
        init: "theory", or "calibrate" (needs ``example``).
        example: As for ``convert_``; real data is best.
    """
    for prefix, root in _conversions(model):
        done: Plan = root._mimicnorm  # pyrefly: ignore
        with _all_or_nothing(root, done):
            if done.init == "keep":
                raise InitError(
                    'the network was converted with init="keep": its statistics belong to its trained weights. Convert '
                    "a fresh one to train anew"
                )
            if done.method.own_init and init == "calibrate":
                raise InitError(f'{type(done.method).__name__} {OWN_INIT}: use init="theory"')
            if prefix and init == "calibrate":
                raise CheckError(f"calibrate runs the converted network itself: call init_ on {prefix.rstrip('.')!r}")
            initialise(root, done, init, example)


def check(model: nn.Module) -> None:
    """Raise ``CheckError`` if a converted network is no longer whole.

    A head that was replaced (``model.fc = ...``, ``reset_classifier``) loses its LastNorm; a layer that was
    replaced loses its centring; a BatchNorm may have come back. With ``centre="backward"``, weights may have left their
    means.
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
            wanted = _CHANGED.get(step.action, ScaledWeight if step.scale is not None else nn.Module)
            layer = modules.get(step.name)
            if not isinstance(layer, wanted):
                problems.append(f"{prefix}{step.name}: the layer was replaced and is no longer {wanted.__name__}")
            elif isinstance(layer, WeightMean) and layer.centring == "backward" and layer.off_centre() > OFF_CENTRE:
                problems.append(
                    f"{prefix}{step.name}: its weights have left their means (cosine with a constant row "
                    f"{layer.off_centre():.2g}); call mimicnorm.project_(model) after each optimizer step, or convert "
                    'with centre="forward"'
                )
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


@contextlib.contextmanager
def _all_or_nothing(model: nn.Module, done: Plan) -> Iterator[None]:
    """Put classes, attributes, registries, values that may be written and the random state back if anything raises."""
    restore, named = snapshot(model), dict(model.named_modules())
    changed = [*(s.name for s in (*done.layers, *done.norms)), *done.gates]
    written = [p for name in changed for p in named[name].parameters()] + list(model.buffers())
    written += [m.logit_scale for m in named.values() if isinstance(m, LastNorm) and m.logit_scale is not None]
    values = [(t, t.detach().clone()) for t in {id(t): t for t in written}.values()]
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
