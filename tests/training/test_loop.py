"""Whole runs: what they leave, when they save, how they end."""

from __future__ import annotations

import functools
import json
import os
import signal
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from mimicnorm.errors import RecipeError
from mimicnorm.training import state
from mimicnorm.training.loop import PARENT, evaluate, last_norm_variance
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
    assert expected <= result["history"][-1].keys()
    assert result["history"][-1]["top5"] == 1.0  # of four classes
    variance = result["history"][-1]["last_norm_variance"]
    assert 0 < variance["min"] <= variance["median"] <= variance["max"]


def test_the_network_learns(tmp_path: Path):
    result = tiny.train(tmp_path, epochs=12, milestones=(10 / 12,))
    assert result.top1 is not None
    assert result.top1 > 0.6  # chance is a quarter


def test_a_finished_run_is_returned_not_repeated(finished: Path):
    before = (finished / "weights.safetensors").stat().st_mtime_ns
    result = tiny.train(finished)
    assert (result.status, result.step, len(result.history)) == ("done", 21, 3)
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


def test_impossible_times_between_checkpoints_are_refused(tmp_path: Path):
    for wrong in ({"checkpoint_steps": -1}, {"checkpoint_seconds": float("nan")}):
        with pytest.raises(RecipeError, match=next(iter(wrong))):
            tiny.loop.train(tiny.recipe(), tmp_path, sources=tiny.SOURCES, **wrong)


def test_tensorboard_holds_the_variance_of_every_class(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"sources": tiny.SOURCES, "progress": False, "tensorboard": True}
    tiny.loop.train(tiny.recipe(epochs=1), tmp_path, **options)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {f"last_norm_variance_by_class/{c}" for c in range(4)} | {"top1", "loss"} <= set(events.Tags()["scalars"])


def test_evaluation_sees_the_whole_set_once_in_eval_mode():
    t = tiny.trainer(batch=7)  # 24 images: the last batch is smaller
    before = {k: v.clone() for k, v in t.bare.state_dict().items()}
    measured = evaluate(t, tiny.SOURCES[1])
    assert t.bare.training
    assert all(torch.equal(v, before[k]) for k, v in t.bare.state_dict().items())
    images, labels = next(tiny.SOURCES[1].batches([torch.arange(24)], seed=0, epoch=0, augment=False))
    with torch.no_grad():
        logits = t.bare.eval()(images)
    assert measured["top1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert measured["top5"] == 1.0
    torch.testing.assert_close(measured["test_loss"], float(F.cross_entropy(logits, labels)), rtol=1e-5, atol=1e-6)


def test_a_test_loss_that_is_not_finite_is_none_and_the_last_norms_variance_is_found():
    t = tiny.trainer(method="nonorm")
    nn.init.constant_(t.bare[9].weight, float("nan"))
    assert evaluate(t, tiny.SOURCES[1])["test_loss"] is None
    assert last_norm_variance(t) is None
    variance = last_norm_variance(tiny.trainer())
    assert variance is not None
    assert variance.shape == (4,)
