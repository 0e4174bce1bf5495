"""The recipes are the paper's, and refuse what cannot be."""

from __future__ import annotations

import json

import pytest

from mimicnorm import data, models
from mimicnorm.errors import RecipeError
from mimicnorm.methods import MimicNorm
from mimicnorm.training import RECIPES, Recipe, recipe
from mimicnorm.training.recipes import DATA_SETS


def schedule(r: Recipe) -> tuple:
    """Warm-up and milestones in epochs."""
    return tuple(round(fraction * r.epochs, 9) for fraction in (r.warmup, *r.milestones))


def test_the_papers_rows():
    for name in ("vgg11", "vgg16", "resnet18", "resnet50", "squeezenet", "shufflenetv2"):
        r = recipe(f"cifar100-{name}")
        assert (r.lr, r.momentum, r.weight_decay, r.decay_scalars) == (0.1, 0.9, 5e-4, True)
        assert (r.epochs, r.gamma, schedule(r)) == (150, 0.1, (2, 80, 110, 135))
        assert r.batch == (128 if name == "resnet50" else 256)
    for name in ("vgg16", "resnet18", "resnet50", "resnet101"):
        r = recipe(f"imagenet-{name}")
        assert (r.weight_decay, r.batch, r.epochs, schedule(r)) == (1e-4, 256, 90, (2, 30, 60, 85))
    small = recipe("imagenet-shufflenetv2_x0_5")
    assert (small.epochs, small.augment, small.warmup * 200) == (200, "light", 2)


def test_every_recipe_names_a_network_and_survives_a_file(tmp_path):
    adamw = recipe("digits-mlp10", optimizer="adamw", lr=0.5, classes="0-3")
    for r in (*RECIPES.values(), adamw):
        assert r.model in models.names()
        assert (r.decay_scalars, r.channels_last, r.compile) == (True, True, False)  # the command line counts on it
        (tmp_path / "recipe.json").write_text(json.dumps(r.as_dict()))
        assert recipe(str(tmp_path / "recipe.json"), optimizer=r.optimizer) == r  # with the rate of the file


@pytest.mark.parametrize("text", ["", "[1]", '{"model": "mlp10"}', '{"model": "mlp10", "data": "digits", "odd": 1}'])
def test_a_file_without_a_recipe_is_an_error(tmp_path, text):
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(RecipeError, match=r"recipe\.json cannot be read as a recipe: "):
        recipe(str(tmp_path / "recipe.json"))


@pytest.mark.parametrize(
    "wrong",
    [
        *({"batch": 0}, {"epochs": 0}, {"epochs": 1.5}, {"lr": 0.0}, {"lr": float("nan")}, {"lr": float("inf")}),
        *({"lr": "0.1"}, {"precision": "fp8"}, {"seed": -1}, {"seed": 2**63}, {"limit": -1}, {"scalar_rate": -1.0}),
        *({"milestones": (0.5, -0.2)}, {"warmup": float("inf")}, {"warmup": 2.0}, {"momentum": 1.0}, {"init": "None"}),
        *({"milestones": (80, 110)}, {"milestones": (1.0,)}, {"milestones": ("0.5",)}, {"scalar_rate": 0}),
        *({"model": 3}, {"data": None}, {"method": 1.0}, {"settings": "residual=linear"}, {"settings": (3,)}),
        *({"validation": 1.0}, {"validation": -0.1}, {"schedule": "poly"}, {"optimizer": "adam"}, {"classes": (0, 1)}),
        *({"classes": "3"}, {"classes": "0-3,2"}, {"classes": "a-c"}, {"classes": "-1"}, {"classes": "9-0"}),
        *({"activation_bits": 3}, {"activation_bits": 8, "compile": True}, {"activation_bits": -1}),
        *({"compile": "no"}, {"channels_last": 0}, {"batch": True}, {"micro_batch": False}, {"scalar_rate": True}),
    ],
)
def test_impossible_fields_are_refused(wrong):
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        recipe("digits-mlp10", **wrong)


def test_adamw_has_a_rate_and_a_decay_of_its_own():
    def of(**changes) -> tuple[float, float]:
        r = recipe("cifar100-resnet18", **changes)
        return r.lr, r.weight_decay

    assert of() == of(optimizer="sgd") == (0.1, 5e-4)
    assert of(optimizer="adamw") == (1e-3, 0.05)
    assert of(optimizer="adamw", lr=2e-3) == (2e-3, 0.05)


def test_the_names_that_are_checked_before_torch_loads_are_all_there_are():
    assert [*DATA_SETS, "folder:PATH"] == data.names()


def test_a_resolved_recipe_names_every_setting_and_resolves_to_itself():
    r = recipe("digits-resnet10", settings=("residual=None",)).resolved()
    assert r.settings == ('centre="backward"', "last_norm=true", 'logit_scale="auto"', "min_fan_in=16", "residual=null")
    assert r.resolved() == r
    assert recipe("digits-resnet10", method="fixup").resolved().scalar_rate == 0.1
    with pytest.raises(RecipeError, match="'gain=2' is not a NAME=VALUE that mimicnorm has"):
        recipe("digits-resnet10", settings=("gain=2",)).resolved()


def test_the_key_of_a_run_is_that_of_its_resolved_recipe(monkeypatch):
    key = recipe("digits-resnet10").key()
    assert recipe("digits-resnet10", method="Mimic_Norm", settings=("min_fan_in=16",)).key() == key
    assert recipe("digits-resnet10", seed=1).key() != key
    monkeypatch.setattr(MimicNorm, "min_fan_in", 100)  # what the method does by default has changed
    monkeypatch.setattr(MimicNorm.__init__, "__kwdefaults__", {**MimicNorm.__init__.__kwdefaults__, "min_fan_in": 100})
    assert recipe("digits-resnet10").key() != key
