"""Dual activations: E[phi(u) phi(v)] and E[phi'(u) phi'(v)] for Gaussian pairs of any variances.

`Pairs` is the only place that decides how they are computed, by the first way that applies: a closed form (identity,
ReLU, leaky ReLU, PReLU, erf, GELU); an `interpolant`, where many pairs are expected; a double integral per pair.

A correlation is given twice, as rho and as gap = 1 - rho: the first is exact to relative rounding close to 0, the
second close to 1, where kinked activations bend like arccos(rho).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from mimicnorm.arguments import finite
from mimicnorm.errors import TheoryError

from .activations import Activation, require_resolved, resolve
from .arguments import reals
from .interpolant import interpolant, interpolation, variance_nodes
from .quadrature import CPU, Moments, normal_nodes, pair_integrals, single_integrals

MANY = 1000  # expected pairs from which an interpolant over several variances pays
MANY_OF_ONE_VARIANCE = 32  # ... over one variance
MAX_PAIRS = 1500  # of double integrals: about half a minute


def dual(activation: Any, rho: Tensor | float, q1: float = 1.0, q2: float | None = None, **parameters: float) -> Tensor:
    """Return phihat(rho) = E[phi(u) phi(v)] for u, v of variances q1, q2 and correlation rho (paper eq. 4).

    Example:
        >>> round(float(dual("relu", 0.0)) * 2 * math.pi, 12)
        1.0
    """
    return _of_one_pair(resolve(activation, None, **parameters), rho, q1, q2)[0]


def dual_slope(
    activation: Any, rho: Tensor | float, q1: float = 1.0, q2: float | None = None, **parameters: float
) -> Tensor:
    """Return E[phi'(u) phi'(v)], the derivative of `dual` by the covariance sqrt(q1 q2) rho.

    Example:
        >>> round(float(dual_slope("relu", 1.0)), 12)
        0.5
    """
    resolved = resolve(activation, None, **parameters)
    require_continuous(resolved)
    return _of_one_pair(resolved, rho, q1, q2)[1]


def _of_one_pair(activation: Activation, rho: Tensor | float, q1: float, q2: float | None) -> tuple[Tensor, Tensor]:
    q1 = finite(q1, "q1", above=0, error=TheoryError)
    q2 = q1 if q2 is None else finite(q2, "q2", above=0, error=TheoryError)
    rho = check_correlation(rho)
    return pair_moments(activation, q1, q2, rho, expected=rho.numel())


def pair_moments(
    activation: Activation, q1: float, q2: float, rho: Tensor, *, centred: bool = False, expected: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Return E[phi(u) phi(v)] and E[phi'(u) phi'(v)] at correlations rho; arguments as for `Pairs`."""
    flat = rho.reshape(1, -1)
    sides = flat.new_full((1,), q1), flat.new_full((flat.shape[1],), q2)
    value, slope, _ = Pairs(activation, *sides, centred=centred, expected=expected)(
        slice(None), slice(None), flat, 1 - flat
    )
    return value.reshape(rho.shape), slope.reshape(rho.shape)


def check_correlation(rho: Tensor | float) -> Tensor:
    """Return rho as float64; an error outside [-1, 1], except for rounding of 1e-12."""
    values = reals("a correlation", rho)
    bad = values.abs() > 1 + 1e-12
    if bool(bad.any()):
        worst = float(values[bad].flatten()[0])
        raise TheoryError(
            f"correlation {worst:g} is outside [-1, 1]. Pass correlations, not covariances: "
            "divide by the square root of the two variances."
        )
    return values.clamp(-1.0, 1.0)


def moments(activation: Activation, q: Tensor) -> Moments:
    """Return the moments of a single input of each variance in q; equal variances get equal moments, bit for bit."""
    values, inverse = q.unique(return_inverse=True)
    if has_closed_form(activation):
        table = _closed_moments(activation, values)
    else:
        require_resolved(activation, 2.0 ** math.ceil(math.log2(float(values.max()))))
        nodes = variance_nodes(activation, values) if len(values) > 100 else None
        if nodes is None:
            parts = [single_integrals(activation, part) for part in values.to(CPU).split(1024)]
            table = Moments(*(torch.cat(t) for t in zip(*parts, strict=True)))
        else:
            at_nodes, weights = single_integrals(activation, nodes), interpolation(nodes, values)
            # divided by the power of q with which they grow, moments vary less
            grown = zip(at_nodes, (0.5, 1.0, 1.0, 0.0), strict=True)
            table = Moments(*(weights @ (m / nodes**p).to(q.device) * values**p for m, p in grown))
    return Moments(*(m.to(q.device)[inverse] for m in table))


def _closed_moments(activation: Activation, q: Tensor) -> Moments:
    one, zero = torch.ones_like(q), torch.zeros_like(q)
    variance, slope, _ = _closed_form(activation, q, q, one, zero, centred=True)
    leaky = leaky_slope(activation)
    if leaky is not None:
        mean = (1 - leaky) * torch.sqrt(q / (2 * math.pi))
    else:
        mean = q / torch.sqrt(2 * math.pi * (1 + q)) if activation.name == "gelu" else zero
    return Moments(mean, _closed_form(activation, q, q, one, zero, centred=False)[0], variance, slope)


class Pairs:
    """Expectations between inputs of variances q1 and inputs of variances q2.

    Args:
        activation: phi.
        q1: variances of u, (m,).
        q2: variances of v, (m2,).
        centred: whether the first expectation is the covariance of phi(u) and phi(v). It is exact to relative
            rounding; a difference of E[phi(u) phi(v)] and the means would lose a small correlation.
        expected: how many pairs will be asked for in all, which decides whether an interpolant pays.
        angles: returns the least and the largest arccos(rho) of pairs other than equal inputs.

    Attributes:
        one_by_one: whether every pair takes a double integral.
    """

    def __init__(
        self,
        activation: Activation,
        q1: Tensor,
        q2: Tensor,
        *,
        centred: bool,
        expected: float,
        angles: Callable[[], tuple[float, float]] = lambda: (0.0, math.pi),
    ):
        self.activation, self.q1, self.q2, self.centred = activation, q1, q2, centred
        self.interpolant, self.one_by_one = None, False
        if has_closed_form(activation):
            return
        one_variance = bool((q1 == q1[0]).all() & (q2 == q1[0]).all())
        if expected > (MANY_OF_ONE_VARIANCE if one_variance else MANY):
            self.interpolant = interpolant(activation, q1, q2, angles())
        self.one_by_one = self.interpolant is None
        if self.one_by_one and expected > MAX_PAIRS:
            raise TheoryError(
                f"{activation.name!r} has no closed form, and {expected:g} pairs, over all layers, would each need a "
                f"double integral (limit {MAX_PAIRS}): its kinks are off 0 and the variances unequal, or the "
                "variances exceed 50 or span a factor above 1,000. Give all inputs one norm, or use fewer points or "
                "a bias."
            )

    @cached_property
    def moments(self) -> tuple[Moments, Moments]:
        """The moments of u, and those of v."""
        both = moments(self.activation, torch.cat([self.q1, self.q2]))
        u, v = zip(*(m.split((len(self.q1), len(self.q2))) for m in both), strict=True)
        return Moments(*u), Moments(*v)

    @property
    def powers(self) -> tuple[Tensor, Tensor]:
        """E[phi(u)^2] and E[phi(v)^2], or the variances if centred."""
        u, v = self.moments
        return (u.variance, v.variance) if self.centred else (u.second, v.second)

    def __call__(self, rows: slice, columns: slice, rho: Tensor, gap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return expectations of a block of pairs with correlations rho = 1 - gap.

        They are E[phi(u) phi(v)] (the covariance if centred), E[phi'(u) phi'(v)], and 1 - (correlation of phi(u) and
        phi(v)), about 0 or about the means.
        """
        q1, q2 = self.q1[rows, None], self.q2[columns]
        if has_closed_form(self.activation):
            value, slope, gap_after = _closed_form(self.activation, q1, q2, rho, gap, self.centred)
            if gap_after is not None:
                return value, slope, gap_after
        else:
            value, slope = self._without_closed_form(rows, columns, rho, gap)
        power, power_of_v = self.powers[0][rows, None], self.powers[1][columns]
        gap_after = (1 - value / (torch.sqrt(power) * torch.sqrt(power_of_v))).clamp(min=0.0)
        # exact at equal inputs, and at opposite ones of odd and even activations: a chaotic layer amplifies rounding
        equal = (gap == 0) & (q1 == q2)
        value, gap_after = torch.where(equal, power, value), gap_after.masked_fill(equal, 0.0)
        slope = torch.where(equal, self.moments[0].slope[rows, None], slope)
        sign = mirror(self.activation)
        if sign:
            opposite = (gap == 2) & (q1 == q2)
            value, gap_after = torch.where(opposite, sign * power, value), gap_after.masked_fill(opposite, 1.0 - sign)
        return value, slope, gap_after

    def _without_closed_form(self, rows: slice, columns: slice, rho: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
        q1, q2 = self.q1[rows, None], self.q2[columns]
        angle = torch.atan2(torch.sqrt(gap * (1 + rho)), rho)
        if self.interpolant is not None:
            value, slope = self.interpolant(rows, columns, rho, angle)
            value = value * (torch.sqrt(q1) * torch.sqrt(q2))
        else:
            value, slope = self._integrals(q1, q2, rho, angle)
        if not self.centred:
            of_u, of_v = self.moments
            value = value + of_u.mean[rows, None] * of_v.mean[columns]
        return value, slope

    def _integrals(self, q1: Tensor, q2: Tensor, rho: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        q1, q2 = (q.to(CPU).expand(angle.shape).reshape(-1, 1) for q in (q1, q2))
        values = []
        for a, b, t in zip(q1, q2, angle.flatten().tolist(), strict=True):
            equal_inputs = t == 0 and bool(a == b)  # their moments are known
            values.append((0.0, 0.0) if equal_inputs else [*map(float, pair_integrals(self.activation, a, b, t))])
        table = torch.tensor(values, dtype=torch.float64, device=rho.device).reshape(*rho.shape, 2)
        return table[..., 0] * rho, table[..., 1]


def leaky_slope(activation: Activation) -> float | None:
    """Return the negative slope of a positively homogeneous activation (ReLU 0, identity 1), else None."""
    if activation.built_in and activation.name in ("leaky_relu", "prelu"):
        return activation.parameters[0][1]
    return {"identity": 1.0, "relu": 0.0}.get(activation.name) if activation.built_in else None


def has_closed_form(activation: Activation) -> bool:
    """Return whether no quadrature is needed at all."""
    return leaky_slope(activation) is not None or (activation.built_in and activation.name in ("erf", "gelu"))


def _closed_form(
    activation: Activation, q1: Tensor, q2: Tensor, rho: Tensor, gap: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what `Pairs` returns, the last only where it is known better than as a difference from 1."""
    scale, root = torch.sqrt(q1) * torch.sqrt(q2), torch.sqrt(gap * (1 + rho))
    leaky = leaky_slope(activation)
    if leaky is not None:
        return _leaky_relu(leaky, scale, rho, gap, root, centred)
    # determinants of 1 + covariance from sums of positive terms: products less squares cancel at large variances
    cov, rest = scale * rho, scale * root
    if activation.name == "erf":
        spread = torch.hypot(torch.sqrt(1 + 2 * q1 + 2 * q2), 2 * rest)
        return torch.atan2(2 * cov, spread) * (2 / math.pi), 4 / math.pi / spread, None
    # GELU: Stein's lemma twice on E[u v Phi(u) Phi(v)]; `density` is E[N(u) N(v)]
    spread, norm = torch.hypot(torch.sqrt(1 + q1 + q2), rest), torch.sqrt(1 + q1) * torch.sqrt(1 + q2)
    density = 1 / (2 * math.pi * spread)
    both_positive = torch.atan2(spread, -cov) / (2 * math.pi)
    sides = 1 / (1 + q1) + 1 / (1 + q2)
    if centred:  # less the means, q1 q2 / (2 pi norm), again without the cancellation
        tail = (cov / norm) ** 2 * (density - scale * (scale / norm) / (2 * math.pi * (1 + spread / norm)))
    else:
        tail = density * rest * rest + density * cov * (cov * sides)
    return cov * both_positive + tail, both_positive + density * cov * (sides + 1 / spread**2), None


def _leaky_relu(
    slope: float, scale: Tensor, rho: Tensor, gap: Tensor, root: Tensor, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Write phi = a x + b |x|: E|u||v| is the arc-cosine kernel of degree 1 (paper eq. 4), its derivative that of 0."""
    a2, b2 = ((1 + slope) / 2) ** 2, ((1 - slope) / 2) ** 2 * 2 / math.pi
    arcsine = torch.atan2(rho, root)
    bend = -(rho**2) / (1 + root) if centred else root  # root - 1 without its cancellation
    value = scale * (a2 * rho + b2 * (bend + rho * arcsine))
    angle = math.pi / 2 - arcsine
    square = angle**2
    series = angle * square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    excess = torch.where(angle < 0.1, series, angle - root)  # angle - sin(angle)
    fall = (a2 + b2 * math.pi / 2) * gap + b2 * (excess - gap * angle)
    return value, (a2 + b2 * arcsine) + 0 * scale, fall / (a2 + b2 * (math.pi / 2 - centred))


@lru_cache(maxsize=256)
def require_continuous(activation: Activation) -> None:
    """Refuse an activation with a step: its derivative kernel is infinite at correlation 1."""
    require_resolved(activation)
    z, w = normal_nodes(activation.kinks)
    phi, slope = activation.with_slope(z)
    by_slope, by_parts = float((w * slope).sum()), float((w * z * phi).sum())
    if not math.isclose(by_slope, by_parts, rel_tol=1e-8, abs_tol=1e-8):
        raise TheoryError(
            f"activation {activation.name!r} has a step (E[phi'] = {by_slope:.4g}, E[z phi] = {by_parts:.4g})"
            ": its derivative kernel is infinite, so there is no chi_1 and no NTK."
        )


@lru_cache(maxsize=256)
def mirror(activation: Activation) -> int:
    """Return the correlation of phi(u) and phi(-u): -1 (phi is odd), 1 (even), or 0 (neither)."""
    z, _ = normal_nodes(activation.kinks)
    here, there = activation(z).detach(), activation(-z).detach()
    least = 1e-15 * float(here.abs().max())
    return next((sign for sign in (-1, 1) if float((here - sign * there).abs().max()) <= least), 0)
