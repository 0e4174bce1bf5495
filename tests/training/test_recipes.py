"""The recipes are the paper's, and refuse what cannot be."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mimicnorm import models
from mimicnorm.errors import MimicNormError, NameNotFoundError, RecipeError
from mimicnorm.training import RECIPES, Recipe, recipe


def test_the_papers_rows():
    for name in ("vgg11", "vgg16", "resnet18", "resnet50", "squeezenet", "shufflenetv2"):
        r = recipe(f"cifar100-{name}")
        assert (r.lr, r.momentum, r.weight_decay, r.decay_scalars) == (0.1, 0.9, 5e-4, True)
        assert (r.epochs, r.warmup_epochs, r.milestones, r.gamma) == (150, 2, (80, 110, 135), 0.1)
        assert r.batch == (128 if name == "resnet50" else 256)
    for name in ("vgg16", "resnet18", "resnet50", "resnet101"):
        r = recipe(f"imagenet-{name}")
        assert (r.weight_decay, r.batch, r.epochs, r.milestones) == (1e-4, 256, 90, (30, 60, 85))
    small = recipe("imagenet-shufflenetv2_x0_5")
    assert (small.epochs, small.augment) == (200, "light")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_names_a_network_and_survives_json(name):
    r = RECIPES[name]
    assert r.model in models.names()
    assert max(r.milestones) < r.epochs
    assert (r.decay_scalars, r.channels_last, r.compile) == (True, True, False)  # the command line counts on it
    again = json.loads(json.dumps(r.as_dict()))
    assert again == r.as_dict()
    assert Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in again.items()}) == r


def test_a_recipe_is_frozen_and_changed_by_copy():
    r = recipe("cifar100-resnet18", epochs=3, width=0.5)
    assert (r.epochs, r.width, RECIPES["cifar100-resnet18"].epochs) == (3, 0.5, 150)
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"batch": 0}, {"epochs": 0}, {"epochs": 1.5}, {"lr": 0.0}, {"lr": float("nan")}, {"lr": float("inf")}),
        *({"lr": "0.1"}, {"precision": "fp8"}, {"seed": -1}, {"seed": 2**70}, {"limit": -1}, {"scalar_rate": -1.0}),
        *({"milestones": (1, -2)}, {"warmup_epochs": float("inf")}, {"momentum": 1.0}, {"init": "None"}),
        *({"milestones": (12,)}, {"milestones": (2, 5), "epochs": 5}),
        *({"compile": "no"}, {"channels_last": 0}, {"batch": True}, {"micro_batch": False}, {"scalar_rate": True}),
    ],
)
def test_impossible_fields_are_refused(wrong):
    with pytest.raises(RecipeError, match=next(iter(wrong))):
        recipe("digits-mlp10", **wrong)


def test_a_wrong_name_lists_near_ones():
    with pytest.raises(NameNotFoundError, match="Near ones: cifar100-resnet18"):
        recipe("cifar-resnet18")
    assert issubclass(RecipeError, MimicNormError)


def test_the_schedule_follows_the_epochs_unless_it_is_given():
    def schedule(name, **changes):
        r = recipe(name, **changes)
        return r.milestones, r.warmup_epochs

    assert schedule("cifar100-resnet18", epochs=3) == ((2,), 0.75)
    assert schedule("cifar100-resnet18", epochs=300) == ((160, 220, 270), 2.0)
    assert schedule("cifar100-resnet18-desk", epochs=10) == ((5, 7, 9), 2.0)  # the paper's, not the desk's rounded ones
    assert schedule("digits-mlp10", epochs=1) == ((), 0.25)
    assert schedule("digits-mlp10", epochs=4, milestones=(3,), warmup_epochs=2.0) == ((3,), 2.0)
    assert all(recipe(name) == known for name, known in RECIPES.items())


def test_what_a_seed_may_be_is_said():
    with pytest.raises(RecipeError, match=r"at least 0 and below 2\^63"):
        recipe("digits-mlp10", seed=2**63)


def test_short_runs_are_not_cut_at_once():
    assert recipe("imagenet-resnet50", epochs=1).milestones == ()
    assert recipe("cifar100-resnet18", epochs=2).milestones == (1,)
    assert recipe("cifar100-resnet18", epochs=3).milestones == (2,)
