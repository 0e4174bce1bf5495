"""Starting weights: drawn with the theory's gains, or scaled to unit variance on one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mimicnorm.errors import ExampleError, InitError
from mimicnorm.layers import (
    FixupLayer,
    FixupScalars,
    GroupNorm,
    LastNorm,
    Reweighted,
    Scale,
    Shift,
    Standardised,
    WeightMean,
)
from mimicnorm.surgery.example import call_arguments, describe, tensors_in, with_more_samples
from mimicnorm.surgery.isolate import instead_of_forward, run
from mimicnorm.surgery.plan import Plan

_WITH_SCALAR = (Reweighted, FixupLayer, Scale)  # others may have a residual_scale of the user's
_READ_BACK = 2.0  # calibrated weights must bring the variance to 1 within this factor
# Of variance t before its sigmoid, a gate turns a sample's energy q into about q^(1 + t/4): loud samples get louder,
# quiet ones quieter, block by block, and one batch says little about the next.
_GATE_VARIANCE = 0.1


def initialise(model: nn.Module, steps: Plan, init: str, example: Any) -> None:
    """Set the weights of every planned layer; heads and what else no BatchNorm touched are left alone.

    Args:
        model: The converted network.
        steps: The plan that was carried out.
        init: "theory" redraws the weights; "calibrate" scales them, in forward order, on the example.
        example: For "calibrate": one batch, or a shape (then as many samples of noise as a budget allows).
    """
    if init not in ("theory", "calibrate"):
        raise InitError(f'init={init!r}; use "theory" or "calibrate"')
    modules = dict(model.named_modules())
    planned = [(step, modules[step.name]) for step in steps.layers]
    meta = [step.name for step, m in planned if m.weight.is_meta]  # pyrefly: ignore
    if meta:
        raise InitError(
            f"{meta[0]!r} and {len(meta) - 1} other layers are on the meta device and hold no values: convert with "
            "init=None, materialise the model (to_empty, load_state_dict), then call mimicnorm.init_"
        )
    with torch.no_grad():
        for m in modules.values():
            if isinstance(m, LastNorm):
                m.reset_running_stats()
        for step, m in planned:
            _reset(m, step.scale, step.start == "keep")
        for n in steps.norms:
            for m in modules[n.name].modules():
                if isinstance(m, (Shift, Scale, FixupScalars, GroupNorm)):
                    _reset(m, n.scale)
        for step, m in planned:
            if step.start == "scale" and init == "theory":
                _scale_rows_(m.weight, step.gain)  # pyrefly: ignore
            elif step.start == "draw" and (init == "theory" or _degenerate(m)):
                draw_(m.weight, step.gain, step.fan_in)  # pyrefly: ignore  # tied: as its last holder wants it
        if init == "calibrate":
            _calibrate(model, steps, example)


def draw_(weight: Tensor, gain: float, fan_in: int) -> None:
    """Normal weights of standard deviation gain / sqrt(fan_in)."""
    weight.normal_(0.0, gain / math.sqrt(fan_in))


def _reset(module: nn.Module, scale: float | None, frozen: bool = False) -> None:
    """The bias, and what the conversion added to a module, to where it starts; a user's own attributes stay."""
    bias = getattr(module, "bias", None)
    starts = [(bias, 0.0)] if bias is None or bias.requires_grad or not frozen else []
    if isinstance(module, Standardised):
        starts.append((module.gain, 1.0))
    if isinstance(module, FixupLayer):
        starts.append((module.input_bias, 0.0))
    if isinstance(module, FixupScalars):
        starts.append((module.scalar_bias, 0.0))
    if scale is not None:
        starts.append((getattr(module, "residual_scale", None), scale))
    for t, value in starts:
        if t is not None:
            t.fill_(value)


def _scale_rows_(weight: Tensor, gain: float) -> None:
    """Scale weights to the norm that drawn ones would have, so that zeros stay zero."""
    squares = weight.float().square().sum() / weight.shape[0]
    if squares > 0:
        weight.mul_(gain / math.sqrt(float(squares)))


def _degenerate(layer: nn.Module) -> bool:
    """Weights that no factor can bring to unit variance: all zero, or nothing left once centred."""
    weight = layer.effective_weight() if isinstance(layer, WeightMean) else layer.weight
    return bool(weight.abs().max() <= 1e-6 * layer.weight.abs().max()) or not bool(weight.any())  # pyrefly: ignore


def _calibrate(model: nn.Module, steps: Plan, example: Any) -> None:
    if example is None:
        raise InitError('init="calibrate" needs an example: one batch of data, or its shape')
    more = with_more_samples(example)
    if more is not None:
        try:
            return _calibrate_on(model, steps, more)
        except ExampleError:  # a batch size written into the model, or too much for its device
            pass  # nothing is lost: every scale is set again
    return _calibrate_on(model, steps, example)


def _calibrate_on(model: nn.Module, steps: Plan, example: Any) -> None:
    modules = dict(model.named_modules())
    scalars = [m for n in steps.norms for m in modules[n.name].modules() if isinstance(m, Scale)]
    gates = {id(modules[name]) for name in steps.gates}
    frozen = [step for step in steps.layers if step.start == "keep"]
    untouchable = {step.name for step in frozen if step.scale is None}
    wanted = [name for name in (*(step.name for step in steps.layers), *steps.gates) if name not in untouchable]
    pending = {id(modules[name]): name for name in wanted} | {id(m): "a residual scalar" for m in scalars}
    watched = [modules[name] for name in pending.values() if name in modules] + scalars
    scaled: set[int] = set()
    factors: list[tuple[nn.Module, str, float]] = []
    # A branch ends as the theory would have it: in s^2 times the variance predicted before its scalar.
    targets = {id(modules[step.name]): step.scale**2 * step.v for step in steps.layers if step.scale is not None}
    for n in steps.norms:
        if n.scale is not None and n.v is not None:
            targets |= {id(m): n.scale**2 * n.v for m in modules[n.name].modules() if isinstance(m, Scale)}

    def first_use(module: nn.Module, forward: Callable) -> Callable:
        def forward_and_scale(*args: Any, **kwargs: Any) -> Tensor:
            output = forward(*args, **kwargs)
            name = pending.pop(id(module), None)
            attribute = _scaled_attribute(module, scaled)
            target = getattr(module, attribute)
            if name is None or id(target) in scaled:  # tied to a layer that ran before: its first use decides
                return output
            scaled.add(id(target))
            aim = targets.get(id(module), 1.0)
            variance = _variance(output) / aim
            if id(module) in gates:
                variance /= _GATE_VARIANCE
                if not 1 < variance < math.inf:
                    return output
            factor = _to_unit_variance(name, [tuple(t.shape) for t in tensors_in(output)], variance)
            target.mul_(factor)
            factors.append((module, attribute, factor))
            again = forward(*args, **kwargs)
            if id(module) not in gates:
                _read_back(name, _variance(again) / aim)
            return again

        return forward_and_scale

    def call(args: tuple, kwargs: dict) -> None:
        scaled.update(id(modules[step.name].weight) for step in frozen)  # what is scaled there is the scalar
        for m in model.modules():
            if _drops(m) or isinstance(m, LastNorm):
                m.training = False
        with instead_of_forward(watched, first_use):
            try:
                model(*args, **kwargs)
            except InitError:
                raise
            except Exception as error:
                raise ExampleError(
                    f"the model's forward raised while calibrating on ({describe(args, kwargs)}): "
                    f"{type(error).__name__}: {error}"
                ) from error

    # In training mode, so that auxiliary heads run. The pass scales copies of the weights: what else it changes
    # (statistics, a momentum encoder) is not to be kept.
    modes = (torch.no_grad(), _NoDropout())
    run(model, call, call_arguments(model, example), training=True, modes=modes)
    for module, attribute, factor in factors:
        getattr(module, attribute).mul_(factor)
    for step in steps.layers:
        if step.start == "draw" and id(modules[step.name]) in pending:  # it did not run: the theory is the best guess
            draw_(modules[step.name].weight, step.gain, step.fan_in)  # pyrefly: ignore


def _scaled_attribute(module: nn.Module, scaled: set[int]) -> str:
    """What is scaled: the weight; the residual scalar only where there is no weight that is not scaled already.

    A layer applies s * W, so a step on W moves what it applies by s^2 times the gradient there. Were the scalar to make
    up for small weights (it would be 3 to 5 with PyTorch's), each step would be that much larger than planned.
    """
    weight = getattr(module, "weight", None)
    scalar = _scalar(module) is not None and (weight is None or id(weight) in scaled)
    return "residual_scale" if scalar else "weight"


def _scalar(module: nn.Module) -> Tensor | None:
    """The residual scalar that the conversion gave a module; a user's own of that name is not meant."""
    return module.residual_scale if isinstance(module, _WITH_SCALAR) else None  # pyrefly: ignore


def _variance(output: Any) -> float:
    """Of what a layer returns, which may be several tensors."""
    values = [t.float().flatten() for t in tensors_in(output) if t.is_floating_point()]
    return float(torch.cat(values).var(correction=0)) if values else math.nan


def _to_unit_variance(name: str, shapes: list[tuple[int, ...]], variance: float) -> float:
    if not (math.isfinite(variance) and variance > 0):
        raise InitError(
            f"cannot calibrate {name}: the variance of its output {', '.join(map(str, shapes))} is {variance}. "
            "Give an example whose samples differ and are finite (real data is best)."
        )
    return variance**-0.5


def _read_back(name: str, variance: float) -> None:
    """Raise if scaling a layer's weight did not bring its output to unit variance."""
    if not 1 / _READ_BACK < variance < _READ_BACK:
        raise InitError(
            f"cannot calibrate {name}: with its weight scaled for a variance of 1, the variance of its output is "
            f"{variance:.3g}. Its output does not follow the scale of its weight (standardised or quantised weights?): "
            "use a plain layer there, or leave its BatchNorm with where="
        )


def _drops(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return isinstance(module, nn.modules.dropout._DropoutNd) or "drop" in kind or "stochastic" in kind


class _NoDropout(TorchFunctionMode):
    """Functional dropout does nothing inside."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)
