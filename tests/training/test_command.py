"""``mimicnorm train``; mistakes are in tests/test_cli.py."""

from __future__ import annotations

import json

import safetensors.torch
import tiny
import torch

from mimicnorm.cli import main


def test_every_field_of_a_recipe_is_a_flag_and_its_file_a_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    words = ["--epochs", "1", "--milestones", "--settings", "residual=linear", "min_fan_in=1", "--no-channels-last"]
    assert tiny.command(tmp_path / "run", *words) == 0
    assert "done at step 7, top-1" in capsys.readouterr().out
    written = json.loads((tmp_path / "run" / "recipe.json").read_text())
    settings = ['centre="backward"', "last_norm=true", 'logit_scale="auto"', "min_fan_in=1", 'residual="linear"']
    changed = {"epochs": 1, "milestones": [], "settings": settings, "channels_last": False, "scalar_rate": 1.0}
    assert written == {**tiny.recipe().as_dict(), **changed}
    assert main(["train", str(tmp_path / "run" / "recipe.json"), "--out", str(tmp_path / "again")]) == 0
    assert tiny.outcome(tmp_path / "again") == tiny.outcome(tmp_path / "run")


def test_fine_tune_is_the_recipe_of_trained_weights(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    trained = tiny.net()
    trained(torch.randn(8, 3, 6, 6))  # sets the statistics
    safetensors.torch.save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    words = ["--model", "tiny:net", "--batch", "8", "--epochs", "1", "--out", str(tmp_path / "run")]
    assert main(["train", "--init-from", str(tmp_path / "weights.safetensors"), "--method", "mimicnorm", *words]) == 0
    assert "done at step 7" in capsys.readouterr().out
    written = json.loads((tmp_path / "run/recipe.json").read_text())
    assert (written["init"], written["width"]) == ("keep", 1.0)  # networks of one's own have one width
