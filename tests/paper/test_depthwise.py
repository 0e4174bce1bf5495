import dataclasses

from made_runs import run

from mimicnorm.paper import ITEMS, SCALES, depthwise
from mimicnorm.training.build import network
from mimicnorm.training.recipes import recipe


def test_two_of_three_runs_are_table_1s():
    ours, table1 = (ITEMS[item].recipes(SCALES["desk"], {}) for item in ("depthwise", "table1"))
    keys = {r.key() for r in table1.values()}
    assert [r.key() in keys for r in ours.values()] == [True, True, False] * 3


def test_rows_tell_the_ways_apart():
    runs = {
        "a": run("shufflenetv2", "mimicnorm", [0.3], settings=["logit_scale=false", "min_fan_in=12"]),
        "b": run("shufflenetv2", "mimicnorm", [0.4], settings=["logit_scale=false", "min_fan_in=1"]),
        "c": run("shufflenetv2", "mimicnorm", [], "diverged", settings=["logit_scale=false", "min_fan_in=1"]),
    }
    assert depthwise.rows(runs, None) == [
        {"way": "mimicnorm", "top1": [30.0], "diverged": 0},
        {"way": "mimicnorm, depthwise centred", "top1": [40.0], "diverged": 1},
    ]


def test_the_third_run_centres_depthwise_layers(source):
    made = [r for r in depthwise.recipes(SCALES["desk"], {}).values() if r.seed == 0]
    centred = []
    for chosen in made[1:]:
        small = dataclasses.replace(recipe("cifar100-shufflenetv2-desk"), settings=chosen.settings)
        layers = [m for m in network(small, source).modules() if getattr(m, "groups", 1) > 1]
        centred.append({type(layer).__name__ for layer in layers})
    assert centred == [{"Conv2d"}, {"WeightMeanConv2d"}]
