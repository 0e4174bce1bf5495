"""The sentence on top of the page: what it says of made-up results."""

from __future__ import annotations

import pytest
from sample import comparison

from mimicnorm.report.conclusion import conclusions


def said(**changes):
    """What is said of the second of two methods, with some of its entries changed."""
    data = comparison()
    data["methods"] = data["methods"][:2]
    data["methods"][1] |= {"label": "b", "memory": None, "time": None, "accuracy": None} | changes
    return conclusions(data)


def accuracy(low, value, high, **more):
    difference = None if low is None else {"value": value / 100, "low": low / 100, "high": high / 100}
    return {"mean": 0.92 + value / 100, "sd": 0.01, "runs": 2, "diverged": 0, "difference": difference} | more


def test_the_sentence_of_the_sample():
    first, *others = conclusions(comparison())
    assert first == (
        "mimicnorm+residual=<linear> against batchnorm: accuracy undecided (+2.5 points [-2.1, +7.1]), "
        "52 % less memory saved for backward, 9 % less time per step."
    )
    assert others == ["nonorm against batchnorm: 2 of 2 runs diverged."]  # nothing is known of fixup
    data = comparison()
    data["methods"][0], data["methods"][2] = data["methods"][2], data["methods"][0]
    assert conclusions(data)[0].startswith("mimicnorm+residual=<linear> against nonorm: nonorm: 2 of 2 runs diverged, ")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((-0.9, 0.1, 1.1), "same accuracy within noise (+0.1 points [-0.9, +1.1])"),
        ((-2.6, -0.8, 1.1), "accuracy undecided (-0.8 points [-2.6, +1.1])"),
        ((0.2, 2.7, 5.2), "higher accuracy (+2.7 points [+0.2, +5.2])"),
        ((-2.0, -1.2, -0.4), "lower accuracy (-1.2 points [-2.0, -0.4])"),
        ((None, -11.0, None), "accuracy undecided (-11.0 points, too few seeds for an interval)"),
    ],
)
def test_accuracy(numbers, expected):
    assert said(accuracy=accuracy(*numbers)) == [f"b against batchnorm: {expected}."]


def timed(low, value, high):
    return {"seconds": 1.0, "rounds": 20, "ratio": {"value": value, "low": low, "high": high}}


@pytest.mark.parametrize(
    ("quantity", "measured", "expected"),
    [
        ("memory", {"saved_ratio": 0.47}, "53 % less memory saved for backward"),
        ("memory", {"saved_ratio": 1.244}, "24 % more memory saved for backward"),
        ("memory", {"saved_ratio": 1.004}, "same memory"),
        ("time", timed(0.97, 0.99, 1.01), "same speed within noise"),
        ("time", timed(0.90, 0.91, 0.92), "9 % less time per step"),
        ("time", timed(1.10, 1.12, 1.15), "12 % more time per step"),
    ],
)
def test_memory_and_time(quantity, measured, expected):
    assert said(**{quantity: measured}) == [f"b against batchnorm: {expected}."]


def test_divergence_is_said_before_the_accuracy_of_the_other_runs():
    runs = comparison()["methods"][0]["runs"]
    (sentence,) = said(accuracy=accuracy(-0.5, 0.1, 0.7, diverged=1), runs=[*runs, runs[0] | {"status": "diverged"}])
    assert "b against batchnorm: 1 of 3 runs diverged, same accuracy within noise" in sentence
    assert said() == []
