"""Runs that start from trained weights: what is loaded, what identifies the run, kill and resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import tiny
import torch

from mimicnorm.errors import RecipeError
from mimicnorm.layers import TrainedLayer
from mimicnorm.training import network
from mimicnorm.training.trained import load_trained


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    """The weights of a BatchNorm network that was trained for three epochs."""
    out = tmp_path_factory.mktemp("trained") / "run"
    assert tiny.train(out, method="batchnorm").status == "done"
    return out / "weights.safetensors"


def fine_tuning(weights: Path, **changes) -> dict:
    return {"init_from": str(weights), "init": "keep", "lr": 0.01, **changes}


@pytest.mark.parametrize("method", ["mimicnorm", "nonorm", "batchnorm"])
def test_the_network_starts_as_the_trained_one(weights, method):
    original = tiny.net().eval()
    original.load_state_dict(safetensors.torch.load_file(weights))
    started = network(tiny.recipe(**fine_tuning(weights, method=method)), tiny.SOURCES[0]).eval()
    images = torch.randn(4, 3, 6, 6)
    torch.testing.assert_close(started(images), original(images), rtol=1e-4, atol=1e-5)
    assert isinstance(started[0], TrainedLayer) == (method != "batchnorm")


@pytest.mark.parametrize("change", ["other classes", "no head"])
def test_a_head_that_does_not_fit_starts_anew(weights, tmp_path, change):
    tensors = safetensors.torch.load_file(weights)
    tensors = {k: v for k, v in tensors.items() if not k.startswith("9.")}
    if change == "other classes":
        tensors |= {"9.weight": torch.ones(7, 8), "9.bias": torch.ones(7)}
    safetensors.torch.save_file(tensors, tmp_path / "other.safetensors")
    started = network(tiny.recipe(**fine_tuning(tmp_path / "other.safetensors")), tiny.SOURCES[0])
    torch.testing.assert_close(started[0].weight.detach(), tensors["0.weight"])
    assert started[9].weight.shape == (4, 8)
    allowed = fine_tuning(tmp_path / "other.safetensors", method="mimicnorm", settings=("last_norm=true",))
    assert hasattr(network(tiny.recipe(**allowed), tiny.SOURCES[0])[9], "last_norm")


def test_a_killed_run_resumes_bit_for_bit(weights, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    changes = fine_tuning(weights)
    assert tiny.in_a_process(tiny.killed_after, 10**9, whole, changes) == 0
    lines = int((whole / "lines").read_text())
    assert tiny.in_a_process(tiny.killed_after, lines // 2, killed, changes) == -9
    assert list((killed / "checkpoints").iterdir())
    assert tiny.in_a_process(tiny.killed_after, 0, killed, changes) == 0
    assert tiny.outcome(killed) == tiny.outcome(whole)


def test_the_content_of_the_file_identifies_the_run(weights, tmp_path):
    recipe = tiny.recipe(**fine_tuning(weights))
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes(weights.read_bytes())
    assert dataclasses.replace(recipe, init_from=str(moved)).key() == recipe.key() == recipe.resolved().key()
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file(tensors | {"0.weight": tensors["0.weight"] + 1}, moved)
    other = dataclasses.replace(recipe, init_from=str(moved))
    assert other.key() != recipe.key()
    stale = dataclasses.replace(
        recipe.resolved(), init_from=recipe.resolved().init_from.replace(str(weights), str(moved))
    )
    with pytest.raises(RecipeError, match="has changed"):
        network(stale, tiny.SOURCES[0])


def test_a_run_is_not_resumed_from_other_weights(weights, tmp_path):
    file = tmp_path / "weights.safetensors"
    file.write_bytes(weights.read_bytes())
    tiny.train(tmp_path / "run", **fine_tuning(file, epochs=1))
    tensors = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({k: v + 1 for k, v in tensors.items()}, file)
    with pytest.raises(RecipeError, match="init_from was"):
        tiny.train(tmp_path / "run", **fine_tuning(file, epochs=1))


def test_recipes_without_it_are_as_before():
    assert "init_from" not in tiny.recipe().resolved().as_dict()
    assert json.loads(json.dumps(tiny.recipe().as_dict())) == tiny.recipe().as_dict()


@pytest.mark.parametrize("init", ["auto", "theory", "calibrate"])
def test_weights_that_would_be_drawn_over_are_refused(weights, init):
    with pytest.raises(RecipeError, match='use "keep"'):
        tiny.recipe(**fine_tuning(weights, init=init))


def test_weights_of_another_network(tmp_path):
    torch.manual_seed(0)
    model, other = tiny.net(), tiny.net(channels=12)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    other.add_module("10", torch.nn.Linear(4, 4))
    state = other.state_dict()
    del state["1.running_var"]
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    recipe = tiny.recipe(**fine_tuning(tmp_path / "w.safetensors"))
    with pytest.raises(
        RecipeError, match=r"lacks 1.running_var; it has besides 10.bias, 10.weight; of another shape 0.w"
    ):
        load_trained(model, *recipe.weights_file(), ["9"])
    torch.testing.assert_close(model.state_dict(), before)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        tiny.recipe(**fine_tuning(tmp_path / "missing")).key()
    (tmp_path / "text").write_text("not a tensor")
    with pytest.raises(RecipeError, match=r"safetensors.torch.save_file"):
        network(tiny.recipe(**fine_tuning(tmp_path / "text")), tiny.SOURCES[0])


def test_the_command_line_without_a_recipe(weights, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    words = ["--model", "tiny:net", "--batch", "8", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert tiny.main(["train", "--init-from", str(weights), "--method", "mimicnorm", *words]) == 0
    assert "done at step 7" in capsys.readouterr().out
    assert json.loads((tmp_path / "run/recipe.json").read_text())["init"] == "keep"
    assert tiny.main(["train", *words]) == 2
    assert "name a recipe" in capsys.readouterr().err
