"""Verdicts are pure functions: tables of numbers and what they mean."""

import pytest

from mimicnorm.paper.verdicts import (
    DIRECTION,
    FAILS,
    HOLDS,
    UNDECIDED,
    Judgement,
    at_desk,
    at_least,
    below_all,
    every,
    of,
)


def row(top1, diverged=0):
    return {"top1": top1, "diverged": diverged}


CLOSE = row([70.0, 70.2, 70.1])


@pytest.mark.parametrize(
    ("ours", "diverged", "expected"),
    [
        ([70.1, 70.2, 70.0], 0, HOLDS),
        ([72.0, 72.1, 72.2], 0, HOLDS),
        ([66.0, 66.1, 66.2], 0, FAILS),
        ([60.0, 80.0, 70.0], 0, UNDECIDED),  # an interval that says nothing
        ([69.0, 69.2, 69.1], 0, UNDECIDED),  # one that the margin is in
        ([70.1], 0, UNDECIDED),
        ([70.1, 70.2], 1, FAILS),
    ],
)
def test_at_least(ours, diverged, expected):
    assert at_least("claim", row(ours, diverged), CLOSE, -1.0).verdict == expected


@pytest.mark.parametrize(("ours", "expected"), [([69.5], HOLDS), ([68.0], FAILS), ([], UNDECIDED)])
def test_one_run_each_is_judged_by_its_numbers(ours, expected):
    assert at_least("claim", row(ours), row([70.0]), -1.0, single=True).verdict == expected


@pytest.mark.parametrize(
    ("low", "diverged", "expected"),
    [
        ([60.0, 60.1, 60.2], 0, HOLDS),
        ([80.0, 80.1, 80.2], 0, FAILS),
        ([70.0, 70.1, 70.2], 0, UNDECIDED),
        ([], 3, HOLDS),
        ([], 0, UNDECIDED),
        ([60.0], 0, UNDECIDED),
    ],
)
def test_below_all(low, diverged, expected):
    assert below_all("claim", row(low, diverged), CLOSE, CLOSE).verdict == expected


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ({"a": [1.0], "b": [2.0]}, Judgement("c", HOLDS, "a: 1; b: 2")),
        ({"a": [1.0], "b": of({"x": 20_000.0}, "x")}, Judgement("c", FAILS, "not at b: 20,000")),
        ({"a": of({}, "x")}, Judgement("c", UNDECIDED, "runs are missing")),
        ({}, Judgement("c", UNDECIDED, "runs are missing")),
    ],
)
def test_every(cases, expected):
    assert every("c", cases, lambda x: x < 3) == expected


def test_desk_scale_confirms_no_more_than_a_direction():
    assert [at_desk(Judgement("c", v, "")).verdict for v in (HOLDS, FAILS)] == [DIRECTION, FAILS]
