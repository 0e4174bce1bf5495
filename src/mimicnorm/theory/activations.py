"""Activations under a Gaussian input: their moments and the gains that keep a layer's variance.

For z ~ N(0, 1) and an activation phi, a weight-mean layer of fan-in n keeps unit variance when its weights have
standard deviation gain / sqrt(n) with gain = sqrt(n / (n - 1)) / sd(phi(z)) (Theorem 3; for ReLU, gain^2 = 2n / ((n -
1)(1 - 1/pi))). A layer that is not centred needs 1 / rms(phi(z)).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.arguments import finite, positive_int
from mimicnorm.errors import TheoryError

from .arguments import reals, running
from .quadrature import CPU, normal_nodes, pair_integrals, single_integrals

Function = Callable[[Tensor], Tensor]
SELU_SCALE, SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _softplus(x: Tensor, beta: float = 1.0) -> Tensor:
    # torch's softplus switches to the identity at 20: a step of 2e-9 inside a quadrature panel
    return torch.logaddexp(beta * x, torch.zeros_like(x)) / beta


def _elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


def _gelu_tanh(x: Tensor) -> Tensor:
    return nn.functional.gelu(x, approximate="tanh")


# name -> (function of (x, *parameters), default parameters, kinks; None: the parameters are the kinks)
_REGISTRY: dict[str, tuple[Callable[..., Tensor], dict[str, float], tuple[float, ...] | None]] = {
    "identity": (lambda x: x * 1.0, {}, ()),
    "relu": (torch.relu, {}, (0.0,)),
    "relu6": (lambda x: x.clamp(0.0, 6.0), {}, (0.0, 6.0)),
    "squared_relu": (lambda x: torch.relu(x) ** 2, {}, (0.0,)),
    "leaky_relu": (lambda x, a: torch.where(x > 0, x, a * x), {"negative_slope": 0.01}, (0.0,)),
    "prelu": (lambda x, a: torch.where(x > 0, x, a * x), {"negative_slope": 0.25}, (0.0,)),
    "gelu": (lambda x: nn.functional.gelu(x), {}, ()),
    "gelu_tanh": (_gelu_tanh, {}, ()),
    "silu": (lambda x: x * torch.sigmoid(x), {}, ()),
    "mish": (lambda x: x * torch.tanh(_softplus(x)), {}, ()),
    "hardswish": (lambda x: x * (x + 3).clamp(0, 6) / 6, {}, (-3.0, 3.0)),
    "hardsigmoid": (lambda x: (x + 3).clamp(0, 6) / 6, {}, (-3.0, 3.0)),
    "elu": (_elu, {"alpha": 1.0}, (0.0,)),
    "selu": (lambda x: SELU_SCALE * _elu(x, SELU_ALPHA), {}, (0.0,)),
    "celu": (lambda x, a: a * _elu(x / a), {"alpha": 1.0}, (0.0,)),
    "tanh": (torch.tanh, {}, ()),
    "sigmoid": (torch.sigmoid, {}, ()),
    "logsigmoid": (lambda x: -_softplus(-x), {}, ()),
    "softplus": (_softplus, {"beta": 1.0}, ()),
    "softsign": (lambda x: x / (1 + x.abs()), {}, (0.0,)),
    "erf": (torch.erf, {}, ()),
    "hardtanh": (lambda x, lo, hi: x.clamp(lo, hi), {"min_val": -1.0, "max_val": 1.0}, None),
}


# torch's functions of one argument, recognised by identity: a callable may have any name
_FUNCTIONS = [
    (getattr(home, name), name)
    for home in (torch, nn.functional)
    for name in _REGISTRY
    if hasattr(home, name) and name != "prelu"
]


def names() -> tuple[str, ...]:
    """Return the names that `activation` arguments accept."""
    return tuple(sorted(_REGISTRY))


@dataclass(frozen=True)
class Activation:
    """An element-wise function, with the kinks at which a quadrature must split its integrals.

    Two are equal if they hold the same function object with the same kinks; the function need not be hashable.

    Attributes:
        name: a registered name, or the callable's `__name__`.
        function: maps a float64 tensor to a tensor of the same shape.
        kinks: arguments where the function or one of its first two derivatives jumps.
        parameters: (name, value) pairs, in the order of the registered function.
        built_in: whether it is the registered function of that name, so that its formulas hold.
    """

    name: str
    function: Function = field(compare=False)
    kinks: tuple[float, ...]
    parameters: tuple[tuple[str, float], ...] = ()
    built_in: bool = False
    identity: int = field(init=False, repr=False)  # of the function: what is compared and hashed in its place

    def __post_init__(self) -> None:
        """Note the function's identity."""
        object.__setattr__(self, "identity", id(self.function))

    def __call__(self, x: Tensor) -> Tensor:
        """Return phi(x)."""
        with running(f"activation {self.name!r}", x):
            y = self.function(x)
        if not isinstance(y, Tensor) or y.shape != x.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise TheoryError(
                f"activation {self.name!r} is not element-wise: shape {tuple(x.shape)} became {got}. "
                "Pass a function that maps each number by itself."
            )
        return y

    def with_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return phi(x) and phi'(x) without a graph; at a kink, torch's one-sided choice."""
        # under a caller's no_grad or inference_mode, too
        with torch.inference_mode(False), torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            y = self(x)
            slope = torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else torch.zeros_like(x)  # constant
        return y.detach(), slope.detach()


def resolve(activation: Any, kinks: Iterable[float] | None = None, **parameters: float) -> Activation:
    """Return the `Activation` for a name, a torch activation module, or any element-wise callable.

    Args:
        activation: a name of `names()`, an `nn.Module` such as ``nn.LeakyReLU(0.2)``, or a callable on float64
            tensors.
        kinks: for a callable, where it or one of its first two derivatives jumps. Without them it is taken as smooth
            except at 0; expectations that a forgotten kink would make wrong are refused.
        parameters: parameters of a named activation, such as ``negative_slope=0.2``.

    Example:
        >>> resolve("leaky_relu", negative_slope=0.2).kinks
        (0.0,)
        >>> resolve(lambda x: (x - 0.3).clamp(min=0), kinks=[0.3]).kinks
        (0.3,)
    """
    if isinstance(activation, Activation):
        return activation
    if isinstance(activation, str):
        return _named(activation, parameters)
    if parameters:
        raise TheoryError(f"parameters {sorted(parameters)} belong to a named activation; bind them into the callable.")
    if isinstance(activation, type) or not callable(activation):
        raise TheoryError(
            f"activation must be a name, an activation module or a callable on tensors, not {activation!r}."
        )
    if kinks is None and (known := _registered(activation)) is not None:
        return known
    name = getattr(activation, "__name__", type(activation).__name__)
    points = list(kinks) if isinstance(kinks, Iterable) else [] if kinks is None else kinks
    resolved = Activation(name, activation, () if points == [] else tuple(reals("kinks", points, 1).tolist()))
    grid = torch.linspace(-3.0, 3.0, 8, dtype=torch.float64, device=CPU)
    if not torch.allclose(resolved(grid).detach()[:3], resolved(grid[:3]).detach(), equal_nan=True):
        raise TheoryError(f"activation {name!r} is not element-wise: the value at a number depends on other numbers.")
    return resolved


def _registered(activation: Any) -> Activation | None:
    """Return the registered activation that a torch function or module is, else None."""
    name = next((name for function, name in _FUNCTIONS if function is activation), None)
    if name is not None:
        return _named(name, {})
    return _of_module(activation) if isinstance(activation, nn.Module) else None


def _named(name: str, given: dict[str, float]) -> Activation:
    key = name.lower()
    if key not in _REGISTRY:
        similar = difflib.get_close_matches(key, _REGISTRY, n=3)
        hint = f"did you mean {' or '.join(map(repr, similar))}?" if similar else f"known: {', '.join(names())}."
        raise TheoryError(f"unknown activation {name!r}: {hint} Any callable on tensors is accepted, too.")
    function, defaults, kinks = _REGISTRY[key]
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        takes = ", ".join(defaults) or "no parameters"
        raise TheoryError(f"activation {name!r} has no parameter {unknown[0]!r}; it takes {takes}.")
    parameters = {k: finite(given.get(k, v), f"{name}({k})", error=TheoryError) for k, v in defaults.items()}
    for k, v in parameters.items():
        if v == 0 and (k == "beta" or key == "celu"):
            raise TheoryError(f"parameter {k!r} of {name!r} divides: it must not be 0.")
    values = tuple(parameters.values())
    bound = _bind(function, values) if values else function
    return Activation(key, bound, values if kinks is None else kinks, tuple(parameters.items()), True)


@lru_cache(maxsize=256)
def _bind(function: Callable[..., Tensor], values: tuple[float, ...]) -> Function:
    # cached, so that equal activations are equal objects and the caches below recognise them
    return lambda x: function(x, *values)


def _of_module(module: nn.Module) -> Activation | None:
    if not type(module).__module__.startswith("torch.nn"):
        return None  # a subclass may do something else: treat it as a callable
    if isinstance(module, nn.GELU):
        return _named("gelu" if module.approximate == "none" else "gelu_tanh", {})
    if isinstance(module, nn.PReLU):
        slopes = module.weight.detach().unique().tolist()
        if len(slopes) > 1:
            raise TheoryError(
                f"a PReLU with {len(slopes)} different slopes is not one function of a number: activation_stats and "
                "gain average over its channels, but here pass one slope, as nn.PReLU(init=a)."
            )
        return _named("prelu", {"negative_slope": slopes[0]})
    name = type(module).__name__.lower().replace("leakyrelu", "leaky_relu")
    if name not in _REGISTRY:
        return None
    return _named(name, {parameter: getattr(module, parameter) for parameter in _REGISTRY[name][1]})


@lru_cache(maxsize=256)
def require_resolved(activation: Activation, q: float = 1.0) -> None:
    """Refuse a callable for which the integrals of a pair at correlation 1 are not the moments of one input."""
    if activation.built_in:
        return
    variance = torch.tensor([q], dtype=torch.float64, device=CPU)
    of_pair, of_one = pair_integrals(activation, variance, variance, 0.0), single_integrals(activation, variance)
    both = [(float(of_pair[0]), float(of_one.variance)), (float(of_pair[1]), float(of_one.slope))]
    size = max(abs(moment) for _, moment in both)
    if not all(math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9 * size) for a, b in both):
        worst = max(both, key=lambda moments: abs(moments[0] - moments[1]))
        raise TheoryError(
            f"the moments of activation {activation.name!r} at variances up to {q:g} do not settle: two quadratures "
            f"give {worst[0]:.10g} and {worst[1]:.10g}. If it has kinks off 0, pass resolve(function, kinks=[...]); "
            "else its moments do not exist, it oscillates too fast (use a smaller variance), or it computes in float32."
        )


@dataclass(frozen=True)
class ActivationStats:
    """Moments of phi(z), z ~ N(0, 1), and the slopes of the maps built from them.

    Slopes are taken at the weight-mean gain g = 1 / sd.

    Attributes:
        mean: E[phi(z)].
        second_moment: E[phi(z)^2].
        variance: second_moment - mean^2.
        sd: square root of the variance.
        rms: square root of the second moment.
        chi1: g^2 E[phi'(z)^2], the slope of the correlation map at 1 (paper: 1 / (1 - 1/pi) for ReLU).
        tbar_slope_at_zero: g^2 E[phi'(z)]^2, its slope at 0: the factor per layer of a small correlation.
        variance_slope: dV/dq at q = 1 of V(q) = g^2 Var(phi(sqrt(q) z)); above 1 the variance drifts.
    """

    mean: float
    second_moment: float
    variance: float
    sd: float
    rms: float
    chi1: float
    tbar_slope_at_zero: float
    variance_slope: float


def activation_stats(activation: Any, kinks: Iterable[float] | None = None, **parameters: float) -> ActivationStats:
    """Compute the moments of an activation under N(0, 1) by quadrature split at its kinks.

    Of an ``nn.PReLU`` with a slope per channel, moments are those of a channel drawn at random.

    Args: as for `resolve`.

    Example:
        >>> round(activation_stats("relu").chi1, 6)
        1.466942
    """
    if isinstance(activation, nn.PReLU) and type(activation).__module__.startswith("torch.nn") and not parameters:
        return prelu_stats(activation.weight)
    return _stats(resolve(activation, kinks, **parameters))


def prelu_stats(slopes: Any) -> ActivationStats:
    """Compute the moments of a PReLU with one slope per channel, averaged over its channels, in closed form.

    Example:
        >>> prelu_stats([-1.0, 1.0]).rms, round(prelu_stats([0.0]).rms, 4)  # the mean slope, 0, would be wrong
        (1.0, 0.7071)
    """
    a = reals("the slopes of a PReLU", slopes)
    mean, second = float((1 - a).mean()) / math.sqrt(2 * math.pi), float((1 + a**2).mean()) / 2  # also of the slope
    variance, linear = second - mean**2, float((1 + a).square().mean()) / 4  # linear: E[phi']^2
    sd, rms = math.sqrt(variance), math.sqrt(second)
    return ActivationStats(mean, second, variance, sd, rms, second / variance, linear / variance, variance_slope=1.0)


@lru_cache(maxsize=256)
def _stats(activation: Activation) -> ActivationStats:
    z, w = normal_nodes(activation.kinks)
    phi, slope = activation.with_slope(z)
    far = (w * phi**2)[z.abs() > 11]
    if not bool(torch.isfinite(phi).all() & torch.isfinite(slope).all() & (far.sum() < 1e-6)):
        raise TheoryError(
            f"activation {activation.name!r} or its derivative is not finite on [-12, 12], or grows too fast for a "
            "Gaussian mean; the theory needs a function that is finite everywhere."
        )

    def mean_of(values: Tensor) -> float:
        return float((w * values).sum())

    mean, second = mean_of(phi), mean_of(phi**2)
    variance = mean_of((phi - mean) ** 2)  # not second - mean^2, which cancels for nearly constant functions
    if variance <= 1e-24 * max(second, 1e-300):
        raise TheoryError(
            f"activation {activation.name!r} is constant under N(0, 1): no gain can restore its variance."
        )
    require_resolved(activation)
    return ActivationStats(
        mean=mean,
        second_moment=second,
        variance=variance,
        sd=math.sqrt(variance),
        rms=math.sqrt(second),
        chi1=mean_of(slope**2) / variance,
        tbar_slope_at_zero=mean_of((phi - mean) * z) ** 2 / variance,  # E[phi'] = E[z phi], also for steps
        variance_slope=mean_of((phi - mean) * slope * z) / variance,
    )


def gain(
    activation: Any,
    mode: str = "weight_mean",
    fan_in: int | None = None,
    *,
    kinks: Iterable[float] | None = None,
    **parameters: float,
) -> float:
    """Return the gain g for which weights of standard deviation g / sqrt(fan_in) keep unit variance.

    Args:
        activation: what the layer's input went through (see `resolve`); ``"identity"`` for raw input.
        mode: ``"weight_mean"``: 1 / sd(phi(z)), for a layer whose weights are centred (Theorem 3); ``"plain"`` or
            ``"straight"``: 1 / rms(phi(z)), for one whose weights are not.
        fan_in: with it, the weight-mean gain carries the exact factor sqrt(n / (n - 1)) of Lemma 1.
        kinks: see `resolve`.
        parameters: see `resolve`.

    Example:
        >>> round(gain("relu"), 5), round(gain("relu", "plain") ** 2, 5)
        (1.71286, 2.0)
    """
    if mode not in ("weight_mean", "plain", "straight"):
        raise TheoryError(f"unknown mode {mode!r}: use 'weight_mean' (centred weights) or 'plain' (others).")
    fan_in = None if fan_in is None else positive_int(fan_in, "fan_in", error=TheoryError)
    stats = activation_stats(activation, kinks, **parameters)
    if mode != "weight_mean":
        return 1 / stats.rms
    if fan_in is None:
        return 1 / stats.sd
    if fan_in == 1:
        raise TheoryError("weight mean with fan_in 1 centres the only weight to zero; use mode='plain'.")
    return math.sqrt(fan_in / (fan_in - 1)) / stats.sd
