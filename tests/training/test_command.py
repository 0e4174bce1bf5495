"""``mimicnorm train``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny

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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "digits-resnet1O"], "Did you mean digits-resnet10"),
        (["train", "digits-resnet10", "--method", "mimik"], "Did you mean mimicnorm"),
        (["train", "digits-resnet10", "--settings", "gain=2"], "'gain=2' is not a NAME=VALUE that mimicnorm has"),
        (["train", "digits-resnet10", "--model", "resnet19"], "Did you mean resnet1"),
        (["train", "digits-resnet10", "--data", "digit"], "Did you mean digits"),
        (["train", "digits-resnet10", "--out", ""], "--out is empty"),
        (["compare", "--methods", "batchnorm,mimicnrm"], "Did you mean mimicnorm"),
        (["compare", "--data", "cifar1000"], "Did you mean cifar100"),
        (["compare", "--seeds", "0"], "--seeds=0: use a whole number of at least 1"),
        (["compare", "--milestones", "3"], "use fractions of the run"),
    ],
)
def test_mistakes_are_one_line_and_do_not_wait_for_torch(tmp_path, words, message):
    code = f"import sys, mimicnorm.cli as c\nassert c.main({words}) == 2\nassert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "5000"], "it must be at most 1438, the number of training images"),
        (["--model", "timm:resnet18", "--width", "0.5"], "set width to 1 (--width 1)"),
        (["--device", "cuda:99"], "device 'cuda:99' cannot be used"),
    ],
)
def test_later_mistakes_are_one_line_and_claim_no_folder(tmp_path, capsys, words, message):
    assert main(["train", "digits-resnet10", "--out", str(tmp_path / "run"), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_networks_of_ones_own_have_one_width(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    out = tmp_path / "run"
    words = ["--model", "tiny:net", "--epochs", "1", "--batch", "8", "--init", "none", "--out", str(out)]
    assert main(["train", "digits-resnet10", *words]) == 0
    assert json.loads((out / "recipe.json").read_text())["width"] == 1.0
