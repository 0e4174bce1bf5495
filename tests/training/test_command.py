"""``mimicnorm train``."""

from __future__ import annotations

import json

import pytest
import tiny

from mimicnorm.cli import main


def test_every_field_of_a_recipe_is_a_flag(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    words = ["--epochs", "1", "--milestones", "--settings", "residual=linear", "min_fan_in=1", "--no-channels-last"]
    assert tiny.command(tmp_path / "run", *words) == 0
    assert "done at step 7, top-1" in capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "recipe.json").read_text())
    changed = {"epochs": 1, "milestones": [], "settings": ["residual=linear", "min_fan_in=1"], "channels_last": False}
    assert found == {**tiny.recipe().as_dict(), **changed}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["digits-resnet1O"], "Near ones: digits-resnet10"),
        (["digits-resnet10", "--batch", "0"], "batch=0: it must be at least 1"),
        (["digits-resnet10", "--method", "mimik"], "Near ones: mimicnorm"),
        (["digits-resnet10", "--settings", "residual:linear"], "no NAME=VALUE"),
        (["digits-resnet10", "--model", "resnet19"], "Near ones"),
        (["digits-resnet10", "--data", "digit"], "Near ones: digits"),
        (["digits-resnet10", "--batch", "5000"], "it must be at most 1438, the number of training images"),
        (["digits-resnet10", "--model", "timm:resnet18", "--width", "0.5"], "set width to 1 (--width 1)"),
        (["digits-resnet10", "--init", "foo"], "use one of auto, theory, calibrate, none"),
        (["digits-resnet10", "--epochs", "3", "--milestones", "2", "3"], "never reach 3"),
        (["digits-resnet10", "--out", ""], "--out is empty"),
        (["digits-resnet10", "--checkpoint-steps", "-1"], "checkpoint_steps=-1"),
        (["digits-resnet10", "--device", "meta"], "device 'meta' cannot be used"),
        (["digits-resnet10", "--device", "cuda:99"], "device 'cuda:99' cannot be used"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, words, says):
    pytest.importorskip("sklearn")
    assert main(["train", words[0], "--out", str(tmp_path / "run"), *words[1:]]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_networks_of_ones_own_have_one_width(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    out = tmp_path / "run"
    words = ["--model", "tiny:net", "--epochs", "1", "--batch", "8", "--init", "none", "--out", str(out)]
    assert main(["train", "digits-resnet10", *words]) == 0
    assert json.loads((out / "recipe.json").read_text())["width"] == 1.0


@pytest.mark.parametrize("text", ["[1]", '{"status": "done", "step": 1, "odd": 2}', '{"status": "lost", "step": 1}'])
def test_a_result_that_is_none_is_one_sentence(tmp_path, capsys, text):
    (tmp_path / "result.json").write_text(text)
    assert tiny.command(tmp_path) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'result.json'} " in error
    assert len(error.splitlines()) == 1


def test_a_refused_run_leaves_no_checkpoints_and_a_file_in_their_place_is_named(tmp_path, capsys):
    out = tmp_path / "run"
    assert tiny.command(out, "--method", "mimik") == 2
    assert not (out / "checkpoints").exists()
    (out / "checkpoints").write_text("")
    assert tiny.command(out) == 2
    assert f"cannot make the folder {out / 'checkpoints'}" in capsys.readouterr().err
