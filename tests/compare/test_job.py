from __future__ import annotations

import pytest

from mimicnorm.compare.job import DEFAULT_METHODS, Job, base_recipe, entries
from mimicnorm.errors import MimicNormError
from mimicnorm.methods import METHODS
from mimicnorm.training import RECIPES


def test_seeds_and_settings_of_single_methods():
    read = entries("batchnorm, Weight_Mean:1,mimicnorm+min_fan_in=1+residual=None:5", 3)
    assert [(c.label, c.seeds) for c in read] == [
        ("batchnorm", 3),
        ("weight-mean", 1),
        ("mimicnorm+min_fan_in=1+residual=None", 5),
    ]
    assert read[2].settings == ("min_fan_in=1", "residual=None")


def test_every_method_says_what_it_is_in_a_sentence():
    assert all(c.summary.endswith(".") for c in entries(",".join(METHODS), 1))
    assert {c.method for c in entries(DEFAULT_METHODS, 1)} <= set(METHODS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchnorm,mimicnrm", "Did you mean mimicnorm"),
        ("batchnorm,batchnorm:2", "twice"),
        ("batchnorm:two", "must end in a number of seeds"),
        ("batchnorm:0", "seeds of batchnorm=0: use a whole number of at least 1"),
        (" , ", "names no method"),
    ],
)
def test_what_cannot_be_read_is_said(text, says):
    with pytest.raises(MimicNormError, match=says):
        entries(text, 1)


def test_the_schedule_is_the_papers_at_any_length():
    for data in ("cifar100", "digits"):
        assert base_recipe(data, epochs=15).milestones == RECIPES["cifar100-resnet18"].milestones
    assert base_recipe("digits", epochs=4, milestones=(0.5,), lr=None).milestones == (0.5,)
    assert base_recipe("cifar100", model="timm:resnet18").width == 1.0  # networks of other packages have one width


def test_runs_go_seed_by_seed():
    job = Job(base_recipe(), entries("batchnorm:2,nonorm:1", 1))
    assert [*job.runs()] == ["batchnorm-seed0", "nonorm-seed0", "batchnorm-seed1"]
    assert job.run_recipe(job.entries[1], 7).seed == 7
    assert "seed" not in job.settings()
