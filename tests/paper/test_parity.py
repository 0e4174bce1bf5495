import pytest
from made_runs import run

from mimicnorm.paper import SCALES, parity

DESK = SCALES["desk"]


def _searched(best):
    return {
        f"{method} {lr}": run("resnet18", method, [0.3 + 0.1 * (lr == best[method])], lr=lr, validation=0.1)
        for method in best
        for lr in parity.RATES
    }


def test_each_method_is_trained_at_its_own_best_rate():
    recipes = parity.search(DESK, {})
    assert len(recipes) == len(parity.SEEDS) * len(parity.RATES)
    assert all(r.validation == 0.1 and r.epochs == 10 for r in recipes.values())
    finals = parity.finals(DESK, _searched({"batchnorm": 0.2, "mimicnorm": 0.05}))
    rates = {(r.method, r.lr) for r in finals.values()}
    assert rates == {("batchnorm", 0.2), ("mimicnorm", 0.05)}
    assert len(finals) == 6
    assert all(r.validation == 0 and r.test_limit == 0 and r.limit == 25_000 for r in finals.values())


def test_one_rate_beyond_an_end_that_is_best_is_tried():
    runs = _searched({"batchnorm": 0.4, "mimicnorm": 0.1})
    assert {(r.method, r.lr) for r in parity.wider(DESK, runs).values()} == {("batchnorm", 0.8)}
    beyond = run("resnet18", "batchnorm", [0.9], lr=0.8, validation=0.1)
    assert parity.best_rates({**runs, "beyond": beyond})["cifar100", "batchnorm"] == 0.8
    assert len(parity.wider(DESK, {**runs, "beyond": beyond})) == 1  # the same stage again asks for the same run


def test_the_search_must_be_over_and_a_rate_that_diverges_is_not_the_best():
    runs = _searched({"batchnorm": 0.2})
    runs["batchnorm 0.2"]["status"] = "diverged"
    assert parity.best_rates(runs)["cifar100", "batchnorm"] != 0.2
    runs.popitem()
    assert parity.finals(DESK, runs) == {}


def test_rows_leave_the_search_out():
    runs = {**_searched({"mimicnorm": 0.1}), "final": run("resnet18", "mimicnorm", [0.2, 0.41])}
    (row,) = parity.rows(runs, None)
    assert row["top1"] == pytest.approx([41])
