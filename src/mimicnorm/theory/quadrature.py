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
NODES_PER_PANEL = 20
CPU = torch.device("cpu")  # named everywhere: a caller's `with torch.device(...)` must not reach in


@lru_cache(maxsize=8)
def legendre(count: int = NODES_PER_PANEL) -> tuple[np.ndarray, np.ndarray]:
    """Return the Gauss-Legendre nodes and weights on [-1, 1]."""
    return np.polynomial.legendre.leggauss(count)


def breakpoints(kinks: Iterable[float], scale: float) -> np.ndarray:
    """Place panel ends on the z axis: unit steps, and geometric ones around 0 and the kinks of f(scale z)."""
    steps = 2.0 ** np.arange(-1, 2 + max(0, int(np.ceil(np.log2(RANGE * max(scale, 1.0))))))
    ladder = np.concatenate([-steps[::-1], [0.0], steps])
    centres = np.array(sorted({0.0, *map(float, kinks)}))
    ends = np.concatenate([np.arange(-RANGE, RANGE + 1), ((centres[:, None] + ladder) / scale).ravel()])
    ends = np.unique(ends[(ends >= -RANGE) & (ends <= RANGE)])
    return ends[np.concatenate([[True], np.diff(ends) > 1e-14])]


def normal_nodes(kinks: Iterable[float] = (), scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return nodes z and weights w with sum(w f(scale z)) = E[f(scale z)], z ~ N(0, 1).

    Args:
        kinks: where f, or one of its derivatives, jumps (in f's own argument, not in z).
        scale: the standard deviation of f's argument.

    Example:
        >>> z, w = normal_nodes(kinks=(0.0,))
        >>> round(float((w * z.relu()).sum()), 12)  # 1 / sqrt(2 pi)
        0.398942280401
    """
    z, width = gauss_panels(breakpoints(kinks, scale))
    return z, width * torch.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)


def gauss_panels(ends: np.ndarray, count: int = NODES_PER_PANEL) -> tuple[Tensor, Tensor]:
    """Return Gauss-Legendre nodes and weights on the panels between ascending ends."""
    unit, weight = legendre(count)
    half = np.diff(ends)[:, None] / 2
    nodes, weights = (ends[:-1, None] + half + half * unit).ravel(), (half * weight).ravel()
    return torch.tensor(nodes, device=CPU), torch.tensor(weights, device=CPU)
