"""Dual activations: E[phi(u) phi(v)] and E[phi'(u) phi'(v)] for Gaussian pairs of any variances.

Four ways, the first that applies: closed forms (identity, ReLU and its leaky kin, erf, GELU); Hermite series, which
converge geometrically for analytic activations; a `surface` for kinked ones of equal variance; else a double quadrature
per pair whose panels follow the kinks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mimicnorm.errors import TheoryError

from .activations import Activation, require_close, resolve, settled_moments
from .arguments import reals
from .integrals import following_kinks
from .quadrature import CPU, normal_nodes
from .series import SMALL, hermite, low_order, sum_series
from .surface import interpolation, surface, variance_nodes

MAX_PAIRS = 1_500  # of double quadratures in one call: about a minute
MANY = 4096  # correlations from which a surface is faster than a Hermite series


def dual(activation: Any, rho: Tensor | float, q1: float = 1.0, q2: float | None = None, **parameters: float) -> Tensor:
    """Return phihat(rho) = E[phi(u) phi(v)] for u, v of variances q1, q2 and correlation rho (paper eq. 4).

    Example:
        >>> round(float(dual("relu", 0.0)) * 2 * math.pi, 12)
        1.0
    """
    return pair_moments(*_checked(activation, rho, q1, q2, parameters))[0]


def dual_slope(
    activation: Any, rho: Tensor | float, q1: float = 1.0, q2: float | None = None, **parameters: float
) -> Tensor:
    """Return E[phi'(u) phi'(v)], the derivative of `dual` by the covariance sqrt(q1 q2) rho.

    Example:
        >>> round(float(dual_slope("relu", 1.0)), 12)
        0.5
    """
    resolved, q1_, q2_, rho_ = _checked(activation, rho, q1, q2, parameters)
    require_continuous(resolved)
    return pair_moments(resolved, q1_, q2_, rho_)[1]


def _checked(
    activation: Any, rho: Tensor | float, q1: float, q2: float | None, parameters: dict[str, float]
) -> tuple[Activation, Tensor, Tensor, Tensor]:
    resolved = resolve(activation, None, **parameters)
    variances = [reals("a variance q", q).to(CPU) for q in (q1, q1 if q2 is None else q2)]
    if not all(bool((q > 0).all()) for q in variances):
        raise TheoryError("a variance q must be positive and finite; leave out zero vectors.")
    rho = check_correlation(rho)
    try:
        torch.broadcast_shapes(rho.shape, *(q.shape for q in variances))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(t.shape)) for t in (rho, *variances))
        raise TheoryError(f"rho, q1 and q2 of shapes {shapes} do not fit together: give one number each.") from error
    return resolved, variances[0], variances[1], rho


def check_correlation(rho: Tensor | float) -> Tensor:
    """Return rho as float64, refusing what is no correlation; rounding of 1e-12 beyond +-1 is forgiven."""
    values = reals("a correlation", rho)
    bad = values.abs() > 1 + 1e-12
    if bool(bad.any()):
        worst = float(values[bad].flatten()[0])
        raise TheoryError(
            f"correlation {worst:g} is outside [-1, 1]. Pass correlations, not covariances: "
            "divide by the square root of the two variances."
        )
    return values.clamp(-1.0, 1.0)


def leaky_slope(activation: Activation) -> float | None:
    """Return the negative slope of a positively homogeneous activation (ReLU 0, identity 1), else None."""
    if activation.built_in and activation.name in ("leaky_relu", "prelu"):
        return activation.parameters[0][1]
    return {"identity": 1.0, "relu": 0.0}.get(activation.name) if activation.built_in else None


def has_closed_form(activation: Activation) -> bool:
    """Return whether no quadrature is needed at all."""
    return leaky_slope(activation) is not None or (activation.built_in and activation.name in ("erf", "gelu"))


@lru_cache(maxsize=256)
def require_continuous(activation: Activation) -> None:
    """Refuse an activation with a step: its derivative kernel is infinite at correlation 1."""
    if not activation.built_in:
        _require_resolved(activation, 1.0)
    z, w = normal_nodes(activation.kinks)
    by_slope = float((w * activation.derivative(z)).sum())
    by_parts = float((w * z * activation(z).detach()).sum())
    if not math.isclose(by_slope, by_parts, rel_tol=1e-8, abs_tol=1e-8):
        raise TheoryError(
            f"activation {activation.name!r} has a step (E[phi'] = {by_slope:.4g}, E[z phi] = {by_parts:.4g})"
            ": its derivative kernel is infinite, so there is no chi_1 and no NTK."
        )


class Moments(NamedTuple):
    """E[phi], E[phi^2], Var[phi] and E[phi'^2] of phi(sqrt(q) z), one per variance q."""

    mean: Tensor
    second: Tensor
    variance: Tensor
    slope: Tensor


def moments(activation: Activation, q: Tensor) -> Moments:
    """Return the moments of a single input of each variance in q."""
    closed = _closed_form(activation, q, q, torch.ones_like(q))
    if closed is None:
        if not activation.built_in:
            _require_resolved(activation, 2.0 ** math.ceil(math.log2(float(q.max()))))
        nodes = variance_nodes(activation, q) if q.numel() > 100 else None
        if nodes is not None:
            at, carry = moments(activation, nodes), interpolation(nodes, q.reshape(-1))
            mean, second, variance, slope = (
                (carry @ (m / nodes**power).to(q.device)).reshape(q.shape) * q**power
                for m, power in zip(at, (0.5, 1.0, 1.0, 0.0), strict=True)
            )
            return Moments(mean, second, variance, slope)
        parts = [_moments(activation, part) for part in q.to(CPU).reshape(-1).split(1024)]
        return Moments(*(torch.cat(t).reshape(q.shape).to(q.device) for t in zip(*parts, strict=True)))
    variance, slope = _closed_form(activation, q, q, torch.ones_like(q), centred=True) or closed
    homogeneous = leaky_slope(activation)
    if homogeneous is not None:
        mean = (1 - homogeneous) * torch.sqrt(q / (2 * math.pi))
    else:
        mean = q / torch.sqrt(2 * math.pi * (1 + q)) if activation.name == "gelu" else torch.zeros_like(q)
    return Moments(mean, closed[0], variance, slope)


@lru_cache(maxsize=256)
def _require_resolved(activation: Activation, q: float) -> None:
    """Refuse a callable that the panels of one integral, or those of pairs at correlation 1, do not resolve."""
    require_close(activation, q, following_kinks(activation, q, q, 1.0), settled_moments(activation, q))


def _moments(activation: Activation, q: Tensor) -> Moments:
    scale = torch.sqrt(q)
    at_zero = set(activation.kinks) <= {0.0}  # then the nodes of the largest variance resolve the others, too
    z, w = normal_nodes(activation.kinks, float(scale.max()) if at_zero else scale.numpy())
    x = scale[:, None] * z
    phi, slope = activation(x).detach(), activation.derivative(x)
    mean = (w * phi).sum(-1)
    return Moments(mean, (w * phi**2).sum(-1), (w * (phi - mean[:, None]) ** 2).sum(-1), (w * slope**2).sum(-1))


def pair_moments(
    activation: Activation, q1: Tensor, q2: Tensor, rho: Tensor, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return E[phi(u) phi(v)] and E[phi'(u) phi'(v)] over broadcast variances and correlations.

    With `centred` the first is the covariance of phi(u) and phi(v), to relative accuracy: a difference of E[phi(u)
    phi(v)] and the means would lose what is left of a small correlation.
    """
    closed = _closed_form(activation, q1, q2, rho, centred)
    if closed is not None:
        return closed
    equal = q1.numel() == q2.numel() == 1 and float(q1) == float(q2)
    if not (equal and rho.numel() > MANY):
        c1, c2 = hermite(activation, q1), hermite(activation, q2)
        if c1 is not None and c2 is not None:
            return sum_series(c1 * c2, rho, torch.sqrt(q1 * q2), centred)
    means = moments(activation, q1).mean * moments(activation, q2).mean
    table = surface(activation, q1.reshape(1), q1.reshape(1).expand(rho.numel())) if equal else None
    if table is not None:
        covariance, slope = (t.reshape(rho.shape) for t in table(slice(None), slice(None), rho.reshape(1, -1)))
        covariance = covariance * q1
    else:
        require_few_pairs(activation, math.prod(torch.broadcast_shapes(q1.shape, q2.shape, rho.shape)))
        q1, q2, rho = torch.broadcast_tensors(q1, q2, rho)
        rows = zip(*(t.flatten().tolist() for t in (q1, q2, rho)), strict=True)
        flat = [following_kinks(activation, *row) for row in rows]
        value, slope = torch.tensor(flat, dtype=torch.float64, device=rho.device).reshape(*rho.shape, 2).unbind(-1)
        few = low_order(activation, q1) * low_order(activation, q2)
        series = (few * rho.clamp(-SMALL, SMALL)[..., None] ** torch.arange(1, few.shape[-1] + 1)).sum(-1)
        covariance = torch.where(rho.abs() < SMALL, series, value - means)
    return covariance if centred else covariance + means, slope


def require_few_pairs(activation: Activation, pairs: int, layers: int = 1) -> None:
    """Refuse more double quadratures than anybody would wait for."""
    if pairs * layers > MAX_PAIRS:
        raise TheoryError(
            f"{activation.name!r} has no closed form, and {pairs} pairs of unequal variance in {layers} layer(s) would "
            f"each need a double quadrature of 5 to 50 ms (limit {MAX_PAIRS}): its kinks are off 0, or the variances "
            "exceed 50 or span a factor above 1,000. Give all inputs one norm, or use fewer points or a bias."
        )


def _closed_form(
    act: Activation, q1: Tensor, q2: Tensor, rho: Tensor, centred: bool = False
) -> tuple[Tensor, Tensor] | None:
    if not has_closed_form(act):
        return None
    slope, scale = leaky_slope(act), torch.sqrt(q1) * torch.sqrt(q2)
    root = torch.sqrt((1 - rho) * (1 + rho))
    if slope is not None:
        # phi = a x + b |x|; E|u||v| is the arc-cosine kernel of degree 1 (paper eq. 4), its derivative that of 0
        a2, b2 = _halves(slope)
        angle = torch.asin(rho)
        bend = -(rho**2) / (1 + root) if centred else root  # root - 1 without its cancellation
        return scale * (a2 * rho + b2 * (bend + rho * angle)), (a2 + b2 * angle) + 0 * scale
    # determinants of 1 + covariance from sums of positive terms: products less squares cancel at large variances
    cov, rest = scale * rho, scale * root
    if act.name == "erf":
        spread = torch.hypot(torch.sqrt(1 + 2 * q1 + 2 * q2), 2 * rest)
        return torch.atan2(2 * cov, spread) * (2 / math.pi), 4 / math.pi / spread
    # GELU: Stein's lemma twice on E[u v Phi(u) Phi(v)]; `density` is E[N(u) N(v)]
    spread, norm = torch.hypot(torch.sqrt(1 + q1 + q2), rest), torch.sqrt(1 + q1) * torch.sqrt(1 + q2)
    density = 1 / (2 * math.pi * spread)
    both_positive = torch.atan2(spread, -cov) / (2 * math.pi)
    sides = 1 / (1 + q1) + 1 / (1 + q2)
    if centred:  # less the means, q1 q2 / (2 pi norm), again without the cancellation
        tail = (cov / norm) ** 2 * (density - scale * (scale / norm) / (2 * math.pi * (1 + spread / norm)))
    else:
        tail = density * rest * rest + density * cov * (cov * sides)
    return cov * both_positive + tail, both_positive + density * cov * (sides + 1 / spread**2)


def _halves(slope: float) -> tuple[float, float]:
    """Return a^2 and 2 b^2 / pi of leaky ReLU written as a x + b |x|."""
    return ((1 + slope) / 2) ** 2, ((1 - slope) / 2) ** 2 * 2 / math.pi


def near_one(slope: float, gap: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """Return 1 - (correlation after a leaky ReLU) and E[phi' phi'], both from gap = 1 - rho.

    They bend like arccos(rho), which from rho itself is known to 1e-16 / arccos(rho) only.
    """
    a2, b2 = _halves(slope)
    angle = 2 * torch.asin(torch.sqrt(gap / 2))
    square = angle**2
    series = angle * square / 6 * (1 - square / 20 * (1 - square / 42 * (1 - square / 72)))
    excess = torch.where(angle < 0.1, series, angle - torch.sin(angle))
    fall = (a2 + b2 * math.pi / 2) * gap + b2 * (excess - gap * angle)
    return fall / (a2 + b2 * (math.pi / 2 - centred)), a2 + b2 * (math.pi / 2 - angle)


@lru_cache(maxsize=256)
def mirror(activation: Activation) -> int:
    """Return what becomes of correlation -1 at equal norms: -1 (phi is odd), 1 (even), or 0 (neither)."""
    z, _ = normal_nodes(activation.kinks)
    here, there = activation(z).detach(), activation(-z).detach()
    least = 1e-15 * float(here.abs().max())
    return next((sign for sign in (-1, 1) if float((here - sign * there).abs().max()) <= least), 0)
