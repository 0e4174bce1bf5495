"""The signal doctor: variance, correlation and gradient of every layer of a real network, and a verdict on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import type_before_parametrizations

from mimicnorm.arguments import positive_int
from mimicnorm.errors import TheoryError
from mimicnorm.pictures import canvas, save
from mimicnorm.surgery import isolate

from .arguments import running

LEAST_VARIANCE, MOST_VARIANCE = 1e-4, 1e4  # of healthy weight layers
MOST_CORRELATION = 0.95  # after the last weight layer
MOST_GRADIENT_RATIO = 1e4  # largest gradient over smallest
_RESCALE = "give weights the standard deviation theory.gain(...) / sqrt(fan_in), or convert with init='calibrate'"
_CENTRE = "centre the weights (method mimicnorm), or use fewer layers"
_SHORTEN = "use residual branches with a scalar, fewer layers, or under BatchNorm a larger batch"
_CHANNELS_LAST = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.MultiheadAttention, nn.RNNBase)


@dataclass
class LayerSignal:
    """The output of one call of one leaf module.

    Attributes:
        name: qualified name; a module called several times appears several times.
        kind: class name.
        mean: over all elements.
        variance: over all elements.
        channel_mean_share: fraction of the second moment that is the channels' means over batch and positions: close
            to 1 all inputs look alike, 0 after BatchNorm. Channels are last after a linear layer, before the positions
            after a convolution.
        correlation: mean over all pairs of samples of the cosine of their flattened outputs, the NNGP's rho; NaN for
            one sample.
        gradient: Frobenius norm of the gradient with respect to this output; NaN when none reached it.
    """

    name: str
    kind: str
    mean: float
    variance: float
    channel_mean_share: float
    correlation: float
    gradient: float = math.nan


@dataclass(frozen=True)
class Signal:
    """The layers in order of execution; prints as a table with a verdict below."""

    layers: tuple[LayerSignal, ...]

    def weight_layers(self) -> Signal:
        """Return only convolutions and linear layers, recognised by their class names."""
        return Signal(tuple(x for x in self.layers if "conv" in x.kind.lower() or "linear" in x.kind.lower()))

    def verdict(self) -> str:
        """Say whether the weight layers are healthy: each quantity, its good range, and what to do outside of it.

        The size of a variance does not matter, its change by orders of magnitude does: 10 is fine. Layers that start
        at zero are left out.

        Example:
            >>> Signal((LayerSignal("fc", "Linear", 0.0, 10.0, 0.1, 0.5, 1.0),)).verdict().split(":")[0]
            'healthy'
        """
        layers = self.weight_layers().layers or self.layers
        variances = [x.variance for x in layers if x.variance != 0] or [math.nan]
        gradients = [x.gradient for x in layers if x.gradient > 0]
        low, high, last = min(variances), max(variances), layers[-1].correlation
        ratio = max(gradients) / min(gradients) if gradients else math.nan
        facts = [
            f"variance {low:.2g} to {high:.2g} (good: {LEAST_VARIANCE:g} to {MOST_VARIANCE:g})",
            f"correlation after the last layer {last:.2g} (good: below {MOST_CORRELATION:g})",
            f"gradients within a factor {ratio:.2g} (good: below {MOST_GRADIENT_RATIO:g})",
        ]
        problems = {
            f"The variance dies out: {_RESCALE}.": low < LEAST_VARIANCE,
            f"The variance explodes: {_RESCALE}.": not all(v <= MOST_VARIANCE for v in variances),
            f"All inputs look alike: {_CENTRE}.": last > MOST_CORRELATION,
            f"Gradients vanish or explode: {_SHORTEN}.": ratio > MOST_GRADIENT_RATIO,
        }
        advice = [sentence for sentence, present in problems.items() if present]
        return " ".join([f"{'unhealthy' if advice else 'healthy'}: {', '.join(facts)}.", *advice])

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return plain rows for JSON."""
        return [asdict(layer) for layer in self.layers]

    def __str__(self) -> str:
        """Return the table."""
        wide = max([len("layer"), *(len(x.name) for x in self.layers)])
        head = f"{'mean':>11}{'variance':>11}{'shared':>8}{'corr':>8}{'gradient':>11}"
        lines = [f"{'layer':<{wide}}  {'kind':<16}{head}"]
        for x in self.layers:
            numbers = f"{x.mean:>11.3g}{x.variance:>11.3g}{x.channel_mean_share:>8.2f}{x.correlation:>8.3f}"
            lines.append(f"{x.name:<{wide}}  {x.kind[:15]:<16}{numbers}{x.gradient:>11.3g}")
        return "\n".join([*lines, f"verdict: {self.verdict()}"])


def propagate(model: nn.Module, x: Any, *, loss: Callable[[Any], Tensor] | None = None, seed: int = 0) -> Signal:
    """Run a batch forward and a gradient back through any network and measure the output of each leaf module.

    The network stays as it is: mode, weights, buffers, other attributes, `.grad`, random states. It runs in the mode
    it is in; use train mode to see the signal of training.

    Args:
        model: any module.
        x: an input batch, or a tuple of call arguments, or a dict of keyword arguments.
        loss: maps the model's output to a scalar; by default the output (its first tensor) is multiplied by a random
            direction of unit length, so that gradients of two networks can be compared.
        seed: of the direction and of the random numbers that the model draws.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> signal = propagate(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8))
        >>> [layer.kind for layer in signal.layers]
        ['Linear', 'ReLU']
    """
    if not isinstance(model, nn.Module):
        raise TheoryError(f"model must be an nn.Module, not {type(model).__name__}.")
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise TheoryError("the model has lazy layers without weights: run it once on a batch first.")
    args, kwargs = (x if isinstance(x, tuple) else ()), (x if isinstance(x, dict) else {})
    args = (x,) if not args and not kwargs else args
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if any(a.numel() == 0 for a in tensors):
        raise TheoryError("the batch is empty: there is nothing to measure.")
    if not all(bool(torch.isfinite(a).all()) for a in tensors):
        raise TheoryError("the batch has non-finite entries; look for NaN or infinity in the inputs.")
    rng = torch.Generator().manual_seed(positive_int(seed, "seed", least=0, error=TheoryError))
    if loss is not None and not callable(loss):
        raise TheoryError(f"loss must be a function of the model's output that returns a scalar tensor, not {loss!r}.")
    layers: list[LayerSignal] = []
    names = {module: name for name, module in model.named_modules()}
    channels: dict[torch.Size, int] = {}  # their dimension, by the shape of an output

    def measure(module: nn.Module, _inputs: Any, output: Any) -> None:
        h = _first_tensor(output)
        if h is None or h.dim() == 0:
            return
        kind = type_before_parametrizations(module).__name__
        layer = _measure(names[module], kind, h, _channel_dimension(module, h, channels))
        layers.append(layer)
        if h.requires_grad:
            # a hook, because an in-place activation after this layer overwrites h
            h.register_hook(lambda g: setattr(layer, "gradient", float(g.detach().double().norm())))

    def forward_and_back(args: tuple, kwargs: dict[str, Any]) -> None:
        leaves = [a.requires_grad_(a.is_floating_point()) for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        handles = [m.register_forward_hook(measure) for m in dict.fromkeys(_leaves(model))]
        try:
            with running("the model", *args, *kwargs.values()):
                output = model(*map(_not_a_leaf, args), **{key: _not_a_leaf(a) for key, a in kwargs.items()})
        finally:  # before the gradient: activation checkpoints run their layers a second time then
            for handle in handles:
                handle.remove()
        if loss is None:
            scalar = _random_projection(output, rng)
        else:
            with running("the loss", output):
                scalar = loss(output)
        if not isinstance(scalar, Tensor) or scalar.numel() != 1:
            raise TheoryError("loss must be a function of the model's output that returns a scalar tensor.")
        wanted = [a for a in leaves if a.requires_grad] or [p for p in model.parameters() if p.requires_grad]
        if wanted and scalar.requires_grad:
            with running("the backward pass", scalar):  # not through reentrant checkpoints: torch says what to do
                torch.autograd.grad(scalar, wanted, allow_unused=True)

    isolate.run(model, forward_and_back, (args, kwargs), seed=seed)
    if not layers:
        raise TheoryError("no leaf module returned a tensor: is the network written in plain functions?")
    return Signal(tuple(layers))


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules to measure: those without children, and attention, which never calls its projection."""
    inner = [child for name, child in module.named_children() if name != "parametrizations"]
    if not inner or isinstance(module, nn.MultiheadAttention):
        yield module
        return
    for child in inner:
        yield from _leaves(child)


def _not_a_leaf(a: Any) -> Any:
    # autograd forbids in-place operations on a leaf that requires grad, such as an in-place activation on the input
    return a * 1 if isinstance(a, Tensor) and a.requires_grad else a


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((t for t in map(_first_tensor, values) if t is not None), None)


def _random_projection(output: Any, rng: torch.Generator) -> Tensor:
    y = _first_tensor(output)
    if y is None:
        raise TheoryError(f"the model returns {type(output).__name__} without a tensor: pass loss=.")
    direction = torch.randn(y.shape, generator=rng, dtype=torch.float64)
    return (y * (direction / direction.norm()).to(y)).sum()


def _channel_dimension(module: nn.Module, h: Tensor, known: dict[torch.Size, int]) -> int:
    """Return the dimension of the channels in an output: the last after a linear layer, else that before the positions.

    Activations, dropout and layer norms keep the dimension of the latest layer of the same shape.
    """
    if isinstance(module, _CHANNELS_LAST):
        known[h.shape] = h.dim() - 1
    elif isinstance(module, _ConvNd):
        known[h.shape] = h.dim() - 1 - len(module.kernel_size)
    elif isinstance(module, (_NormBase, nn.GroupNorm)):
        known[h.shape] = min(1, h.dim() - 1)
    return known.get(h.shape, min(1, h.dim() - 1))


def _measure(name: str, kind: str, h: Tensor, channels: int) -> LayerSignal:
    with torch.no_grad():
        h = h.detach().to(torch.float64 if h.device.type == "cpu" else torch.float32)
        flat = h.flatten(1) if h.dim() > 1 else h[:, None]
        second = float((h**2).mean())
        by_channel = h.movedim(channels, 0).flatten(1) if h.dim() > 1 else h[None]
        shared = float((by_channel.mean(1) ** 2).mean()) / second if second > 0 else math.nan
        unit, count = torch.nn.functional.normalize(flat, dim=1), len(flat)
        # all pairs at once: the square of the sum is that of each sample, and each pair twice
        twice = float(unit.sum(0).square().sum() - unit.square().sum())
        correlation = twice / (count * (count - 1)) if count > 1 else math.nan
        return LayerSignal(name, kind, float(h.mean()), float(h.var(correction=0)), shared, correlation)


def plot(signals: dict[str, Signal], path: str | Path) -> None:
    """Draw variance, correlation and gradient norm over depth for several networks, one colour each."""
    figure, axes = canvas(1, 3, width=10, height=3.1)
    quantities = (("variance", "of the output"), ("correlation", "of sample pairs"), ("gradient", "norm"))
    for axis, (field, of) in zip(axes, quantities, strict=True):
        for label, signal in signals.items():
            rows = signal.weight_layers().layers or signal.layers
            values = [getattr(row, field) for row in rows]
            if field != "correlation":  # a branch that starts at zero has no logarithm
                values = [v if v > 0 else math.nan for v in values]
            axis.plot(range(1, len(rows) + 1), values, marker=".", lw=1, label=label)
        axis.set(title=f"{field} {of}", xlabel="weight layer", yscale="linear" if field == "correlation" else "log")
    axes[1].set_ylim(-0.3, 1.05)
    axes[0].legend(frameon=False)
    save(figure, path)
