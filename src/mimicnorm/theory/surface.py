"""Duals of millions of pairs of unequal variance, for activations without a closed form.

For one activation the dual is a function of two variances and a correlation. Where all kinks are at 0 it is analytic
in (log q1, log q2, theta = arccos rho), so a Chebyshev interpolant through a few thousand exact values holds it to
rounding, and evaluating that for all pairs is a matrix product per degree in theta. A kink off 0 makes a cone at (q1 =
q2, rho = 1), around which no polynomial converges: such activations have none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .activations import Activation
from .quadrature import CPU, breakpoints, gauss_panels, normal_nodes
from .series import LARGEST, hermite, low_order

_ANGLES = 96


@dataclass(frozen=True)
class Surface:
    """Covariance over (sqrt(q1 q2) rho), and slope, of all pairs of two lists of variances.

    Attributes:
        fit: coefficients, (2, degrees in theta, nodes, nodes).
        left: what carries values at the nodes to each variance of the rows, (rows, nodes).
        right: the same for the columns.
    """

    fit: Tensor
    left: Tensor
    right: Tensor

    def __call__(self, rows: slice, columns: slice, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Return covariance / sqrt(q1 q2) and slope of a block of pairs with correlations rho."""
        t, right = torch.acos(rho) * (2 / math.pi) - 1, self.right[columns].T
        found = []
        for fit in self.fit:
            first, *rest = self.left[rows] @ fit
            older, newer = torch.zeros_like(rho), torch.zeros_like(rho)
            for c in reversed(rest):  # Clenshaw
                older, newer = newer, torch.addmm(older, c, right, beta=-1).addcmul_(newer, t, value=2)
            found.append(torch.addmm(older, first, right, beta=-1).addcmul_(newer, t))
        return found[0] * rho, found[1]


def surface(activation: Activation, q1: Tensor, q2: Tensor) -> Surface | None:
    """Return the interpolant for pairs of these variances; None where there is none of full accuracy."""
    least, most = float(torch.minimum(q1.min(), q2.min())), float(torch.maximum(q1.max(), q2.max()))
    if set(activation.kinks) - {0.0} or most > LARGEST:
        return None
    # rounded outwards to powers of 4, so that the layers of a network share it
    low, high = math.floor(math.log(least, 4)) * math.log(4), math.ceil(math.log(most, 4) + 1e-9) * math.log(4)
    fit = _fit(activation, low, high)
    if fit is None:
        return None
    nodes = _nodes(fit.shape[-1]).to(q1.device)
    sign = torch.cos(torch.arange(len(nodes), device=q1.device) * math.pi) * torch.sqrt(1 - nodes**2)

    def weights(q: Tensor) -> Tensor:  # barycentric
        x = (2 * torch.log(q)[:, None] - low - high) / (high - low) - nodes
        ratio = sign / torch.where(x.abs() < 1e-15, 1e-15, x)
        return ratio / ratio.sum(1, keepdim=True)

    return Surface(fit.to(q1.device), weights(q1), weights(q2))


@lru_cache(maxsize=64)
def _fit(activation: Activation, low: float, high: float) -> Tensor | None:
    # the dual is analytic for |Im log q| < pi: the ellipse in that strip tells how many nodes give 14 digits
    half = (high - low) / 2
    count = 2 + math.ceil(32 / math.log((math.pi + math.hypot(math.pi, half)) / half))
    if count > 48:
        return None
    q = torch.exp((low + high) / 2 + half * _nodes(count))
    theta = (_nodes(_ANGLES) + 1) * (math.pi / 2)
    samples = _by_series(activation, q, theta)
    if samples is None:
        samples = _by_sectors(activation, q, theta)
    # whole numbers of steps, since the rounding of d * theta would be noise in the coefficients
    turns = torch.arange(_ANGLES)[:, None] * (2 * torch.arange(_ANGLES) + 1) % (4 * _ANGLES)
    transform = torch.cos(turns.double() * (math.pi / 2 / _ANGLES)) * (2 / _ANGLES)
    transform[0] /= 2
    fit = torch.einsum("dt,vabt->vdab", transform.to(CPU), samples)
    size = (fit.abs().amax((2, 3)) / fit.abs().amax((1, 2, 3))[:, None]).amax(0)
    kept = int((size > 4e-15).nonzero().max()) + 1
    return fit[:, :kept].contiguous() if float(size[-8:].max()) < 1e-13 else None


def _nodes(count: int) -> Tensor:
    return torch.cos((torch.arange(count, dtype=torch.float64, device=CPU) + 0.5) * (math.pi / count))


def _by_series(activation: Activation, q: Tensor, theta: Tensor) -> Tensor | None:
    a = hermite(activation, q)
    if a is None:
        return None
    order = torch.arange(1, a.shape[1], dtype=torch.float64, device=CPU)
    powers = torch.cos(theta)[:, None] ** (order - 1)
    scaled = a[:, 1:] / torch.sqrt(q)[:, None]
    return torch.stack([torch.einsum("ak,bk,tk->abt", scaled, scaled * n, powers) for n in (order**0, order)])


def _by_sectors(activation: Activation, q: Tensor, theta: Tensor) -> Tensor:
    """Integrate in polar coordinates over the four sectors that the lines u = 0 and v = 0 leave."""
    z, w = normal_nodes((0.0,), math.sqrt(float(q.max())))
    ends = breakpoints((0.0,), math.sqrt(float(q.max())))
    radius, dr = gauss_panels(ends[(ends >= 0) & (ends <= 10)], 12)
    ring = dr * radius * torch.exp(-(radius**2) / 2) / (2 * math.pi)
    scale = torch.sqrt(q)
    mean = torch.stack([(w * activation(s * z).detach()).sum() for s in scale])
    few = low_order(activation, q)
    found = torch.empty(2, len(q), len(q), len(theta), dtype=torch.float64, device=CPU)
    for i, t in enumerate(theta.tolist()):
        angle, da = gauss_panels(np.array([-math.pi, 2 * t - math.pi, math.pi, 2 * t + math.pi, 3 * math.pi]) / 2, 32)
        measure = (da[:, None] * ring).flatten()
        sides = []
        for c in (torch.cos(angle), torch.cos(angle - t)):
            x = scale[:, None] * (c[:, None] * radius).flatten()
            sides.append((activation(x).detach() - mean[:, None], activation.derivative(x)))
        (u, du), (v, dv) = sides
        rho = math.cos(t)
        near_zero = few[:, None] * few * rho ** torch.arange(few.shape[1], dtype=torch.float64)
        value = near_zero.sum(-1) if abs(rho) < 0.03 else (u * measure) @ v.T / rho
        found[0, :, :, i] = value / (scale[:, None] * scale)
        found[1, :, :, i] = (du * measure) @ dv.T
    return found
