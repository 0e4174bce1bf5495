"""How sure a comparison is: intervals for medians of ratios and for differences of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Estimate(NamedTuple):
    """A value with the interval that holds the true one with 95 % confidence."""

    value: float
    low: float
    high: float


def median(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The median, between the two order statistics that enclose the true one whatever the distribution.

    With fewer than six values no two of them reach 95 %: the interval is then the whole range.

    Example:
        >>> median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 90.0])
        Estimate(value=4.0, low=1.0, high=90.0)
    """
    ordered, n = sorted(values), len(values)
    outside, cut = 0.0, 0  # the chance that the true median lies below the cut-th value, or as far above
    while cut < (n - 1) // 2 and outside + math.comb(n, cut) * 0.5**n <= (1 - confidence) / 2:
        outside += math.comb(n, cut) * 0.5**n
        cut += 1
    cut = max(0, cut - 1)
    return Estimate(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut])


def difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Estimate | None:
    """The difference of the means, a - b, by Welch's t; None with fewer than two values on either side.

    Example:
        >>> difference([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]).value
        2.0
    """
    if min(len(a), len(b)) < 2:
        return None
    shares = [statistics.variance(v) / len(v) for v in (a, b)]
    value, error = statistics.mean(a) - statistics.mean(b), math.sqrt(sum(shares))
    if error == 0:
        return Estimate(value, value, value)
    freedom = sum(shares) ** 2 / sum(s**2 / (len(v) - 1) for s, v in zip(shares, (a, b), strict=True))
    reach = student(confidence, freedom) * error
    return Estimate(value, value - reach, value + reach)


def student(confidence: float, freedom: float) -> float:
    """The t that encloses ``confidence`` of Student's distribution, with t = sqrt(freedom) tan(angle).

    Example:
        >>> round(student(0.95, 4), 3)
        2.776
    """
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(confidence * mass[-1], mass, angles)))
