"""Gaussian expectations to float64 accuracy, for functions with kinks: of one input, and of two correlated ones.

Gauss-Hermite converges only algebraically at a kink. Gauss-Legendre on panels that end at the kinks keeps every piece
analytic, and panels that shrink towards the kinks keep it so when the scale s of f(s z) is large and the interesting
part of f occupies a sliver of the z axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from .activations import Activation

RANGE = 12.0  # the density at 12 is 2e-32: beyond double precision for any activation of polynomial growth
LARGEST = 50.0  # variance up to which the nodes in polar coordinates resolve the activation
SMALL = 0.03  # below this correlation eleven Hermite terms are exact to rounding, kinks or not
Nodes = tuple[Tensor, Tensor]  # nodes and weights
CPU = torch.device("cpu")  # passed everywhere, so that a caller's `with torch.device(...)` has no effect


def normal_nodes(kinks: Iterable[float] = (), scale: float | np.ndarray = 1.0, count: int = 20) -> Nodes:
    """Return nodes z and weights w with sum(w f(scale z)) = E[f(scale z)], z ~ N(0, 1), one row per scale.

    Args:
        kinks: where f, or one of its derivatives, jumps, in the argument of f, not in z.
        scale: the standard deviation of f's argument, one or several.
        count: nodes per panel.

    Example:
        >>> z, w = normal_nodes(kinks=(0.0,))
        >>> round(float((w * z.relu()).sum()), 12)  # 1 / sqrt(2 pi)
        0.398942280401
    """
    return _gaussian_panels(_breakpoints(kinks, scale), count)


def _breakpoints(kinks: Iterable[float], scale: float | np.ndarray) -> np.ndarray:
    """Place panel ends on the z axis: unit steps, and geometric ones around 0 and the kinks of f(scale z)."""
    scale = np.asarray(scale, dtype=float)
    steps = 2.0 ** np.arange(-1, 2 + math.ceil(math.log2(RANGE * max(scale.max(), 1.0))))
    ladder = np.concatenate([-steps[::-1], [0.0], steps])
    around = (np.array(sorted({0.0, *map(float, kinks)}))[:, None] + ladder).ravel() / scale[..., None]
    grid = np.broadcast_to(np.arange(-RANGE, RANGE + 1), (*scale.shape, int(2 * RANGE) + 1))
    ends = np.sort(np.clip(np.concatenate([grid, around], -1), -RANGE, RANGE), -1)
    return ends if scale.ndim else np.unique(ends)


def _gaussian_panels(ends: np.ndarray, count: int) -> Nodes:
    """Return Gauss-Legendre nodes on the panels between ascending ends, and weights with the Gaussian density."""
    z, w = _panels(ends, count)
    return z, w * torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def _panels(ends: np.ndarray, count: int) -> Nodes:
    unit, weight = _legendre(count)
    half = np.diff(ends)[..., None] / 2
    shape = (*ends.shape[:-1], -1)
    nodes, weights = ends[..., :-1, None] + half + half * unit, half * weight
    return torch.from_numpy(nodes.reshape(shape)), torch.from_numpy(weights.reshape(shape))


@lru_cache(maxsize=8)
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(count)


class Moments(NamedTuple):
    """E[phi], E[phi^2], Var[phi] and E[phi'^2] of phi(sqrt(q) z), one per variance q."""

    mean: Tensor
    second: Tensor
    variance: Tensor
    slope: Tensor


def single_integrals(activation: Activation, q: Tensor) -> Moments:
    """Return the moments of phi at each variance in q."""
    scale = torch.sqrt(q)
    z, w = normal_nodes(activation.kinks, scale.numpy())
    phi, slope = activation.with_slope(scale[:, None] * z)
    mean = (w * phi).sum(-1)
    return Moments(mean, (w * phi**2).sum(-1), (w * (phi - mean[:, None]) ** 2).sum(-1), (w * slope**2).sum(-1))


def pair_integrals(activation: Activation, q1: Tensor, q2: Tensor, angle: float) -> tuple[Tensor, Tensor]:
    """Return cov(phi(u), phi(v)) / rho, which is finite at rho = 0, and E[phi'(u) phi'(v)].

    Args:
        activation: phi.
        q1: variances of u, (m,).
        q2: variances of v, (m2,).
        angle: arccos of rho, the correlation of u and v.

    Returns:
        Two matrices (m, m2), between all variances q1 and q2.
    """
    rho, a1, a2 = math.cos(angle), hermite(activation, q1), hermite(activation, q2)
    if set(activation.kinks) <= {0.0} and float(torch.cat([q1, q2]).max()) <= LARGEST:
        covariance, slope = _sectors(activation, (torch.sqrt(q1), torch.sqrt(q2)), (a1[:, 0], a2[:, 0]), angle)
    else:
        rows = [[following_kinks(activation, a, b, angle) for b in q2.tolist()] for a in q1.tolist()]
        value, slope = torch.tensor(rows, dtype=torch.float64, device=CPU).unbind(-1)
        covariance = value - a1[:, :1] * a2[:, 0]
    if abs(rho) >= SMALL:
        return covariance / rho, slope
    # relative accuracy, which the difference from the means has lost
    powers = rho ** torch.arange(a1.shape[1] - 1, dtype=torch.float64, device=CPU)
    return (a1[:, 1:] * powers) @ a2[:, 1:].T, slope


def hermite(activation: Activation, q: Tensor) -> Tensor:
    """Return coefficients 0 to 11 of phi(sqrt(q) z) in normalised Hermite polynomials, (m, 12); the first is its mean.

    The covariance of phi(u) and phi(v) is the sum over k > 0 of a_k(q1) a_k(q2) rho^k.
    """
    scale = torch.sqrt(q)
    z, w = normal_nodes(activation.kinks, scale.numpy())
    polynomials = [torch.ones_like(z), z]
    for k in range(1, 11):
        polynomials.append((z * polynomials[k] - math.sqrt(k) * polynomials[k - 1]) / math.sqrt(k + 1))
    return (torch.stack(polynomials, -1) * (w * activation(scale[:, None] * z).detach())[..., None]).sum(1)


def _sectors(
    activation: Activation, scales: tuple[Tensor, Tensor], means: tuple[Tensor, Tensor], angle: float
) -> tuple[Tensor, Tensor]:
    """Integrate in polar coordinates over the four sectors that the lines u = 0 and v = 0 leave."""
    most = float(torch.cat(scales).max())
    ends = _breakpoints((0.0,), most)
    radius, ring = _panels(ends[(ends >= 0) & (ends <= 10)], 12)
    ring = ring * radius * torch.exp(-(radius**2) / 2) / (2 * math.pi)
    corners = np.array([-math.pi, 2 * angle - math.pi, math.pi, 2 * angle + math.pi, 3 * math.pi]) / 2
    # a steep phi bends within 1/scale of a sector's ends: 32 nodes would leave tanh 2e-7 off at variance 45
    around, step = _panels(corners, min(64, 32 + 8 * math.ceil(2 * math.log2(max(1.0, most)))))
    sides = []
    for scale, mean, direction in zip(scales, means, (around, around - angle), strict=True):
        x = scale[:, None] * (torch.cos(direction)[:, None] * radius).flatten()
        phi, slope = activation.with_slope(x)
        sides.append((phi - mean[:, None], slope))
    (u, du), (v, dv) = sides
    measure = (step[:, None] * ring).flatten()
    return (u * measure) @ v.T, (du * measure) @ dv.T


def following_kinks(activation: Activation, q1: float, q2: float, angle: float) -> tuple[float, float]:
    """Return E[phi(u) phi(v)] and E[phi'(u) phi'(v)] of one pair, for any kinks and variances.

    Integrates over u = s1 z1, v = s2 (rho z1 + r z2), the inner panels ending where v meets a kink.
    """
    s1, s2, rho, r = math.sqrt(q1), math.sqrt(q2), math.cos(angle), math.sin(angle)
    centres = np.array(sorted({0.0, *activation.kinks}))
    grid = np.arange(-9.0, 9.5, 1.5)

    def ladder(s: float) -> np.ndarray:
        # at s <= 1 the grid resolves features of unit size by itself; kinks must be panel ends at any s
        steps = 2.0 ** np.arange(-1, math.ceil(math.log2(s)) + 3) if s > 1 else np.array([])
        return np.concatenate([-steps[::-1], [0.0], steps])

    def nodes(*ends: np.ndarray) -> Nodes:
        return _gaussian_panels(np.sort(np.clip(np.concatenate(ends, -1), -9.0, 9.0), -1), 14)

    around = (centres[:, None] + ladder(s2)).ravel() / s2
    ends = [grid, (centres[:, None] + ladder(s1)).ravel() / s1]
    if abs(rho) > 1e-3:
        # where rho is close to 1, the inner mean bends within r of each kink
        bends = r * np.concatenate([[h, -h] for h in 2.0 ** np.arange(-1, 5)])
        ends += [around / rho, (centres[:, None] / s2 + bends).ravel() / rho]
    z1, w1 = nodes(*ends)
    inner = (around - rho * z1.numpy()[:, None]) / max(r, 1e-300)
    z2, w2 = nodes(np.broadcast_to(grid, (len(inner), len(grid))), inner)
    of_u = activation.with_slope(s1 * z1)
    of_v = activation.with_slope(s2 * (rho * z1[:, None] + r * z2))
    value, slope = (float((w1 * a * (w2 * b).sum(1)).sum()) for a, b in zip(of_u, of_v, strict=True))
    return value, slope
