"""A finished run, read back."""

from __future__ import annotations

import pytest
import tiny
import torch

from mimicnorm.errors import CheckpointError
from mimicnorm.training import finished, train


def test_the_network_of_a_run_is_as_accurate_as_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("mimicnorm.training.finished_run.load", lambda *_: tiny.SOURCES)
    result = train(tiny.recipe(), tmp_path / "run", sources=tiny.SOURCES, progress=False)
    random = torch.get_rng_state()
    run = finished(tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), random)
    assert run.recipe == tiny.recipe().resolved()
    assert not run.model.training
    with torch.no_grad():
        right = sum(int((run.model(x).argmax(1) == y).sum()) for x, y in run.test_set.plain_batches(16))
    assert right / len(run.test_set) == pytest.approx(result.top1)


def test_what_is_not_a_finished_run(tmp_path):
    with pytest.raises(CheckpointError, match=r"no recipe\.json"):
        finished(tmp_path)
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not finished"):
        finished(tmp_path)
