"""How sure a comparison is: intervals for medians of ratios and for differences of means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A value with the interval that holds the true one with 95 % confidence."""

    value: float
    low: float
    high: float


def median(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Return the median, between the two order statistics that enclose the true one whatever the distribution.

    With fewer than six values no two of them reach 95 %: the interval is then the whole range.

    Example:
        >>> median([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 90.0])
        Estimate(value=4.0, low=1.0, high=90.0)
    """
    from scipy.stats import binom

    ordered = sorted(values)
    cut = max(int(binom.ppf((1 - confidence) / 2, len(values), 0.5)) - 1, 0)
    return Estimate(statistics.median(ordered), ordered[cut], ordered[-1 - cut])


def difference(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> Estimate | None:
    """Return the difference of the means, a - b, by Welch's t; None with fewer than two values on either side.

    Example:
        >>> difference([3.0, 4.0, 5.0], [1.0, 2.0, 3.0]).value
        2.0
    """
    from scipy.stats import t

    if min(len(a), len(b)) < 2:
        return None
    shares = [statistics.variance(v) / len(v) for v in (a, b)]
    value, error = statistics.mean(a) - statistics.mean(b), math.sqrt(sum(shares))
    if error == 0:
        return Estimate(value, value, value)
    freedom = sum(shares) ** 2 / sum(s**2 / (len(v) - 1) for s, v in zip(shares, (a, b), strict=True))
    reach = float(t.ppf((1 + confidence) / 2, freedom)) * error
    return Estimate(value, value - reach, value + reach)
