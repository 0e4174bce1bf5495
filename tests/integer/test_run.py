from __future__ import annotations

import json

import pytest
import tiny
import torch

from mimicnorm.cli import main
from mimicnorm.errors import IntegerError, RecipeError
from mimicnorm.integer import run
from mimicnorm.training import recipe, state, train


def small(**changes):
    return tiny.recipe(**{"model": "tiny:dry", "precision": "int8", **changes})


def lines(folder):
    return (folder / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run.train(small(), folder, sources=tiny.SOURCES, progress=False).status == "done"
    return folder


class Killed(BaseException):
    """A kill: nothing on the way catches it."""


@pytest.mark.parametrize("at", [1, 5, 8, 20])
def test_a_killed_run_resumes_bit_for_bit(monkeypatch, tmp_path, whole, at):
    step = run.IntegerRun.step

    def dying(self, images, labels, number):
        if number == at:
            raise Killed
        return step(self, images, labels, number)

    monkeypatch.setattr(run.IntegerRun, "step", dying)
    options = {"sources": tiny.SOURCES, "progress": False, "checkpoint_steps": 2}
    with pytest.raises(Killed):
        run.train(small(), tmp_path, **options)
    monkeypatch.undo()
    assert run.train(small(), tmp_path, **options).status == "done"
    weights, again = (state.load_tensors(f / "weights.safetensors")[0] for f in (whole, tmp_path))
    assert all(torch.equal(weights[k], again[k]) for k in weights)
    newest = [max((f / "checkpoints").iterdir()) for f in (whole, tmp_path)]
    one, other = (state.load_tensors(f)[0] for f in newest)
    assert all(torch.equal(one[k], other[k]) for k in one)
    assert lines(whole) == lines(tmp_path)


def test_micro_batches_train_the_same_weights(tmp_path, whole):
    run.train(small(micro_batch=3), tmp_path, sources=tiny.SOURCES, progress=False)
    weights, again = (state.load_tensors(f / "weights.safetensors")[0] for f in (whole, tmp_path))
    assert all(torch.equal(weights[k], again[k]) for k in weights)


def test_it_learns_and_is_evaluated_in_integers(whole):
    result = json.loads((whole / "result.json").read_text())
    assert result["history"][-1]["top1"] > 0.5
    assert result["history"][-1]["train_loss"] < result["history"][0]["train_loss"]


def test_the_folder_of_an_integer_run_is_not_that_of_another(whole):
    with pytest.raises(RecipeError, match="precision was 'int8' and is 'fp32'"):
        train(small(precision="fp32"), whole, sources=tiny.SOURCES, progress=False)


def test_a_folder_is_refused_with_other_options_of_the_trainer(tmp_path, whole):
    for options in ({"rounding": "nearest"}, {"master_bits": 8}):
        with pytest.raises(RecipeError, match=next(iter(options))):
            run.train(small(), whole, sources=tiny.SOURCES, progress=False, **options)
    result = run.train(small(epochs=1), tmp_path, sources=tiny.SOURCES, progress=False, master_bits=8)
    assert result.status == "done"
    with pytest.raises(RecipeError, match="master_bits was 8 and is None"):
        run.train(small(epochs=1), tmp_path, sources=tiny.SOURCES, progress=False)
    assert run.train(small(), whole, sources=tiny.SOURCES, progress=False, master_bits=16).status == "done"


def test_a_run_that_diverges_says_so(tmp_path, capsys):
    result = run.train(small(lr=1e6), tmp_path, sources=tiny.SOURCES)
    assert result.status == "diverged"
    assert not (tmp_path / "weights.safetensors").exists()
    assert "momentum 0.9 is 7/8 in integers" in capsys.readouterr().out


def test_the_command_line_trains_in_integers(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    words = ["train", "digits-resnet10", "--integer", "--model", "tiny:dry", "--batch", "8", "--epochs", "1"]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert "done at step 7" in capsys.readouterr().out
    folder = tmp_path / "runs" / "digits-resnet10-mimicnorm-seed0-int8"
    assert json.loads((folder / "recipe.json").read_text())["precision"] == "int8"
    assert main([*words, "--precision", "bf16"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_what_integers_cannot_train_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(IntegerError, match=r"8: Dropout\(0.1\)"):
        run.train(small(model="tiny:net"), tmp_path / "a", sources=tiny.SOURCES, progress=False)
    assert not (tmp_path / "a" / "recipe.json").exists()
    with pytest.raises(RecipeError, match="int8"):
        recipe("digits-resnet10", precision="int8", optimizer="adamw")
    with pytest.raises(RecipeError, match="mimicnorm train --integer"):
        train(small(), tmp_path / "b", sources=tiny.SOURCES)
    with pytest.raises(IntegerError, match="precision="):
        run.train(small(precision="fp32"), tmp_path / "b")
