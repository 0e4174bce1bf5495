"""Each statement of the theory measured on random draws: estimate, standard error, prediction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mimicnorm.arguments import positive_int
from mimicnorm.errors import TheoryError

from .activations import resolve
from .dual import check_correlation, dual
from .empirical import empirical_ntk
from .kernels import Scales, kernels, residual_kernels
from .networks import FiniteNetwork
from .spectrum import condition_number
from .transition import Transition


@dataclass(frozen=True)
class Estimate:
    """A measured mean with its standard error over `count` independent draws, and the theory's prediction."""

    statement: str
    value: float
    standard_error: float
    predicted: float
    count: int
    seed: int

    @property
    def sigmas(self) -> float:
        """Distance from the prediction in standard errors."""
        return abs(self.value - self.predicted) / max(self.standard_error, 1e-300)

    def __str__(self) -> str:
        """Return one line for a table."""
        return (
            f"{self.statement}: {self.value:.5g} +- {self.standard_error:.2g} (n = {self.count}), "
            f"predicted {self.predicted:.5g}, {self.sigmas:.1f} sigma"
        )


def _estimate(statement: str, draw: Callable[[int], float], predicted: float, count: int, seed: int) -> Estimate:
    count = positive_int(count, "count", least=2, error=TheoryError)
    seed = positive_int(seed, "seed", least=0, error=TheoryError)
    values = torch.tensor([draw(seed + i) for i in range(count)], dtype=torch.float64)
    return Estimate(statement, float(values.mean()), float(values.std()) / math.sqrt(count), predicted, count, seed)


def _normal(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes]


def correlated_pair(shape: tuple[int, ...], rho: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw u, v of independent standard normal pairs with correlation rho (the paper's Omega_n(rho))."""
    u, z = _normal(seed, shape, shape)
    return u, rho * u + math.sqrt(1 - float(check_correlation(rho)) ** 2) * z


def _pair_inputs(rho: float) -> Tensor:
    """Return two inputs whose first-layer kernel is exactly ((1, rho), (rho, 1))."""
    rho = float(check_correlation(rho))
    return torch.tensor([[1.0, 0.0], [rho, math.sqrt(1 - rho**2)]], dtype=torch.float64) * math.sqrt(2)


def dual_activation(activation: Any = "relu", rho: float = 0.5, *, count: int = 100, seed: int = 0) -> Estimate:
    """Measure E[phi(u) phi(v)] (paper eq. 4), each draw a mean over 10,000 pairs."""
    phi = resolve(activation)

    def draw(s: int) -> float:
        u, v = correlated_pair((10_000,), rho, s)
        return float((phi(u) * phi(v)).mean())

    return _estimate(f"dual {phi.name} at {rho:g}", draw, float(dual(phi, rho)), count, seed)


def lemma1(n: int = 64, rho: float = 0.5, *, count: int = 400, seed: int = 0) -> Estimate:
    """Measure E_W[phi(u)^T Wbar^T Wbar phi(v)] / (n_o (n - 1)); Lemma 1 says phihat(rho) - phihat(0).

    The factor is (n_i - 1)/n_i, n_i the fan-in; the appendix prints n_o.
    """
    phi, n_out = resolve("relu"), 32
    n = positive_int(n, "n", least=2, error=TheoryError)

    def draw(s: int) -> float:
        (w,) = _normal(s, (n_out, n))
        w = w - w.mean(1, keepdim=True)
        u, v = correlated_pair((64, n), rho, s + 10**6)
        return float(((phi(u) @ w.T) * (phi(v) @ w.T)).sum(1).mean()) / (n_out * (n - 1))

    predicted = float(dual(phi, rho) - dual(phi, 0.0))
    return _estimate(f"Lemma 1 at n = {n}, rho = {rho:g}", draw, predicted, count, seed)


def theorem1(
    kind: str = "weight_mean", points: int = 8, depth: int = 10, width: int = 256, *, count: int = 8, seed: int = 0
) -> Estimate:
    """Measure the condition number of the NTK of random networks on m orthogonal inputs of unit variance.

    By symmetry the expected NTK has one value d on the diagonal and one, o, off it, so that its condition number is (d
    + (m - 1) o) / (d - o); the error is a jackknife's over networks. It tends to 1 in the chaotic phase and to (m +
    3)/3 on the critical line (ReLU) as depth grows.
    """
    points = positive_int(points, "points", least=2, error=TheoryError)
    count = positive_int(count, "count", least=2, error=TheoryError)
    transition = Transition(kind)
    x = torch.eye(points, dtype=torch.float64) * math.sqrt(points)
    nets = [FiniteNetwork(points, width, depth, transition, seed=seed + i, outputs=4) for i in range(count)]
    ntks = torch.stack([empirical_ntk(net, x) for net in nets])

    def condition(mean: Tensor) -> float:
        d = float(mean.diagonal().mean())
        o = (float(mean.sum()) / points - d) / (points - 1)
        return (d + (points - 1) * o) / (d - o)

    left_out = torch.tensor([condition((ntks.sum(0) - one) / (count - 1)) for one in ntks])
    error = float(left_out.std(correction=0) * math.sqrt(count - 1))
    predicted = condition_number(kernels(x, depth, transition).ntk)
    statement = f"NTK condition, {kind}, {points} points, depth {depth}, width {width}"
    return Estimate(statement, condition(ntks.mean(0)), error, predicted, count, seed)


def theorem2(n: int = 64, rho: float = 0.5, *, count: int = 40, seed: int = 0) -> Estimate:
    """Measure the BatchNorm transition of one random layer of fan-in n; W cancels, so any width will do."""
    transition, batch = Transition("batch_norm"), 4000

    def draw(s: int) -> float:
        (w,) = _normal(s, (32, n))
        h = transition.activation(torch.cat(correlated_pair((batch, n), rho, s + 10**6))) @ w.T
        a, b = ((h - h.mean(0)) / h.std(0)).split(batch)
        return float((a * b).mean())

    statement = f"Theorem 2, BN transition at n = {n}, rho = {rho:g}"
    return _estimate(statement, draw, float(transition(rho)), count, seed)


def theorem3(
    kind: str | Transition = "weight_mean",
    rho: float = 0.5,
    depth: int = 1,
    *,
    width: int = 512,
    count: int = 40,
    seed: int = 0,
) -> Estimate:
    """Measure the kernel of a pair after `depth` stably initialised layers: T applied depth times.

    The kernel, not the correlation, whose expectation is biased at finite width. `kind` may be a whole `Transition`,
    of any weights and biases.
    """
    t, x = kind if isinstance(kind, Transition) else Transition(kind), _pair_inputs(rho)

    def draw(s: int) -> float:
        with torch.no_grad():
            return float(FiniteNetwork(2, width, depth + 1, t, outputs=width, seed=s)(x).prod(0).mean())

    predicted = float(kernels(x, depth + 1, t).nngp[0, 1])
    statement = f"{t.kind} {t.activation.name}, kernel of a pair, rho = {rho:g}, depth {depth}, width {width}"
    return _estimate(statement, draw, predicted, count, seed)


def tangent_kernel(
    transition: Transition,
    rho: float = 0.5,
    depth: int = 3,
    *,
    width: int = 256,
    outputs: int = 4,
    count: int = 20,
    seed: int = 0,
) -> Estimate:
    """Measure the NTK of a pair of inputs on real networks against the recursion of `kernels`."""
    x = _pair_inputs(rho)

    def draw(s: int) -> float:
        net = FiniteNetwork(2, width, depth, transition, outputs=outputs, seed=s)
        return float(empirical_ntk(net, x[:1], x[1:]))

    statement = f"NTK {transition.kind} {transition.activation.name}, rho = {rho:g}, depth {depth}, width {width}"
    return _estimate(statement, draw, float(kernels(x, depth, transition).ntk[0, 1]), count, seed)


def gradient_growth(
    kind: str = "weight_mean", *, width: int = 512, depth: int = 6, batch: int = 64, count: int = 20, seed: int = 0
) -> Estimate:
    """Measure the backward growth per layer of the squared gradient by the pre-activations: chi1.

    Under BatchNorm chi1 is the limit of large batches; small ones grow faster.
    """
    depth = positive_int(depth, "depth", least=3, error=TheoryError)
    transition = Transition(kind)

    def draw(s: int) -> float:
        x, cotangent = _normal(s + 10**6, (batch, 64), (batch, width))
        net = FiniteNetwork(64, width, depth, transition, outputs=width, last_norm=True, seed=s)
        hidden = list(net.hidden(x))
        # not the last step: BatchNorm's backward first projects a random cotangent
        gradients = torch.autograd.grad(hidden[-1], (hidden[0], hidden[-2]), cotangent)
        return float((gradients[0].norm() / gradients[1].norm()) ** (2 / (depth - 2)))

    return _estimate(f"gradient growth per layer, {kind}, batch {batch}", draw, transition.chi1, count, seed)


def correlation_spread(
    *, width: int = 300, depth: int = 30, pairs: int = 200, count: int = 10, seed: int = 0
) -> Estimate:
    """Measure the spread of correlations deep in a weight-mean ReLU network (appendix B.1).

    Each layer adds sampling noise of variance about 1/width to a correlation and shrinks what it inherits by a =
    T'(0): the sd is sqrt((1 + 1/(1 - a^2)) / width).
    """
    transition = Transition("weight_mean")

    def draw(s: int) -> float:
        (x,) = _normal(s + 10**6, (2 * pairs, 784))
        with torch.no_grad():
            h = FiniteNetwork(784, width, depth, transition, outputs=width, seed=s)(x)
        return float((torch.nn.functional.cosine_similarity(h[:pairs], h[pairs:]) ** 2).mean().sqrt())

    statement = f"sd of the correlation at width {width}, depth {depth}"
    return _estimate(statement, draw, correlation_band(width), count, seed)


def correlation_band(width: int) -> float:
    """Return the sd of a correlation deep in a weight-mean ReLU network (see `correlation_spread`).

    Example:
        >>> round(1.96 * correlation_band(300), 3)
        0.201
    """
    width = positive_int(width, "width", error=TheoryError)
    a = float(Transition("weight_mean").derivative(0.0))
    return math.sqrt((1 + 1 / (1 - a**2)) / width)


def residual_variance(
    kind: str = "weight_mean",
    scale: Scales = "sqrt",
    blocks: int = 8,
    *,
    width: int = 256,
    batch: int = 128,
    count: int = 10,
    seed: int = 0,
) -> Estimate:
    """Measure the variance after the residual blocks; 1/sqrt(l) gives blocks + 1, as BatchNorm does."""
    transition, (x,) = Transition(kind), _normal(seed, (batch, 64))
    x = x / x.norm(dim=1, keepdim=True) * 8

    def draw(s: int) -> float:
        net = FiniteNetwork(64, width, blocks, transition, residual=scale, readout=False, seed=s, last_norm=True)
        with torch.no_grad():
            return float((net(x) ** 2).mean())

    predicted = float(residual_kernels(x[:2], blocks, transition, scale=scale).rows[0])
    return _estimate(f"variance after {blocks} blocks, {kind}, scale {scale}", draw, predicted, count, seed)
