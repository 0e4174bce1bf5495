"""The transition operator of one layer: what it does to correlations (paper eq. 2, Theorem 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mimicnorm.arguments import finite, positive_int
from mimicnorm.errors import TheoryError

from .activations import resolve
from .dual import check_correlation, leaky_slope, moments, pair_moments, require_continuous

KINDS = ("straight", "weight_mean", "batch_norm")


@dataclass(frozen=True)
class FixedPoint:
    """A correlation that a layer maps to itself; `slope` is the derivative there, below 1 it attracts."""

    rho: float
    slope: float
    stability: str  # "stable", "unstable" or "marginal"


@dataclass(frozen=True)
class DepthScales:
    """Numbers of layers after which a quantity has changed by a factor e (infinite when it does not)."""

    correlation: float
    """Distance to the stable fixed point, falling as slope^depth."""
    gradient: float
    """Squared gradient norm, chi1^depth."""
    ntk_off_diagonal: float
    """Off-diagonal over diagonal NTK, (slope / chi1)^depth in the chaotic phase."""
    variance: float
    """Distance of the variance to its fixed point."""


@dataclass(frozen=True)
class Transition:
    """One layer h' = sigma_w / sqrt(n) W phi(h) + sigma_b b, W and b standard normal (NTK parametrisation).

    On covariances K of zero-mean Gaussian h, with phihat(K) = E[phi(u) phi(v)] and mean(q) = E[phi(sqrt(q) z)]:

    - ``straight``: K' = sigma_w2 phihat(K) + sigma_b2;
    - ``weight_mean``: K' = sigma_w2 (n - 1)/n (phihat(K) - mean(q) mean(q')) + sigma_b2, the rows of W centred (Lemma
      1; n = fan_in, the factor is 1 when fan_in is None);
    - ``batch_norm``: K' = (phihat(K) - mean terms) / variance over the data, in the limit of width, then batch, to
      infinity on data whose pairs are uncorrelated; sigma_w2 and sigma_b2 cancel.

    The object itself maps *correlations*, at the variance q* that the layer maps to itself.

    Args:
        kind: one of the three.
        activation: a name, torch module or callable (see `activations.resolve`).
        sigma_w2: multiplies 1/fan_in in the weight variance; ``"stable"`` makes q* = 1 a fixed point, i.e. T(1) = 1:
            (1 - sigma_b2) / E[phi^2] or (1 - sigma_b2) n / ((n - 1) Var[phi]).
        sigma_b2: the variance of the biases.
        fan_in: n, for the exact finite-width factors of weight mean.

    Example:
        >>> t = Transition("weight_mean", "relu")
        >>> round(t.chi1, 6), t.phase, [p.rho for p in t.fixed_points]
        (1.466942, 'chaotic', [0.0, 1.0])
    """

    kind: str = "straight"
    activation: Any = "relu"
    sigma_w2: float | str = "stable"
    sigma_b2: float = 0.0
    fan_in: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no layer can be."""
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise TheoryError(f"unknown kind {self.kind!r}: use one of {', '.join(map(repr, KINDS))}.")
        object.__setattr__(self, "activation", resolve(self.activation))
        object.__setattr__(self, "sigma_b2", finite(self.sigma_b2, "sigma_b2", least=0, error=TheoryError))
        if not (isinstance(self.sigma_w2, str) and self.sigma_w2 == "stable"):
            name = "sigma_w2 (if not 'stable')"
            object.__setattr__(self, "sigma_w2", finite(self.sigma_w2, name, above=0, error=TheoryError))
        elif self.sigma_b2 >= 1:
            raise TheoryError(f"no stable sigma_w2 exists for sigma_b2 = {self.sigma_b2}: it must be below 1.")
        if self.fan_in is not None:
            object.__setattr__(self, "fan_in", positive_int(self.fan_in, "fan_in", least=2, error=TheoryError))

    @property
    def centred(self) -> bool:
        """Whether the layer subtracts the mean of phi."""
        return self.kind != "straight"

    def layer_power(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return E[phi^2], less the squared mean where the layer centres, and E[phi'^2], at variances q."""
        at_q = moments(self.activation, q)
        return at_q.variance if self.centred else at_q.second, at_q.slope

    @cached_property
    def effective_w2(self) -> float:
        """sigma_w2 times (n - 1)/n under weight mean: what multiplies phihat in the kernel."""
        power = float(self.layer_power(_scalar(1.0))[0])
        if self.kind == "batch_norm":
            return 1 / power
        if self.sigma_w2 == "stable":
            return (1 - self.sigma_b2) / power
        return float(self.sigma_w2) * self._lost

    @property
    def weight_variance(self) -> float:
        """sigma_w2 as a number; a weight before centring has variance weight_variance / fan_in."""
        return self.effective_w2 / self._lost

    @property
    def _lost(self) -> float:
        return 1 - 1 / self.fan_in if self.kind == "weight_mean" and self.fan_in else 1.0

    def variance_map(self, q: float) -> float:
        """Return the variance after a layer whose input has variance q."""
        q = max(finite(q, "q", least=0, error=TheoryError), 1e-300)  # the limit at 0 is phi(0)
        if self.kind == "batch_norm":
            return 1.0
        return self.effective_w2 * float(self.layer_power(_scalar(q))[0]) + self.sigma_b2

    @cached_property
    def q_star(self) -> float:
        """The variance that depth leads to from 1; 0 when it dies out, infinity when it has no bound."""
        if abs(self.variance_map(1.0) - 1) < 1e-12:
            return 1.0
        q, factor = 1.0, 2.0 if self.variance_map(1.0) > 1 else 0.5
        while (self.variance_map(q * factor) > q * factor) == (factor > 1):
            q *= factor
            if not 1e-12 < q < 1e12:
                return math.inf if factor > 1 else 0.0
        return _crossing(self.variance_map, q, q * factor)

    @cached_property
    def _map_variance(self) -> float:
        """The variance at which correlations are mapped: q*, or any for an activation whose map is the same at all."""
        if leaky_slope(self.activation) is None and not 0 < self.q_star < math.inf:
            what, other = ("dies out", "larger") if self.q_star == 0 else ("grows without bound", "smaller")
            raise TheoryError(
                f"the variance of this {self.activation.name} network {what} with depth, so its correlations have no "
                f"limiting map; use a {other} sigma_w2 or sigma_w2='stable'."
            )
        return min(max(self.q_star, 1e-100), 1e100)

    def __call__(self, rho: Tensor | float) -> Tensor:
        """Return the correlation after one layer."""
        rho = check_correlation(rho)
        q = self._map_variance
        value, _ = pair_moments(self.activation, q, q, rho, centred=self.centred)
        bias = 0.0 if self.kind == "batch_norm" else self.sigma_b2
        mapped = (self.effective_w2 * value + bias) / self.variance_map(q)
        # exactly 1 at 1: under a chaotic map the rounding error would grow by chi1 per layer
        return torch.where(rho == 1, 1.0, mapped.clamp(-1.0, 1.0))

    def derivative(self, rho: Tensor | float) -> Tensor:
        """Return dT/drho, in closed form where there is one: autograd of sqrt(1 - rho^2) is NaN at +-1."""
        require_continuous(self.activation)
        q = self._map_variance
        _, slope = pair_moments(self.activation, q, q, check_correlation(rho))
        return self.effective_w2 * q * slope / self.variance_map(q)

    @cached_property
    def chi1(self) -> float:
        """sigma_w2 E[phi'(sqrt(q*) z)^2]: the gradients' growth, and T'(1) when 0 < q* < inf."""
        require_continuous(self.activation)
        q = self._map_variance if self.q_star > 0 else 1e-200  # a dying variance sees phi'(0) alone
        return self.effective_w2 * float(self.layer_power(_scalar(q))[1])

    @cached_property
    def phase(self) -> str:
        """``ordered`` (chi1 < 1), ``critical``, ``chaotic``, or ``unbounded``: the variance has no limit."""
        if self.q_star == math.inf:
            return "unbounded"
        if abs(self.chi1 - 1) < 1e-9:
            return "critical"
        return "ordered" if self.chi1 < 1 else "chaotic"

    @cached_property
    def fixed_points(self) -> tuple[FixedPoint, ...]:
        """All correlations with T(rho) = rho, in ascending order, with their stability."""
        # even in theta, which spreads the points close to +-1 where roots crowd
        grid = torch.cos(torch.linspace(math.pi, 0, 2001, dtype=torch.float64))
        grid[0], grid[1000], grid[-1] = -1.0, 0.0, 1.0
        gap = self(grid) - grid
        clear = gap.abs() >= 1e-12  # the others have no sign: tables are exact to 1e-13
        if not bool(clear.any()):
            raise TheoryError(f"every correlation is a fixed point: {self.activation.name} acts as a linear map here.")
        roots = [float(grid[i]) for i in (0, 1000, 2000) if not clear[i]]
        for i, j in pairwise(clear.nonzero().flatten().tolist()):
            known = any(float(grid[i]) < root < float(grid[j]) for root in roots)
            if not known and bool(gap[i] * gap[j] < 0):
                roots.append(_crossing(lambda rho: float(self(rho)), float(grid[i]), float(grid[j])))
        return tuple(self._classify(rho) for rho in sorted(roots))

    def _classify(self, rho: float) -> FixedPoint:
        bounded = 0 < self.q_star < math.inf
        slope = self.chi1 if rho == 1 and bounded else float(self.derivative(rho))  # as `phase` sees it
        if abs(slope - 1) < 1e-9:
            return FixedPoint(rho, slope, "marginal")
        return FixedPoint(rho, slope, "stable" if abs(slope) < 1 else "unstable")

    @cached_property
    def depth_scales(self) -> DepthScales:
        """How fast correlations, gradients, the NTK's off-diagonal and the variance change with depth."""
        attracting = [p for p in self.fixed_points if p.stability == "stable"]
        # with none strictly stable the approach is algebraic (critical ReLU: 1 - rho ~ 9 pi^2 / (2 depth^2))
        slope = attracting[-1].slope if attracting else 1.0
        q, step = self._map_variance, 1e-5
        ends = self.variance_map(q * (1 + step)), self.variance_map(q * (1 - step))
        variance_slope = (ends[0] - ends[1]) / (2 * q * step)
        return DepthScales(
            correlation=_scale(slope),
            gradient=_scale(self.chi1),
            ntk_off_diagonal=_scale(slope / max(self.chi1, 1.0)) if attracting else math.inf,
            variance=_scale(variance_slope) if abs(variance_slope - 1) > 1e-7 else math.inf,
        )

    def iterate(self, rho: Tensor | float, depth: int) -> Tensor:
        """Return the correlations after 0, 1, ..., depth layers, stacked in front.

        Example:
            >>> [round(x, 4) for x in Transition("weight_mean").iterate(0.5, 3).tolist()]
            [0.5, 0.4264, 0.3559, 0.2909]
        """
        depth = positive_int(depth, "depth", error=TheoryError)
        path = [check_correlation(rho)]
        for _ in range(depth):
            path.append(self(path[-1]))
        return torch.stack(path)


def _scalar(q: float) -> Tensor:
    return torch.tensor(q, dtype=torch.float64)


def _scale(factor: float) -> float:
    if abs(factor) < 1e-300:
        return 0.0
    change = abs(math.log(abs(factor)))
    return math.inf if change < 1e-12 else 1 / change


def _crossing(f: Callable[[float], float], one: float, other: float) -> float:
    """Bisect for the x between two numbers where f(x) = x."""
    above = f(one) > one
    for _ in range(60):
        middle = (one + other) / 2
        one, other = (middle, other) if (f(middle) > middle) == above else (one, middle)
    return (one + other) / 2
