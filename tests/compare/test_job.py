from __future__ import annotations

import pytest

from mimicnorm.compare.job import DEFAULT_METHODS, Job, base_recipe, contestants
from mimicnorm.errors import MimicNormError
from mimicnorm.methods import METHODS


def test_seeds_and_settings_of_single_methods():
    found = contestants("batchnorm, Weight_Mean:1,mimicnorm+min_fan_in=1+residual=None:5", 3)
    assert [(c.label, c.seeds) for c in found] == [
        ("batchnorm", 3),
        ("weight-mean", 1),
        ("mimicnorm+min_fan_in=1+residual=None", 5),
    ]
    assert found[2].settings == ("min_fan_in=1", "residual=None")


def test_every_method_says_what_it_is_in_a_sentence():
    assert all(c.summary.endswith(".") for c in contestants(",".join(METHODS), 1))
    assert {c.method for c in contestants(DEFAULT_METHODS, 1)} <= set(METHODS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchnorm,mimicnrm", "Near ones: mimicnorm"),
        ("batchnorm,batchnorm:2", "twice"),
        ("batchnorm:two", "must end in a number of seeds"),
        ("batchnorm:0", "at least one"),
        (" , ", "names no method"),
    ],
)
def test_what_cannot_be_read_is_said(text, says):
    with pytest.raises(MimicNormError, match=says):
        contestants(text, 1)


def test_the_milestones_keep_the_papers_proportions():
    assert base_recipe("cifar100", epochs=150).milestones == (80, 110, 135)
    assert base_recipe("cifar100", epochs=15).milestones == (8, 11, 14)
    assert base_recipe("digits", epochs=4, milestones=(3,)).milestones == (3,)


def test_networks_of_other_packages_keep_their_width():
    assert base_recipe("cifar100", model="timm:resnet18").width == 1.0
    assert base_recipe("cifar100", model="timm:resnet18", width=0.5).width == 0.5
    assert base_recipe("cifar100", model="resnet18").width == 0.25


def test_runs_go_seed_by_seed():
    job = Job(base_recipe(), contestants("batchnorm:2,nonorm:1", 1))
    assert [(c.label, seed) for c, seed in job.runs()] == [("batchnorm", 0), ("nonorm", 0), ("batchnorm", 1)]
    assert job.run_recipe(job.contestants[1], 7).seed == 7
    assert "seed" not in job.settings()
