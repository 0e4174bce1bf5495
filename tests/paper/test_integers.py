import dataclasses

from made_runs import run

from mimicnorm.paper import SCALES, integers


def test_integers_and_fp32_differ_in_precision_alone():
    made = list(integers.recipes(SCALES["desk"], {}).values())
    assert len(made) == len(integers.NETWORKS) * integers.SEEDS * 2
    for plain, ours in zip(made[::2], made[1::2], strict=True):
        assert dataclasses.replace(plain, precision="int8") == ours
    trial = dataclasses.replace(SCALES["paper"], max_steps=2)
    assert {r.limit for r in integers.recipes(trial, {}).values()} == {2 * made[0].batch}


def test_rows_have_accuracies_and_the_median_speed():
    runs = {
        "a": run("resnet10", "mimicnorm", [0.1, 0.5, 0.9], precision="int8"),
        "b": run("resnet10", "mimicnorm", [], "diverged", precision="int8"),
    }
    for number, line in enumerate(runs["a"]["history"]):
        line["images_per_second"] = 100.0 * number
    (row,) = integers.rows(runs, None)
    assert row == {
        "network": "resnet10", "precision": "int8", "top1": [90.0], "diverged": 1, "images_per_second": 100.0
    }  # fmt: skip
