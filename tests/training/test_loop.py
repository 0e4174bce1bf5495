"""Whole runs: what they leave, and what they say when something is in the way."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import tiny
import torch

from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training import checkpoint
from mimicnorm.training.folder import opened


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished")
    assert tiny.in_a_process(tiny.train, out) == 0
    return out


def interrupted(out: Path, at_step: int = 9) -> Path:
    """A run that was killed after its second checkpoint."""
    assert tiny.in_a_process(tiny.signalled, signal.SIGTERM, at_step, out) == 128 + signal.SIGTERM
    return out


def test_a_run_leaves_recipe_metrics_weights_and_result(finished: Path):
    assert json.loads((finished / "recipe.json").read_text()) == tiny.recipe().as_dict()
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if "epoch" in line]
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert [line["step"] for line in lines if "epoch" not in line] == [3, 6, 9, 12, 15, 18, 21]
    result = json.loads((finished / "result.json").read_text())
    assert (result["status"], result["step"]) == ("done", 21)
    wanted = {"lr", "train_loss", "train_accuracy", "test_loss", "top1", "top5", "seconds", "images_per_second"}
    assert wanted <= result["history"][-1].keys()
    assert result["history"][-1]["top5"] == 1.0  # of four classes
    variance = result["history"][-1]["last_norm_variance"]
    assert 0 < variance["min"] <= variance["median"] <= variance["max"]


def test_the_network_learns(tmp_path: Path):
    result = tiny.train(tmp_path, epochs=12, milestones=(10,))
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
    tiny.train(tmp_path, epochs=1, milestones=())
    assert torch.equal(torch.get_rng_state(), before)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(("number", "at_step"), [(signal.SIGTERM, 3), (signal.SIGINT, 9), (signal.SIGTERM, 13)])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(finished: Path, tmp_path: Path, number, at_step):
    assert tiny.in_a_process(tiny.signalled, number, at_step, tmp_path) == 128 + number
    assert (tmp_path / "checkpoints" / f"step-{at_step + 1:09d}.safetensors").exists()
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


@pytest.mark.parametrize("progress", [True, False])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    finished: Path, tmp_path: Path, capsys, monkeypatch, progress
):
    newest = sorted((interrupted(tmp_path) / "checkpoints").iterdir())[-1]
    data = bytearray(newest.read_bytes())
    data[-100] ^= 4
    newest.write_bytes(data)
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    tiny.loop.train(tiny.recipe(), tmp_path, progress=progress)
    said = capsys.readouterr()
    assert f"{newest} is damaged: its checksum is wrong; going on from step 7 instead" in said.err
    assert ("resumed at step 7" in said.out) == progress
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


def test_another_recipe_is_refused_by_field(tmp_path: Path):
    interrupted(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}
    with pytest.raises(RecipeError, match=r"another recipe: batch was 8 and is 4, lr was 0.05 and is 0.1"):
        tiny.train(tmp_path, batch=4, lr=0.1)
    (tmp_path / "recipe.json").unlink()  # the checkpoint knows, too
    with pytest.raises(RecipeError, match="seed was 0 and is 1"):
        tiny.train(tmp_path, seed=1)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()} == before


def test_other_data_and_another_network_are_refused(tmp_path: Path, monkeypatch):
    interrupted(tmp_path)
    with pytest.raises(RecipeError, match=r"other data: .* was \[56, 24, 4\], is \[48, 24, 4\]"):
        tiny.loop.train(tiny.recipe(), tmp_path, sources=(tiny.source(48), tiny.source(24)), progress=False)
    wider = functools.partial(tiny.net, channels=16)
    monkeypatch.setattr(tiny, "net", lambda num_classes=4, in_channels=3: wider(num_classes, in_channels))
    with pytest.raises(CheckpointError, match=r"does not fit the network that tiny:net builds now: model\.0\.bias"):
        tiny.train(tmp_path)


OTHER = (tiny.source(56, seed=7), tiny.SOURCES[1])


@pytest.mark.parametrize("without", ["data.json", "checkpoints"])
def test_other_data_of_the_same_size_is_refused(tmp_path: Path, monkeypatch, without):
    """The file in the folder knows, and so does the checkpoint."""
    path = interrupted(tmp_path) / without
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    monkeypatch.setattr(tiny.loop, "load", lambda *_: OTHER)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"}
    for sources in (None, OTHER):
        with pytest.raises(RecipeError, match=r"other data: the fingerprint of the training images was .* is .* began"):
            tiny.loop.train(tiny.recipe(), tmp_path, sources=sources, progress=False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"} == before


def test_a_finished_run_is_not_returned_for_other_sources(finished: Path):
    with pytest.raises(RecipeError, match="other data: the fingerprint of the training images was"):
        tiny.loop.train(tiny.recipe(), finished, sources=OTHER, progress=False)


def test_a_run_of_an_older_version_knows_the_sizes_of_its_data_alone_and_resumes(finished: Path, tmp_path: Path):
    (interrupted(tmp_path) / "data.json").unlink()
    newest = max((tmp_path / "checkpoints").iterdir())
    tensors, state = checkpoint.load(newest)
    checkpoint.save(newest.parent, state["at"]["step"], tensors, state | {"data": [56, 24, 4]})
    with pytest.raises(RecipeError, match=r"was \[56, 24, 4\], is \[48, 24, 4\]"):
        tiny.loop.train(tiny.recipe(), tmp_path, sources=(tiny.source(48), tiny.source(24)), progress=False)
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


def test_lost_metrics_are_noticed(tmp_path: Path):
    (interrupted(tmp_path) / "metrics.jsonl").write_text("")
    with pytest.raises(CheckpointError, match="lost lines"):
        tiny.train(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to the folder"):
        tiny.train(tmp_path / "file" / "run")


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(finished: Path, tmp_path: Path):
    out = tmp_path / "run"
    room = sum(p.stat().st_size for p in finished.glob("checkpoints/*")) // 4
    assert tiny.in_a_process(tiny.on_a_small_disk, out, room) == 2
    assert "What was saved before is untouched" in out.with_suffix(".error").read_text()
    assert not list(out.glob("checkpoints/*"))
    assert tiny.in_a_process(tiny.killed_after, 1000, out) == -signal.SIGKILL
    saved = {p.name for p in out.glob("checkpoints/step-*")}
    assert saved
    assert tiny.in_a_process(tiny.on_a_small_disk, out, room) == 2
    assert {p.name for p in out.glob("checkpoints/*")} == saved
    assert tiny.in_a_process(tiny.train, out) == 0
    assert tiny.outcome(out) == tiny.outcome(finished)


def test_two_runs_in_one_folder_are_refused(tmp_path: Path):
    out = tmp_path / "run"
    with opened(out, writes=True):
        assert tiny.in_a_process(tiny.refused, out) == 2
    assert "another process is training" in out.with_suffix(".error").read_text()
    assert os.listdir(out) == [".lock"]


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_divergence_is_a_result(tmp_path: Path, micro_batch):
    changes = {"method": "nonorm", "lr": 1e20, "warmup_epochs": 0.0, "micro_batch": micro_batch}
    result = tiny.train(tmp_path, **changes)
    assert (result.status, result.step, result.history) == ("diverged", 2, [])
    again = tiny.train(tmp_path, **changes)
    assert again == result
    assert not (tmp_path / "metrics.jsonl").exists()  # a loss that is no number is no line


def test_a_batch_larger_than_the_data_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match="batch=57: it must be at most 56, the number of training images"):
        tiny.train(tmp_path, batch=57)
    assert tiny.train(tmp_path, epochs=1, milestones=()).status == "done"  # the mistake did not claim the folder


def test_tensorboard_holds_the_variance_of_every_class(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {"sources": tiny.SOURCES, "progress": False, "tensorboard": True}
    tiny.loop.train(tiny.recipe(epochs=1, milestones=()), tmp_path, **options)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {f"last_norm_variance_by_class/{c}" for c in range(4)} | {"top1", "loss"} <= set(events.Tags()["scalars"])
