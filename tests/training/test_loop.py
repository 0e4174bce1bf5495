"""Whole runs: what they leave, when they save, how they end."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import signal
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

from mimicnorm import data
from mimicnorm.errors import RecipeError
from mimicnorm.training import recipe, state
from mimicnorm.training.loop import PARENT, load
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import Trainer


def test_a_run_leaves_recipe_metrics_weights_and_result(finished: Path):
    assert json.loads((finished / "recipe.json").read_text()) == tiny.recipe().resolved().as_dict()
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "epoch" in line]
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert [line["step"] for line in lines if "epoch" not in line] == [3, 6, 9, 12, 15, 18, 21]
    result = json.loads((finished / "result.json").read_text())
    assert (result["status"], result["step"]) == ("done", 21)
    expected = {"lr", "train_loss", "train_accuracy", "test_loss", "top1", "top5", "seconds", "images_per_second"}
    expected |= {"confidence", "calibration_error"}
    assert expected <= result["history"][-1].keys()
    assert result["history"][-1]["top5"] == 1.0  # of four classes
    variance = result["history"][-1]["last_norm_variance"]
    assert 0 < variance["min"] <= variance["median"] <= variance["max"]
    before = (finished / "weights.safetensors").stat().st_mtime_ns
    assert dataclasses.asdict(tiny.train(finished)) == result  # returned, not repeated
    assert (finished / "weights.safetensors").stat().st_mtime_ns == before


def test_the_callers_random_state_and_signals_stay(tmp_path: Path):
    torch.manual_seed(5)
    before, handler = torch.get_rng_state(), signal.getsignal(signal.SIGTERM)
    tiny.train(tmp_path, epochs=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(("number", "at_step"), [(signal.SIGTERM, 3), (signal.SIGINT, 6), (signal.SIGTERM, 13)])
def test_a_signal_ends_the_step_and_saves(finished: Path, tmp_path: Path, number, at_step):
    assert tiny.in_a_process(tiny.signalled, number, at_step, tmp_path) == 128 + number
    assert (tmp_path / "checkpoints" / f"step-{at_step + 1:09d}.safetensors").exists()
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


def test_a_run_whose_sweep_is_gone_saves_and_stops(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(PARENT, str(os.getppid()))
    assert tiny.train(tmp_path / "with its parent", epochs=1).status == "done"
    monkeypatch.setenv(PARENT, "1234567890")
    result = tiny.train(tmp_path / "alone")
    assert (result.status, result.step, result.signal) == ("interrupted", 1, None)


@pytest.mark.parametrize(
    ("seconds", "saved"), [(0.0, [*range(1, 7), *range(7, 15)]), (1e9, [7, 14]), (2.5, [3, 6, 7, 10, 13, 14])]
)
def test_checkpoints_are_saved_by_the_clock_and_at_the_end_of_epochs(tmp_path, monkeypatch, seconds, saved):
    """The clock goes on by a second in each step."""
    steps, save, step = [], state.RunFolder.save, Trainer.step
    now = [0.0]

    def counted(self, *args):
        now[0] += 1.0
        return step(self, *args)

    def noted(self, trainer, position):
        steps.append(position.step)
        save(self, trainer, position)

    monkeypatch.setattr(tiny.loop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(Trainer, "step", counted)
    monkeypatch.setattr(state.RunFolder, "save", noted)
    options = {"sources": tiny.SOURCES, "progress": False, "checkpoint_seconds": seconds}
    tiny.loop.train(tiny.recipe(epochs=2), tmp_path, **options)
    assert steps == saved


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_compiled_run_gives_the_plain_ones_weights_and_resumes(tmp_path: Path, monkeypatch):
    changes = {"model": "tiny:dry", "epochs": 2}
    plain = tiny.train(tmp_path / "plain", **changes)
    compiled_models = []

    def compiling(model):
        compiled_models.append(model)
        return compiler(model)

    compiler = functools.partial(torch.compile, backend="aot_eager")  # the same graphs, and no C++ compiler
    monkeypatch.setattr(torch, "compile", compiling)
    whole = tiny.train(tmp_path / "whole", compile=True, **changes)
    assert len(compiled_models) == 1
    assert [line["top1"] for line in whole.history] == [line["top1"] for line in plain.history]
    weights = [load_file(tmp_path / name / "weights.safetensors") for name in ("plain", "whole")]
    torch.testing.assert_close(*weights)  # the same names, too: nothing is saved of the wrapper
    stop = iter([False] * 9 + [True])
    with monkeypatch.context() as patched:
        patched.setattr(Processes, "any", lambda self, *flags: [next(stop), False])
        assert tiny.train(tmp_path / "cut", compile=True, **changes).status == "interrupted"
    assert tiny.train(tmp_path / "cut", compile=True, **changes).status == "done"
    assert tiny.outcome(tmp_path / "cut") == tiny.outcome(tmp_path / "whole")


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_divergence_is_a_result(tmp_path: Path, micro_batch):
    changes = {"method": "nonorm", "lr": 1e20, "warmup": 0.0, "micro_batch": micro_batch}
    result = tiny.train(tmp_path, **changes)
    assert (result.status, result.step, result.history) == ("diverged", 2, [])
    assert tiny.train(tmp_path, **changes) == result
    assert not (tmp_path / "metrics.jsonl").exists()  # a loss that is not a number makes no line


def test_impossible_arguments_are_refused(tmp_path: Path):
    for wrong in ({"checkpoint_steps": -1}, {"checkpoint_seconds": float("nan")}):
        with pytest.raises(RecipeError, match=next(iter(wrong))):
            tiny.loop.train(tiny.recipe(), tmp_path, sources=tiny.SOURCES, **wrong)
    for chosen in ({"validation": 0.1}, {"classes": "0-1"}):
        with pytest.raises(RecipeError, match="sources are used as they are"):
            tiny.train(tmp_path, **chosen)


def test_tensorboard_holds_the_variance_of_every_class(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"sources": tiny.SOURCES, "progress": False, "tensorboard": True}
    tiny.loop.train(tiny.recipe(epochs=1), tmp_path, **options)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {f"last_norm_variance_by_class/{c}" for c in range(4)} | {"top1", "loss"} <= set(events.Tags()["scalars"])


def test_images_held_out_are_evaluated_on_and_the_test_set_is_not_read(monkeypatch):
    asked, real = [], data.load

    def noted(name, split, **options):
        asked.append(split)
        return real(name, split, **options)

    monkeypatch.setattr(data, "load", noted)
    fields = {"data": "digits", "validation": 0.25, "classes": "3-5", "limit": 60, "test_limit": 30}
    train_set, held_out = load(recipe("digits-mlp10", **fields))
    assert asked == ["train", "validation"]
    assert (len(train_set), len(held_out), train_set.classes, held_out.classes) == (60, 30, 3, 3)
    asked.clear()
    load(recipe("digits-mlp10"))
    assert asked == ["train", "test"]
