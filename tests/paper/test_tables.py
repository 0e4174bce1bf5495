import dataclasses

import pytest
from made_runs import run

from mimicnorm.paper import ITEMS, SCALES
from mimicnorm.paper.published import TABLE1, TABLE3
from mimicnorm.paper.tables import accuracies, by_rate, curves

RUNS = {
    "a": run("vgg16", "mimicnorm", [0.1, 0.3]),
    "b": run("vgg16", "mimicnorm", [0.2, 0.4]),
    "c": run("vgg16", "nonorm", [], "diverged", lr=0.2),
    "d": run("vgg16", "nonorm", [0.5], "diverged", lr=0.5),
}


def test_accuracies_count_what_diverged_and_rates_have_the_best_epoch():
    ours, none = accuracies(RUNS)
    assert ours["top1"] == pytest.approx([30, 40])
    assert (none["top1"], none["diverged"]) == ([], 2)
    assert by_rate(RUNS) == [{"lr": 0.1, "mimicnorm": 40.0}, {"lr": 0.2, "nonorm": 1.0}, {"lr": 0.5, "nonorm": 50.0}]


def test_a_run_that_diverged_counts_as_guessing_from_there_on():
    ours, none = curves(
        {**RUNS, "b": run("vgg16", "mimicnorm", [0.2, 0.4, 0.5]), "a": run("vgg16", "mimicnorm", [0.1] * 3)}
    )
    assert ours["top1"] == pytest.approx([15, 25, 30])
    assert ours["final"] == pytest.approx([10, 50])
    assert none["top1"] == pytest.approx([(1 + 50) / 2, 1, 1])
    assert none["diverged"] == 2


def test_ablations_and_table1_share_their_runs():
    keys = {name: {r.key() for r in item.recipes(SCALES["desk"], {}).values()} for name, item in ITEMS.items()}
    cells = sum(len(TABLE1[n]) * len(SCALES["desk"].seeds_of(n)) for n in TABLE1)
    assert len(keys["table1"]) == cells
    assert len(keys["table2"]) == 28
    assert len(keys["figure-vgg-ablation"] & keys["table1"]) == 3 * 2  # BatchNorm, MimicNorm, no norm
    assert len(keys["figure-resnet-ablation"] & keys["table1"]) == 3 * 3 + 3 * 2  # and Fixup instead of no norm


def test_paper_scale_is_the_papers_recipe():
    recipes = ITEMS["table1"].recipes(SCALES["paper"], {})
    chosen = recipes["cifar100 resnet50 mimicnorm seed 2"]
    assert (chosen.epochs, chosen.batch, chosen.width, chosen.limit) == (150, 128, 1.0, 0)
    assert dataclasses.asdict(chosen)["milestones"] == (80 / 150, 110 / 150, 135 / 150)
    assert {r.model for r in ITEMS["table3"].recipes(SCALES["paper"], {}).values()} == set(TABLE3)


@pytest.mark.parametrize("scale", SCALES)
def test_the_papers_items_have_the_settings_of_the_paper(scale):
    for name, item in ITEMS.items():
        for label, recipe in item.recipes(SCALES[scale], {}).items():
            recipe.check_names()
            if recipe.method in ("mimicnorm", "last-bn"):
                scaled = "logit_scale=false" in recipe.resolved().settings
                assert scaled == (name != "parity"), label
            if recipe.method in ("mimicnorm", "weight-mean") and name != "parity" and "depthwise" not in label:
                assert recipe.configured_method().min_fan_in == int(50 * recipe.width), label
