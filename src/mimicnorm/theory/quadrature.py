"""Gaussian expectations E[f(s z)], z ~ N(0, 1), to float64 accuracy for functions with kinks.

Gauss-Hermite converges only algebraically at a kink. Gauss-Legendre on panels that end at the kinks keeps every piece
analytic, and panels that shrink towards the kinks keep it so when the scale s is large and the interesting part of f
occupies a sliver of the z axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

RANGE = 12.0  # the density at 12 is 2e-32: beyond double precision for any activation of polynomial growth
CPU = torch.device("cpu")  # named everywhere: a caller's `with torch.device(...)` must not reach in


def normal_nodes(kinks: Iterable[float] = (), scale: float | np.ndarray = 1.0) -> tuple[Tensor, Tensor]:
    """Return nodes z and weights w with sum(w f(scale z)) = E[f(scale z)], z ~ N(0, 1), one row per scale.

    Args:
        kinks: where f, or one of its derivatives, jumps (in f's own argument, not in z).
        scale: the standard deviation of f's argument, one or several.

    Example:
        >>> z, w = normal_nodes(kinks=(0.0,))
        >>> round(float((w * z.relu()).sum()), 12)  # 1 / sqrt(2 pi)
        0.398942280401
    """
    return gaussian_panels(breakpoints(kinks, scale))


def breakpoints(kinks: Iterable[float], scale: float | np.ndarray) -> np.ndarray:
    """Place panel ends on the z axis: unit steps, and geometric ones around 0 and the kinks of f(scale z)."""
    scale = np.asarray(scale, dtype=float)
    steps = 2.0 ** np.arange(-1, 2 + math.ceil(math.log2(RANGE * max(scale.max(), 1.0))))
    ladder = np.concatenate([-steps[::-1], [0.0], steps])
    around = (np.array(sorted({0.0, *map(float, kinks)}))[:, None] + ladder).ravel() / scale[..., None]
    grid = np.broadcast_to(np.arange(-RANGE, RANGE + 1), (*scale.shape, int(2 * RANGE) + 1))
    ends = np.sort(np.clip(np.concatenate([grid, around], -1), -RANGE, RANGE), -1)
    return ends if scale.ndim else np.unique(ends)


def gaussian_panels(ends: np.ndarray, count: int = 20) -> tuple[Tensor, Tensor]:
    """Return Gauss-Legendre nodes on the panels between ascending ends, and weights with the Gaussian density."""
    z, w = panels(ends, count)
    return z, w * torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def panels(ends: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Return Gauss-Legendre nodes and weights on the panels between ascending ends."""
    unit, weight = _legendre(count)
    half = np.diff(ends)[..., None] / 2
    shape = (*ends.shape[:-1], -1)
    nodes, weights = ends[..., :-1, None] + half + half * unit, half * weight
    return torch.from_numpy(nodes.reshape(shape)), torch.from_numpy(weights.reshape(shape))


@lru_cache(maxsize=8)
def _legendre(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(count)
