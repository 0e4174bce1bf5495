"""Starting weights: drawn with the theory's gains, or scaled to unit variance on one batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
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
from mimicnorm.methods.edits import LayerEdit
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
                if m.logit_scale is not None:
                    m.logit_scale.fill_(1.0)
        for step, m in planned:
            _reset(m, step.scale, step.start == "keep")
        for n in steps.norms:
            for m in modules[n.name].modules():
                if isinstance(m, (Shift, Scale, FixupScalars, GroupNorm)):
                    _reset(m, n.scale)
        for step, m in planned:
            if init == "theory" or (step.start == "draw" and _degenerate(m)):
                _start_as_in_theory(m, step)
        if init == "calibrate":
            _calibrate(model, steps, example)


def _start_as_in_theory(layer: nn.Module, step: LayerEdit) -> None:
    """Draw normal weights of standard deviation gain / sqrt(fan_in), or scale them so, where zeros stay zero."""
    weight: Any = layer.weight  # tied: as its last holder wants it
    if step.start == "draw":
        weight.normal_(0.0, step.gain / math.sqrt(step.fan_in))
        if isinstance(layer, WeightMean) and layer.centring == "backward":
            layer.project_()
    elif step.start == "scale" and weight.any():
        weight.mul_(step.gain / math.sqrt(float(weight.float().square().sum() / weight.shape[0])))


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


def _degenerate(layer: nn.Module) -> bool:
    """Weights that no factor can bring to unit variance: all zero, or nothing left once centred."""
    weight = layer.effective_weight() if isinstance(layer, WeightMean) else layer.weight
    return bool(weight.abs().max() <= 1e-6 * layer.weight.abs().max()) or not bool(weight.any())  # pyrefly: ignore


def _calibrate(model: nn.Module, steps: Plan, example: Any) -> None:
    if example is None:
        raise InitError('init="calibrate" needs an example: one batch of data, or its shape')
    more = with_more_samples(example)
    calibration = None
    if more is not None:
        with contextlib.suppress(ExampleError):  # a batch size written into the model, or too much for its device
            calibration = _Calibration(model, steps).run_on(more)
    (calibration or _Calibration(model, steps).run_on(example)).apply()


class _Calibration:
    """One pass that scales each layer's weight when first used, on copies of the weights; then the weights themselves.

    Attributes:
        pending: The modules that are scaled at their first use with a signal, with a name for messages.
        aims: The variance that a module's output is to have, if not 1.
        makers: The layers that took the scalar of a branch that ends in a shift, by that shift.
        done: What was scaled: a module, its attribute, the factor.
        dead: Those of them that ran, and whose output did not vary over the example.
    """

    def __init__(self, model: nn.Module, steps: Plan):
        self.model, self.steps, self.modules = model, steps, dict(model.named_modules())
        self.gates = {self.modules[name] for name in steps.gates}
        frozen = {step.name for step in steps.layers if step.start == "keep"}
        self.frozen = [self.modules[name] for name in frozen]
        # A branch ends as the theory would have it: in s^2 times the variance predicted before its scalar.
        self.aims = {self.modules[s.name]: s.scale**2 * s.v for s in steps.layers if s.scale is not None}
        layers = [s.name for s in steps.layers if s.name not in frozen or s.scale is not None]
        self.pending = {self.modules[name]: name for name in (*layers, *steps.gates)}
        self.makers: dict[nn.Module, set[nn.Module]] = {}
        for n in steps.norms:
            for m in self.modules[n.name].modules():
                if isinstance(m, Scale):
                    self.pending[m] = "a residual scalar"
                elif isinstance(m, Shift) and n.scale_into:
                    self.pending[m] = n.name
                    self.makers[m] = {self.modules[name] for name in n.scale_into}
                else:
                    continue
                self.aims |= {m: n.scale**2 * n.v} if n.scale is not None else {}
        self.scaled: set[int] = set()
        self.done: list[tuple[nn.Module, str, float]] = []
        self.dead: set[nn.Module] = set()

    def run_on(self, example: Any) -> _Calibration:
        """Run the pass in training mode, so that auxiliary heads run, but without dropout."""
        modes = (torch.no_grad(), _NoDropout())
        run(self.model, self._pass, call_arguments(self.model, example), training=True, modes=modes)
        return self

    def apply(self) -> None:
        """Scale the weights; layers without a signal start as in the theory."""
        for module, attribute, factor in self.done:
            getattr(module, attribute).mul_(factor)
        for step in self.steps.layers:
            module = self.modules[step.name]
            if module in self.dead or (module in self.pending and step.start == "draw"):
                _start_as_in_theory(module, step)
        names = [step.name for step in self.steps.layers if self.modules[step.name] in self.dead]
        if names:
            others = f" and {len(names) - 1} other layers" if len(names) > 1 else ""
            note = f"the example gives no signal to calibrate {names[0]!r}{others} with: theirs is the theory's start"
            self.steps.notes += [note] if note not in self.steps.notes else []

    def _pass(self, args: tuple, kwargs: dict) -> None:
        self.scaled = {id(m.weight) for m in self.frozen}  # what is scaled there is the scalar
        for m in self.model.modules():
            if _drops(m) or isinstance(m, LastNorm):
                m.training = False
        try:
            with instead_of_forward(list(self.pending), self._scaled_at_first_use):
                self.model(*args, **kwargs)
        except InitError:
            raise
        except Exception as error:
            raise ExampleError(
                f"the model's forward raised while calibrating on ({describe(args, kwargs)}): "
                f"{type(error).__name__}: {error}"
            ) from error

    def _scaled_at_first_use(self, module: nn.Module, forward: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            name = self.pending.pop(module, None)
            if module in self.makers:
                return output if name is None else self._scale_makers(module, output)
            factor = self._scale(module, name, output) if name is not None else None
            if factor is None:
                return output
            again = forward(*args, **kwargs)
            if module not in self.gates:
                _read_back(str(name), _variance(again) / self.aims.get(module, 1.0))
            return again

        return call

    def _scale_makers(self, shift: nn.Module, output: Any) -> Any:
        """Scale the layers that end a branch for the variance after what is between: pooling makes it smaller."""
        makers, variance = self.makers[shift], _variance(output) / self.aims[shift]
        done = [(module, attribute) for module, attribute, _ in self.done if module in makers]
        biased = any(m.bias is not None and bool(m.bias.any()) for m in makers)  # pyrefly: ignore
        if len(done) < len(makers) or biased or not 0 < variance < math.inf:
            return output
        factor = variance**-0.5
        for module, attribute in done:
            getattr(module, attribute).mul_(factor)
            self.done.append((module, attribute, factor))
        return output * factor

    def _scale(self, module: nn.Module, name: str, output: Any) -> float | None:
        """Scale a module for the variance that its output is to have; return the factor, None if it stays."""
        attribute = _scaled_attribute(module, self.scaled)
        target = getattr(module, attribute)
        if id(target) in self.scaled:  # tied to a layer that ran before: its first use decides
            return None
        self.scaled.add(id(target))
        variance = _variance(output) / self.aims.get(module, 1.0)
        if module in self.gates:
            variance /= _GATE_VARIANCE
            if not 1 < variance < math.inf:
                return None
        if not math.isfinite(variance):
            shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(output))
            raise InitError(
                f"cannot calibrate {name}: the variance of its output {shapes} is {variance}. "
                "Give an example whose values are finite (real data is best)."
            )
        if variance == 0:  # the state of a recurrent network begins at zero: its next use may have a signal
            self.pending[module] = name
            self.scaled.discard(id(target))
            self.dead.add(module)
            return None
        self.dead.discard(module)
        factor = variance**-0.5
        target.mul_(factor)
        self.done.append((module, attribute, factor))
        return factor


def _scaled_attribute(module: nn.Module, scaled: set[int]) -> str:
    """What is scaled: the weight; the residual scalar only where there is no weight that is not scaled already.

    A layer applies s * W, so a step on W moves what it applies by s^2 times the gradient there. Were the scalar to make
    up for small weights (it would be 3 to 5 with PyTorch's), each step would be that much larger than planned.
    """
    weight = getattr(module, "weight", None)
    scalar = isinstance(module, _WITH_SCALAR) and module.residual_scale is not None
    return "residual_scale" if scalar and (weight is None or id(weight) in scaled) else "weight"


def _variance(output: Any) -> float:
    """Of what a layer returns, which may be several tensors."""
    values = [t.float().flatten() for t in tensors_in(output) if t.is_floating_point()]
    return float(torch.cat(values).var(correction=0)) if values else math.nan


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
