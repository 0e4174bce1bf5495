"""Dual activations: E[phi(u) phi(v)] and E[phi'(u) phi'(v)] for Gaussian pairs of any variances.

Four ways, the first that applies: closed forms (identity, ReLU and its leaky kin, erf, GELU); Hermite series, which
converge geometrically for analytic activations; for kinked ones of equal variance a Chebyshev series in theta =
arccos(rho), in which the dual is smooth up to both ends while in rho it is not; else a double quadrature per pair
whose panels follow the kinks.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .activations import Activation, resolve
from .errors import TheoryError
from .quadrature import CPU, legendre, normal_nodes
from .series import hermite, low_order, sum_series

MAX_PAIRS = 1_500  # of double quadratures in one call: about a minute
_TABLE_DEGREE = 160
_PIECES = 4096
_SMALL = 0.03  # below this correlation a few Hermite terms are exact to rounding, kinks or not


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
    variances = [torch.as_tensor(q, dtype=torch.float64, device=CPU) for q in (q1, q1 if q2 is None else q2)]
    for q in variances:
        if not bool((torch.isfinite(q) & (q > 0)).all()):
            raise TheoryError("a variance q must be positive and finite; leave out zero vectors.")
    return resolved, variances[0], variances[1], check_correlation(rho)


def check_correlation(rho: Tensor | float) -> Tensor:
    """Return rho as float64, refusing what is no correlation; rounding of 1e-12 beyond +-1 is forgiven."""
    try:
        values = torch.as_tensor(rho, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise TheoryError(f"a correlation must be a number or a tensor of numbers, not {rho!r}.") from error
    bad = ~(values.abs() <= 1 + 1e-12)
    if bool(bad.any()):
        worst = float(values[bad].flatten()[0])
        raise TheoryError(
            f"correlation {worst:g} is outside [-1, 1]. Pass correlations, not covariances: "
            "divide by the square root of the two variances."
        )
    return values.clamp(-1.0, 1.0)


def leaky_slope(activation: Activation) -> float | None:
    """Return the negative slope of a positively homogeneous activation (ReLU 0, identity 1), else None."""
    if activation.name == "identity":
        return 1.0
    if activation.name == "relu":
        return 0.0
    return activation.parameters[0][1] if activation.name in ("leaky_relu", "prelu") else None


def has_closed_form(activation: Activation) -> bool:
    """Return whether no quadrature is needed at all."""
    return leaky_slope(activation) is not None or activation.name in ("erf", "gelu")


@lru_cache(maxsize=256)
def require_continuous(activation: Activation) -> None:
    """Refuse an activation with a step: its derivative kernel is infinite at correlation 1."""
    z, w = normal_nodes(activation.kinks)
    by_slope = float((w * activation.derivative(z)).sum())
    by_parts = float((w * z * activation(z).detach()).sum())
    if not math.isclose(by_slope, by_parts, rel_tol=1e-8, abs_tol=1e-8):
        raise TheoryError(
            f"activation {activation.name!r} has a step (E[phi'] = {by_slope:.4g}, E[z phi] = {by_parts:.4g})"
            ": its derivative kernel is infinite, so there is no chi_1 and no NTK."
        )


def mean_at(activation: Activation, q: Tensor) -> Tensor:
    """Return E[phi(sqrt(q) z)] for each variance in q."""
    slope = leaky_slope(activation)
    if slope is not None:
        return (1 - slope) * torch.sqrt(q / (2 * math.pi))
    if activation.name == "gelu":
        return q / torch.sqrt(2 * math.pi * (1 + q))
    if activation.name == "erf":
        return torch.zeros_like(q)
    return _each_unique(q, lambda value: _power_at(activation, value)[0])


def power_at(activation: Activation, q: Tensor, centred: bool = False) -> tuple[Tensor, Tensor]:
    """Return `pair_moments` at correlation 1, per variance in q."""
    closed = _closed_form(activation, q, q, torch.ones_like(q), centred)
    if closed is not None:
        return closed
    return (
        _each_unique(q, lambda value: _power_at(activation, value)[3 if centred else 1]),
        _each_unique(q, lambda value: _power_at(activation, value)[2]),
    )


@lru_cache(maxsize=65536)
def _power_at(activation: Activation, q: float) -> tuple[float, float, float, float]:
    z, w = normal_nodes(activation.kinks, math.sqrt(q))
    x = math.sqrt(q) * z
    phi, slope = activation(x).detach(), activation.derivative(x)
    mean = float((w * phi).sum())
    return mean, float((w * phi**2).sum()), float((w * slope**2).sum()), float((w * (phi - mean) ** 2).sum())


def _each_unique(q: Tensor, function: Any) -> Tensor:
    values, where = torch.unique(q, return_inverse=True)
    return torch.tensor([function(float(v)) for v in values], dtype=torch.float64, device=q.device)[where]


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
    if not (equal and rho.numel() > _PIECES):
        c1, c2 = hermite(activation, q1), hermite(activation, q2)
        if c1 is not None and c2 is not None:
            return sum_series(c1 * c2, rho, torch.sqrt(q1 * q2), centred)
    if equal:
        value, slope = _from_table(activation, float(q1), rho)
    else:
        require_few_pairs(activation, math.prod(torch.broadcast_shapes(q1.shape, q2.shape, rho.shape)))
        q1, q2, rho = torch.broadcast_tensors(q1, q2, rho)
        rows = zip(*(t.flatten().tolist() for t in (q1, q2, rho)), strict=True)
        flat = [_double_quadrature(activation, *row) for row in rows]
        value, slope = torch.tensor(flat, dtype=torch.float64, device=rho.device).reshape(*rho.shape, 2).unbind(-1)
    if not centred:
        return value, slope
    covariance = value - mean_at(activation, q1) * mean_at(activation, q2)
    few = low_order(activation, q1) * low_order(activation, q2)
    series = (few * rho.clamp(-_SMALL, _SMALL)[..., None] ** torch.arange(1, few.shape[-1] + 1)).sum(-1)
    return torch.where(rho.abs() < _SMALL, series, covariance), slope


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
    slope = leaky_slope(act)
    if slope is not None:
        # phi = a x + b |x|; E|u||v| is the arc-cosine kernel of degree 1 (paper eq. 4), its derivative that of 0
        a2, b2 = ((1 + slope) / 2) ** 2, ((1 - slope) / 2) ** 2 * 2 / math.pi
        root, angle = torch.sqrt((1 - rho) * (1 + rho)), torch.asin(rho)
        scale = torch.sqrt(q1 * q2)
        bend = -(rho**2) / (1 + root) if centred else root  # root - 1 without its cancellation
        return scale * (a2 * rho + b2 * (bend + rho * angle)), (a2 + b2 * angle) + 0 * scale
    cov = torch.sqrt(q1 * q2) * rho
    if act.name == "erf":
        product = (1 + 2 * q1) * (1 + 2 * q2)
        value = torch.asin(2 * cov / torch.sqrt(product)) * (2 / math.pi)
        return value, 4 / math.pi / torch.sqrt(product - 4 * cov**2)
    if act.name == "gelu":
        # Stein's lemma twice on E[u v Phi(u) Phi(v)]; `density` is E[N(u) N(v)]
        product = (1 + q1) * (1 + q2)
        determinant = product - cov**2
        density = 1 / (2 * math.pi * torch.sqrt(determinant))
        both_positive = 0.25 + torch.asin(cov / torch.sqrt(product)) / (2 * math.pi)
        sides = 1 / (1 + q1) + 1 / (1 + q2)
        # centred: density less its value at correlation 0, again without the cancellation
        excess = density * cov**2 / (product + torch.sqrt(product * determinant)) if centred else density
        value = cov * both_positive + excess * q1 * q2 + density * cov**2 * (sides - 1)
        return value, both_positive + density * cov * (sides + 1 / determinant)
    return None


def _from_table(activation: Activation, q: float, rho: Tensor) -> tuple[Tensor, Tensor]:
    position = torch.acos(rho) * (_PIECES / math.pi)
    piece = position.long().clamp_(max=_PIECES - 1)
    t = position - piece
    value, slope = (
        ((c[3][piece] * t + c[2][piece]) * t + c[1][piece]) * t + c[0][piece] for c in _table(activation, q)
    )
    return value, slope


@lru_cache(maxsize=64)
def _table(activation: Activation, q: float) -> tuple[Tensor, Tensor]:
    """Tabulate the dual and its slope at variance q as cubics on pieces of theta = arccos(rho).

    A Chebyshev series through 160 exact values gives values and derivatives at the ends of 4096 pieces, on which
    cubics are exact to rounding and ten times faster than the series.
    """
    nodes = np.cos(np.pi * (np.arange(_TABLE_DEGREE) + 0.5) / _TABLE_DEGREE)
    rhos = np.cos(np.pi * (nodes + 1) / 2)
    q_ = torch.tensor(q, dtype=torch.float64, device=CPU)
    series = hermite(activation, q_)
    if series is not None:
        samples = torch.stack(sum_series(series**2, torch.from_numpy(rhos), q_), 1).numpy()
    else:
        samples = np.array([_double_quadrature(activation, q, q, float(r)) for r in rhos])
    chebyshev = np.polynomial.chebyshev
    fit = chebyshev.chebfit(nodes, samples, _TABLE_DEGREE - 1)
    ends = np.linspace(-1, 1, _PIECES + 1)
    cubics = []
    for column in fit.T:
        y, d = (chebyshev.chebval(ends, column), chebyshev.chebval(ends, chebyshev.chebder(column)) * 2 / _PIECES)
        rise = np.diff(y)
        rows = [y[:-1], d[:-1], 3 * rise - 2 * d[:-1] - d[1:], d[:-1] + d[1:] - 2 * rise]
        cubics.append(torch.from_numpy(np.stack(rows)))
    return cubics[0], cubics[1]


def _double_quadrature(activation: Activation, q1: float, q2: float, rho: float) -> tuple[float, float]:
    """Integrate over u = s1 z1, v = s2 (rho z1 + r z2), the inner panels ending where v meets a kink."""
    s1, s2, r = math.sqrt(q1), math.sqrt(q2), math.sqrt((1 - rho) * (1 + rho))
    centres = np.array(sorted({0.0, *activation.kinks}))
    grid = np.arange(-9.0, 9.5, 1.5)

    def ladder(s: float) -> np.ndarray:
        # at s <= 1 the grid resolves features of unit size by itself; kinks must be panel ends at any s
        steps = 2.0 ** np.arange(-1, math.ceil(math.log2(s)) + 3) if s > 1 else np.array([])
        return np.concatenate([-steps[::-1], [0.0], steps])

    around = (centres[:, None] + ladder(s2)).ravel() / s2
    ends = [grid, (centres[:, None] + ladder(s1)).ravel() / s1]
    if abs(rho) > 1e-3:
        # near rho = 1 the inner mean bends within r of each kink
        bends = r * np.concatenate([[h, -h] for h in 2.0 ** np.arange(-1, 5)])
        ends += [around / rho, (centres[:, None] / s2 + bends).ravel() / rho]
    z1, w1 = _panels(np.concatenate(ends)[None])
    inner = (around - rho * z1[0][:, None]) / max(r, 1e-300)
    z2, w2 = _panels(np.concatenate([np.broadcast_to(grid, (inner.shape[0], len(grid))), inner], 1))
    u, v = torch.from_numpy(s1 * z1[0]), torch.from_numpy(s2 * (rho * z1[0][:, None] + r * z2))
    w2_ = torch.from_numpy(w2)
    w1_ = torch.from_numpy(w1[0])
    value = (w1_ * activation(u).detach() * (w2_ * activation(v).detach()).sum(1)).sum()
    slope = (w1_ * activation.derivative(u) * (w2_ * activation.derivative(v)).sum(1)).sum()
    return float(value), float(slope)


def _panels(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Gauss-Legendre nodes and Gaussian weights per row of (unsorted) panel ends within [-9, 9]."""
    ends = np.sort(np.clip(ends, -9.0, 9.0), axis=1)
    unit, weight = legendre(14)
    half = np.diff(ends, axis=1)[:, :, None] / 2
    z = (ends[:, :-1, None] + half + half * unit).reshape(len(ends), -1)
    w = (half * weight).reshape(len(ends), -1) * np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    return z, w
