"""Verdicts are pure functions: one table of measured rows and what they mean."""

import pytest

from mimicnorm.paper import ITEMS, judge
from mimicnorm.paper.published import TABLE1, TABLE2
from mimicnorm.paper.verdicts import DIRECTION, FAILS, HOLDS, NEEDS_GPUS, UNDECIDED


def _rows(method_runs, network="resnet18", diverged=None):
    diverged = diverged or {}
    return [
        {"network": network, "method": m, "top1": top1, "diverged": diverged.get(m, 0)}
        for m, top1 in method_runs.items()
    ]


CLOSE = [70.0, 70.2, 70.1]


@pytest.mark.parametrize(
    ("ours", "diverged", "expected"),
    [
        ([70.1, 70.2, 70.0], 0, HOLDS),
        ([72.0, 72.1, 72.2], 0, HOLDS),
        ([66.0, 66.1, 66.2], 0, FAILS),
        ([60.0, 80.0, 70.0], 0, UNDECIDED),  # an interval that says nothing
        ([70.1], 0, UNDECIDED),
        ([70.1, 70.2], 1, FAILS),
    ],
)
def test_within_noise_of_batch_norm(ours, diverged, expected):
    rows = _rows({"batchnorm": CLOSE, "mimicnorm": ours}, diverged={"mimicnorm": diverged})
    assert judge("table1", "paper", rows)[0].verdict == expected


def test_desk_scale_confirms_no_more_than_a_direction():
    rows = _rows({"batchnorm": CLOSE, "mimicnorm": CLOSE})
    assert judge("table1", "desk", rows)[0].verdict == DIRECTION


@pytest.mark.parametrize(
    ("fixup", "diverged", "expected"),
    [
        ([60.0, 60.1, 60.2], 0, HOLDS),
        ([80.0, 80.1, 80.2], 0, FAILS),
        ([70.0, 70.1, 70.2], 0, UNDECIDED),
        ([], 3, HOLDS),
        ([60.0], 0, UNDECIDED),
    ],
)
def test_fixup_below_both(fixup, diverged, expected):
    rows = _rows({"batchnorm": CLOSE, "mimicnorm": CLOSE, "fixup": fixup}, diverged={"fixup": diverged})
    judged = next(j for j in judge("table1", "paper", rows) if "Fixup" in j.claim)
    assert judged.verdict == expected


def test_the_papers_own_table2_by_these_rules():
    rows = [{"lr": lr, **cells} for lr, cells in TABLE2.items()]
    trains, ahead, faster = judge("table2", "paper", rows)
    assert [trains.verdict, ahead.verdict, faster.verdict] == [HOLDS, HOLDS, HOLDS]
    slower = [{**row, "mimicnorm": row["batchnorm"] - 1} if row["lr"] == 0.5 else row for row in rows]
    assert judge("table2", "paper", slower)[1].verdict == FAILS
    assert judge("table2", "paper", slower)[1].evidence.startswith("not at 0.5")
    assert judge("table2", "paper", [{"lr": 0.2, "nonorm": 1.0}])[0].verdict == UNDECIDED


def test_the_papers_own_table1_by_these_rules():
    """Three runs with the published mean and deviation; ResNet50's -0.62 is not within a point with certainty."""
    spread = {-1: -1.0, 0: 0.0, 1: 1.0}
    rows = [
        {"network": n, "method": m, "top1": [c.accuracy + s * c.deviation for s in spread.values()], "diverged": 0}
        for n, cells in TABLE1.items()
        for m, c in cells.items()
    ]
    verdicts = {j.claim: j.verdict for j in judge("table1", "paper", rows)}
    assert verdicts["resnet18: MimicNorm is within noise of BatchNorm"] == HOLDS
    assert verdicts["resnet50: MimicNorm is within noise of BatchNorm"] in (FAILS, UNDECIDED)
    assert {v for claim, v in verdicts.items() if "below both" in claim} == {HOLDS}


@pytest.mark.parametrize(
    ("network", "mean", "last", "order"),
    [
        ("resnet18", 30, 35, HOLDS),
        ("resnet18", 35, 30, FAILS),
        ("resnet50", 35, 30, HOLDS),
        ("resnet50", 30, 35, FAILS),
    ],
)
def test_ablations(network, mean, last, order):
    finals = {"mimicnorm": 40, "weight-mean": mean, "last-bn": last, "nonorm": 20}
    rows = [{"network": network, "method": m, "top1": [5.0, final / 2, final]} for m, final in finals.items()]
    both, early, which = judge("figure-resnet-ablation", "paper", rows)
    assert (both.verdict, early.verdict, which.verdict) == (HOLDS, HOLDS, order)


def test_a_curve_that_is_missing_leaves_a_claim_undecided():
    rows = [{"network": "vgg16", "method": "mimicnorm", "top1": [10.0, 20.0]}]
    assert {j.verdict for j in judge("figure-vgg-ablation", "paper", rows)} == {UNDECIDED}


@pytest.mark.parametrize("item", ITEMS)
def test_nothing_measured(item):
    assert judge(item, "desk", [])[0].verdict == (NEEDS_GPUS if item == "table3" else UNDECIDED)
