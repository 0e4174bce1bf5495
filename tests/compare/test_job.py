from __future__ import annotations

import pytest

from mimicnorm.compare.job import Job, base_recipe, entries
from mimicnorm.errors import MimicNormError


def test_seeds_and_settings_of_single_methods():
    read = entries("batchnorm, Weight_Mean:1,mimicnorm+min_fan_in=1+residual=None:5", 3)
    assert [(c.label, c.seeds) for c in read] == [
        ("batchnorm", 3),
        ("weight-mean", 1),
        ("mimicnorm+min_fan_in=1+residual=None", 5),
    ]
    assert read[2].settings == ("min_fan_in=1", "residual=None")


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


def test_runs_go_seed_by_seed():
    job = Job(base_recipe(lr=None), entries("batchnorm:2,nonorm:1", 1))
    assert [*job.runs()] == ["batchnorm-seed0", "nonorm-seed0", "batchnorm-seed1"]
    assert job.run_recipe(job.entries[1], 7).seed == 7
