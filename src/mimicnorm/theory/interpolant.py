"""Expectations of millions of pairs by interpolation, for activations without a closed form.

For one activation E[phi(u) phi(v)] is a function of two variances and theta = arccos(rho). In theta it is smooth up to
both ends, where in rho it is not, so a short Chebyshev series is exact to rounding. Where all kinks are at 0 it is
analytic in the logarithms of the variances, too: some twenty Chebyshev nodes cover a range of them, and the matrix of
node values that belongs to a degree is cut to its numerical rank. A kink off 0 makes a cone at (q1 = q2, rho = 1),
around which no polynomial converges: such activations have a series for one variance only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from .activations import Activation
from .quadrature import CPU, LARGEST, pair_integrals

_ROUNDING = 1e-15  # of coefficients, relative to the largest


Block = Callable[[slice, slice, Tensor, Tensor], tuple[Tensor, Tensor]]


def interpolant(
    activation: Activation, q1: Tensor, q2: Tensor, angles: tuple[float, float] = (0.0, math.pi)
) -> Block | None:
    """Return a function of pairs of these variances and angles; None where none is exact to 1e-13.

    It maps a block of rows and columns, with correlations rho = cos(angle), to covariance / sqrt(q1 q2) and
    E[phi' phi'].
    """
    values = torch.cat([q1, q2]).unique()
    nodes = values if len(values) == 1 else variance_nodes(activation, values)
    fit = None if nodes is None else _fit(activation, tuple(nodes.tolist()))
    if nodes is None or fit is None:
        return None
    weights = [torch.ones_like(q)[:, None] if len(nodes) == 1 else interpolation(nodes, q) for q in (q1, q2)]
    middle, half = (angles[0] + angles[1]) / 2, max((angles[1] - angles[0]) / 2, 1e-3)
    factors = [_factors(f, weights[0], weights[1]) for f in _narrowed(fit, middle, half)]

    def block(rows: slice, columns: slice, rho: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
        t, functions = (angle - middle) / half, []
        for terms in factors:
            older, newer = torch.zeros_like(t), torch.zeros_like(t)
            for degree in range(len(terms) - 1, -1, -1):  # Clenshaw
                left, right = terms[degree]
                step = torch.addmm(older, left[rows], right[:, columns], beta=-1)
                older, newer = newer, step.addcmul_(newer, t, value=2.0 if degree else 1.0)
            functions.append(newer)
        return functions[0] * rho, functions[1]

    return block


def variance_nodes(activation: Activation, q: Tensor) -> Tensor | None:
    """Return variances from which Gaussian moments of phi are interpolated to all of q; None if there are none."""
    least, most = float(q.min()), float(q.max())
    if set(activation.kinks) - {0.0} or most > LARGEST:
        return None
    # rounded outwards to powers of 4, so that the layers of a network share them
    low, high = math.floor(math.log(least, 4)), math.ceil(math.log(most, 4) + 1e-9)
    middle, half = (high + low) / 2 * math.log(4), (high - low) / 2 * math.log(4)
    # moments are analytic for |Im log q| < pi: the ellipse in that strip gives the number of nodes for 14 digits
    count = 2 + math.ceil(32 / math.log((math.pi + math.hypot(math.pi, half)) / half))
    return None if count > 48 else torch.exp(middle + half * _nodes(count))


def interpolation(nodes: Tensor, q: Tensor) -> Tensor:
    """Return the (q, nodes) matrix from values at `variance_nodes` to values at q (barycentric, in log q)."""
    unit, log = _nodes(len(nodes)), torch.log(nodes)
    half = (log[0] - log[-1]) / (unit[0] - unit[-1])
    sign = torch.cos(torch.arange(len(nodes), device=CPU) * math.pi) * torch.sqrt(1 - unit**2)
    x = (torch.log(q.to(CPU))[:, None] - (log[0] + log[-1]) / 2) / half - unit
    ratio = sign / torch.where(x.abs() < 1e-15, 1e-15, x)
    return (ratio / ratio.sum(1, keepdim=True)).to(q.device)


def _factors(fit: Tensor, left: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return (rows, rank) and (rank, columns) for each degree: node values, cut to their rank and interpolated."""
    u, s, v = torch.linalg.svd(fit)
    least = _ROUNDING * float(s.max())
    factors = []
    for degree in range(int((s[:, 0] > least).nonzero().max()) + 1):
        rank = max(1, int((s[degree] > least).sum()))
        factors.append((left.to(CPU) @ u[degree, :, :rank] * s[degree, :rank], v[degree, :rank] @ right.to(CPU).T))
    return [(a.to(left.device), b.contiguous().to(left.device)) for a, b in factors]


def _narrowed(fit: Tensor, middle: float, half: float) -> Tensor:
    """Re-expand Chebyshev coefficients on [0, pi] for a narrower interval, where fewer degrees count."""
    degrees = torch.arange(fit.shape[1], dtype=torch.float64, device=CPU)
    theta = (middle + half * _nodes(fit.shape[1])).clamp(0.0, math.pi)
    values = torch.cos(torch.acos(theta * (2 / math.pi) - 1)[:, None] * degrees)
    return torch.einsum("ed,vdab->veab", _transform(fit.shape[1]) @ values, fit)


@lru_cache(maxsize=128)
def _fit(activation: Activation, variances: tuple[float, ...]) -> Tensor | None:
    """Return Chebyshev coefficients in theta between all pairs of variances, (2, degrees, variances, variances)."""
    q = torch.tensor(variances, dtype=torch.float64, device=CPU)
    scale = torch.sqrt(q)[:, None] * torch.sqrt(q)
    for count in (48, 96, 192) if max(variances) <= 4 else (96, 192):  # degrees grow with the variance
        samples = torch.empty(count, 2, len(q), len(q), dtype=torch.float64, device=CPU)
        for i, theta in enumerate(((_nodes(count) + 1) * (math.pi / 2)).tolist()):
            covariance_over_rho, slope = pair_integrals(activation, q, q, theta)
            samples[i, 0], samples[i, 1] = covariance_over_rho / scale, slope
        fit = torch.einsum("dt,tvab->vdab", _transform(count), samples)
        size = (fit.abs().amax((2, 3)) / fit.abs().amax((1, 2, 3))[:, None]).amax(0)
        if float(size[-8:].max()) < 1e-13:
            return fit[:, : int((size > 4 * _ROUNDING).nonzero().max()) + 1].contiguous()
    return None


def _nodes(count: int) -> Tensor:
    return torch.cos((torch.arange(count, dtype=torch.float64, device=CPU) + 0.5) * (math.pi / count))


@lru_cache(maxsize=64)
def _transform(count: int) -> Tensor:
    """Return the matrix from values at Chebyshev nodes to coefficients."""
    # whole numbers of steps, since the rounding of d * theta would be noise in the coefficients
    turns = torch.arange(count, device=CPU)[:, None] * (2 * torch.arange(count, device=CPU) + 1) % (4 * count)
    transform = torch.cos(turns.double() * (math.pi / 2 / count)) * (2 / count)
    transform[0] /= 2
    return transform
