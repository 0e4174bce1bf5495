"""Duals of millions of pairs of unequal variance, for activations without a closed form.

For one activation the dual is a function of two variances and a correlation. Where all kinks are at 0 it is
analytic in (log q1, log q2, theta = arccos rho), so a Chebyshev interpolant through a few thousand exact
values holds it to rounding, and evaluating that for all pairs is a matrix product per degree in theta. A kink
off 0 makes a cone at (q1 = q2, rho = 1), around which no polynomial converges: such activations have none.
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
    """Covariance over (sqrt(q1 q2) rho), and slope, as coefficients (2, degrees in theta, nodes, nodes)."""

    low: float
    high: float
    fit: Tensor

    def weights(self, q: Tensor) -> Tensor:
        """Return what carries values at the nodes to each variance in q, shape (len(q), nodes)."""
        nodes = _nodes(self.fit.shape[-1]).to(q.device)
        x = (2 * torch.log(q)[:, None] - self.low - self.high) / (self.high - self.low) - nodes
        sign = torch.cos(torch.arange(len(nodes), device=q.device) * math.pi)
        ratio = sign * torch.sqrt(1 - nodes**2) / torch.where(x.abs() < 1e-15, 1e-15, x)  # barycentric
        return ratio / ratio.sum(1, keepdim=True)

    def __call__(self, left: Tensor, right: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
        """Return covariance / sqrt(q1 q2) and slope of all pairs of rows (weights `left`) and columns."""
        t = torch.acos(rho) * (2 / math.pi) - 1
        found = []
        for fit in self.fit.to(rho.device):
            first, *rest = left @ fit
            older, newer = torch.zeros_like(rho), torch.zeros_like(rho)
            for c in reversed(rest):  # Clenshaw
                older, newer = newer, torch.addmm(older, c, right.T, beta=-1).addcmul_(newer, t, value=2)
            found.append(torch.addmm(older, first, right.T, beta=-1).addcmul_(newer, t))
        return found[0] * rho, found[1]


def surface(activation: Activation, q: Tensor) -> Surface | None:
    """Return the interpolant for variances like those in q; None where there is none of full accuracy."""
    if set(activation.kinks) - {0.0} or float(q.max()) > LARGEST:
        return None
    # rounded outwards to powers of 4, so that the layers of a network share it
    low, high = math.floor(math.log(float(q.min()), 4)), math.ceil(math.log(float(q.max()), 4) + 1e-9)
    return _surface(activation, low * math.log(4), high * math.log(4))


@lru_cache(maxsize=64)
def _surface(activation: Activation, low: float, high: float) -> Surface | None:
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
    turns = (
        torch.arange(_ANGLES)[:, None] * (2 * torch.arange(_ANGLES) + 1) % (4 * _ANGLES)
    )  # exact, as cos(d t) is not
    transform = torch.cos(turns.double() * (math.pi / 2 / _ANGLES)) * (2 / _ANGLES)
    transform[0] /= 2
    fit = torch.einsum("dt,vabt->vdab", transform.to(CPU), samples)
    size = (fit.abs().amax((2, 3)) / fit.abs().amax((1, 2, 3))[:, None]).amax(0)
    kept = int((size > 4e-15).nonzero().max()) + 1
    return Surface(low, high, fit[:, :kept].contiguous()) if float(size[-8:].max()) < 1e-13 else None


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
        angle, da = gauss_panels(
            np.array([-0.5 * math.pi, t - 0.5 * math.pi, 0.5 * math.pi, t + 0.5 * math.pi, 1.5 * math.pi]), 32
        )
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
