from __future__ import annotations

import pytest

from mimicnorm.compare import timing
from mimicnorm.compare.timing import interleaved, summary


def test_every_round_runs_all_and_begins_with_another():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleaved(steps, rounds=3, warmup=1)
    assert "".join(order) == "abcbcacababc"
    assert [len(s) for s in seconds.values()] == [3, 3, 3]


def test_the_budget_ends_it_but_not_before_six_rounds():
    assert len(interleaved({"a": lambda: None}, rounds=50, budget=0.0, warmup=0)["a"]) == timing.LEAST_ROUNDS


def test_noise_that_slows_a_whole_round_leaves_the_ratio_alone():
    noise = [1.0, 7.0, 1.0, 30.0, 2.0, 1.0, 5.0, 1.0]
    found = summary({"a": [0.1 * n for n in noise], "b": [0.2 * n for n in noise]}, "a")
    assert found["b"]["ratio"] == pytest.approx({"value": 2.0, "low": 2.0, "high": 2.0})
    assert found["a"]["least_seconds"] == pytest.approx(0.1)
