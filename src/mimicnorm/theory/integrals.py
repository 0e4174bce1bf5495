"""Double integrals for duals: covariance of phi(u), phi(v) and E[phi'(u) phi'(v)] when no series converges."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .activations import Activation
from .quadrature import breakpoints, gaussian_panels, panels
from .series import SMALL, low_order


def following_kinks(activation: Activation, q1: float, q2: float, rho: float) -> tuple[float, float]:
    """Integrate over u = s1 z1, v = s2 (rho z1 + r z2), the inner panels ending where v meets a kink."""
    s1, s2, r = math.sqrt(q1), math.sqrt(q2), math.sqrt((1 - rho) * (1 + rho))
    centres = np.array(sorted({0.0, *activation.kinks}))
    grid = np.arange(-9.0, 9.5, 1.5)

    def ladder(s: float) -> np.ndarray:
        # at s <= 1 the grid resolves features of unit size by itself; kinks must be panel ends at any s
        steps = 2.0 ** np.arange(-1, math.ceil(math.log2(s)) + 3) if s > 1 else np.array([])
        return np.concatenate([-steps[::-1], [0.0], steps])

    def nodes(*ends: np.ndarray) -> tuple[Tensor, Tensor]:
        return gaussian_panels(np.sort(np.clip(np.concatenate(ends, -1), -9.0, 9.0), -1), 14)

    around = (centres[:, None] + ladder(s2)).ravel() / s2
    ends = [grid, (centres[:, None] + ladder(s1)).ravel() / s1]
    if abs(rho) > 1e-3:
        # near rho = 1 the inner mean bends within r of each kink
        bends = r * np.concatenate([[h, -h] for h in 2.0 ** np.arange(-1, 5)])
        ends += [around / rho, (centres[:, None] / s2 + bends).ravel() / rho]
    z1, w1 = nodes(*ends)
    inner = (around - rho * z1.numpy()[:, None]) / max(r, 1e-300)
    z2, w2 = nodes(np.broadcast_to(grid, (len(inner), len(grid))), inner)
    u, v = s1 * z1, s2 * (rho * z1[:, None] + r * z2)
    value = (w1 * activation(u).detach() * (w2 * activation(v).detach()).sum(1)).sum()
    slope = (w1 * activation.derivative(u) * (w2 * activation.derivative(v)).sum(1)).sum()
    return float(value), float(slope)


def over_rho(activation: Activation, q: Tensor, mean: Tensor, theta: Tensor) -> Tensor:
    """Return covariance / rho and slope for all pairs of variances q at angles arccos(rho), (2, q, q, angles).

    Several variances need all kinks at 0.
    """
    few = low_order(activation, q)
    ring = _ring(math.sqrt(float(q.max())))
    found = torch.empty(2, len(q), len(q), len(theta), dtype=torch.float64, device=q.device)
    for i, t in enumerate(theta.tolist()):
        rho = math.cos(t)
        if set(activation.kinks) <= {0.0}:
            covariance, slope = _sectors(activation, torch.sqrt(q), mean, t, *ring)
        else:
            value, slope = following_kinks(activation, float(q), float(q), rho)
            covariance = value - mean**2
        near_zero = few[:, None] * few * rho ** torch.arange(few.shape[1], dtype=torch.float64)
        found[0, :, :, i] = near_zero.sum(-1) if abs(rho) < SMALL else covariance / rho
        found[1, :, :, i] = slope
    return found


def _ring(scale: float) -> tuple[Tensor, Tensor]:
    ends = breakpoints((0.0,), scale)
    radius, dr = panels(ends[(ends >= 0) & (ends <= 10)], 12)
    return radius, dr * radius * torch.exp(-(radius**2) / 2) / (2 * math.pi)


def _sectors(
    activation: Activation, scale: Tensor, mean: Tensor, theta: float, radius: Tensor, ring: Tensor
) -> tuple[Tensor, Tensor]:
    """Integrate in polar coordinates over the four sectors that the lines u = 0 and v = 0 leave."""
    corners = np.array([-math.pi, 2 * theta - math.pi, math.pi, 2 * theta + math.pi, 3 * math.pi]) / 2
    # a steep phi bends within 1/scale of a sector's ends: 32 nodes would leave tanh 2e-7 off at variance 45
    angle, da = panels(corners, min(64, 32 + 8 * math.ceil(2 * math.log2(max(1.0, float(scale.max()))))))
    measure = (da[:, None] * ring).flatten()
    sides = []
    for c in (torch.cos(angle), torch.cos(angle - theta)):
        x = scale[:, None] * (c[:, None] * radius).flatten()
        sides.append((activation(x).detach() - mean[:, None], activation.derivative(x)))
    (u, du), (v, dv) = sides
    return (u * measure) @ v.T, (du * measure) @ dv.T
