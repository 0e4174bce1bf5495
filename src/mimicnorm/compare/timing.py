"""Time per step, interleaved: other work of the machine slows every method equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from mimicnorm.compare.intervals import median

LEAST_ROUNDS = 6  # an interval of 95 % needs six


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    budget: float = 60.0,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each step, one per round; every round runs all of them, each time beginning with another.

    Args:
        steps: What to time, by name; each returns when its work is done.
        rounds: How many rounds.
        budget: Seconds after which to stop, but not before six rounds.
        warmup: Rounds that are not counted.
        clock: What is read before and after a step: ``time.process_time`` leaves out what other processes take.

    Example:
        >>> seconds = interleaved({"a": lambda: sum(range(9)), "b": lambda: None}, rounds=5)
        >>> sorted(seconds), len(seconds["a"])
        (['a', 'b'], 5)
    """
    names, seconds = list(steps), {name: [] for name in steps}
    begun = time.perf_counter()
    for turn in range(warmup + rounds):
        if turn - warmup >= LEAST_ROUNDS and time.perf_counter() - begun > budget:
            break
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            start = clock()
            steps[name]()
            taken = clock() - start
            if turn >= warmup:
                seconds[name].append(taken)
    return seconds


def summary(seconds: Mapping[str, list[float]], to: str) -> dict[str, dict[str, Any]]:
    """For each name: median and least seconds, and the median over the rounds of its ratio to ``to``.

    Example:
        >>> summary({"a": [1.0, 3.0], "b": [2.0, 6.0]}, "a")["b"]["ratio"]
        {'value': 2.0, 'low': 2.0, 'high': 2.0}
    """
    return {
        name: {
            "seconds": statistics.median(values),
            "least_seconds": min(values),
            "rounds": len(values),
            "ratio": median([v / first for v, first in zip(values, seconds[to], strict=True)])._asdict(),
        }
        for name, values in seconds.items()
    }
