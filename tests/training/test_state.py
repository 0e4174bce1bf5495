"""All of resume: files that are whole or not there, folders that refuse what does not fit, runs that survive a kill."""

from __future__ import annotations

import errno
import functools
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
import tiny
import torch

from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training import state

COUNTERS = {"step": 3, "loss": 0.1 + 0.2, "logs": {"metrics.jsonl": 12}}

# -- files ---------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_what_was_saved(tmp_path: Path):
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    odd = {"half": torch.randn(5).bfloat16(), "count": torch.tensor(7), "empty": torch.zeros(0), "mask": image[0] > 0}
    tensors = {"image": image, "transposed": torch.randn(3, 2).t(), "shared": image[1:], **odd}
    state.save_tensors(tmp_path / "file", tensors, COUNTERS)
    loaded, counters = state.load_tensors(tmp_path / "file")
    assert counters == COUNTERS
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor), name


def test_every_altered_byte_and_every_truncation_is_noticed(tmp_path: Path):
    path = tmp_path / "file"
    state.save_tensors(path, {"x": torch.arange(8.0), "y": torch.ones(3, dtype=torch.int64)}, COUNTERS)
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        altered = bytearray(good)
        altered[position] ^= 1
        path.write_bytes(altered)
        try:
            loaded, counters = state.load_tensors(path)
        except CheckpointError:
            continue
        assert counters == COUNTERS  # a blank in the header's padding is all that may change unnoticed
        assert torch.equal(loaded["x"], torch.arange(8.0))
    for length in (0, 1, 7, 8, 9, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            state.load_tensors(path)


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch, fails):
    path = tmp_path / "file"
    state.write_atomically(path, b"old")

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, fails, no_space)
    with pytest.raises(CheckpointError, match=r"No space left on device\. What was saved before is untouched"):
        state.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# -- folders -------------------------------------------------------------------------------------------------


def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def interrupted(out: Path, at_step: int = 9) -> Path:
    """A run that was stopped after its second epoch had begun."""
    assert tiny.in_a_process(tiny.signalled, signal.SIGTERM, at_step, out) == 128 + signal.SIGTERM
    return out


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.0}, {"optimizer": "adamw", "lr": 0.01}])
def test_a_checkpoint_put_back_goes_on_bit_for_bit(tmp_path: Path, changes):
    images, labels = next(tiny.SOURCES[0].batches([torch.arange(8)], seed=0, epoch=0, augment=True))
    one, two = tiny.trainer(seed=0, **changes), tiny.trainer(seed=1, **changes)
    for step in range(2):
        one.step(images, labels, step)
    folder = state.RunFolder(tmp_path, one.recipe)
    assert folder.resume({}) is None
    folder.save(one, state.Position(epoch=0, step=2, loss=1.5))
    checkpoint = folder.resume({})
    assert checkpoint is not None
    assert state.restore(two, *checkpoint) == state.Position(epoch=0, step=2, loss=1.5)
    two.recipe = one.recipe
    for step in range(2, 4):
        assert torch.equal(one.step(images, labels, step)[0], two.step(images, labels, step)[0])
    assert all(map(torch.equal, one.bare.state_dict().values(), two.bare.state_dict().values()))


def test_the_newest_two_stay_and_damaged_ones_take_no_place(tmp_path: Path, capsys):
    trainer = tiny.trainer()
    folder = state.RunFolder(tmp_path, trainer.recipe)
    folder.resume({})
    for step in (5, 10, 1000):
        folder.save(trainer, state.Position(step=step))
    paths = sorted(folder.checkpoints.iterdir())
    assert [p.name for p in paths] == ["step-000000010.safetensors", "step-000001000.safetensors"]
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    _, counters = folder.resume({})
    assert counters["position"]["step"] == 10
    assert f"{paths[1]} is damaged: " in capsys.readouterr().err
    folder.save(trainer, state.Position(step=9))
    assert [p.name for p in folder.checkpoints.iterdir()] == ["step-000000009.safetensors"]
    (folder.checkpoints / "step-000000009.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has no checkpoint that is whole"):
        folder.resume({})


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(finished, tmp_path, capsys, monkeypatch):
    newest = max((interrupted(tmp_path) / "checkpoints").iterdir())
    damaged = bytearray(newest.read_bytes())
    damaged[-100] ^= 4
    newest.write_bytes(damaged)
    monkeypatch.setattr(tiny.loop, "load", lambda *_: tiny.SOURCES)
    tiny.loop.train(tiny.recipe(), tmp_path)
    printed = capsys.readouterr()
    assert f"{newest} is damaged: its checksum is wrong; resuming from the checkpoint before it" in printed.err
    assert "resumed at step 7" in printed.out
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


def test_another_recipe_is_refused_by_field(tmp_path: Path):
    interrupted(tmp_path)
    before = {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()}
    with pytest.raises(RecipeError, match=r"another recipe: batch was 8 and is 4, lr was 0.05 and is 0.1"):
        tiny.train(tmp_path, batch=4, lr=0.1)
    with pytest.raises(RecipeError, match=r"another recipe: settings was .*sqrt.* and is .*residual=null"):
        tiny.train(tmp_path, settings=("residual=None",))
    (tmp_path / "recipe.json").unlink()  # the checkpoint has it, too
    with pytest.raises(RecipeError, match="seed was 0 and is 1"):
        tiny.train(tmp_path, seed=1)
    assert {p: p.read_bytes() for p in (tmp_path / "checkpoints").iterdir()} == before


def test_a_network_that_has_changed_is_refused(tmp_path: Path, monkeypatch):
    interrupted(tmp_path)
    wider = functools.partial(tiny.net, channels=16)
    monkeypatch.setattr(tiny, "net", lambda num_classes=4, in_channels=3: wider(num_classes, in_channels))
    with pytest.raises(CheckpointError, match=r"does not fit the network that tiny:net builds now: size mismatch for"):
        tiny.train(tmp_path)


OTHER = (tiny.source(56, seed=7), tiny.SOURCES[1])


@pytest.mark.parametrize("without", ["data.json", "checkpoints"])
def test_other_data_is_refused(finished: Path, tmp_path: Path, monkeypatch, without):
    """The file in the folder knows, and so does the checkpoint."""
    with pytest.raises(RecipeError, match="other data: training fingerprint was"):
        tiny.loop.train(tiny.recipe(), finished, sources=OTHER, progress=False)
    path = interrupted(tmp_path) / without
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"}
    for sources in (None, OTHER):  # of the same size
        monkeypatch.setattr(tiny.loop, "load", lambda *_: OTHER)
        with pytest.raises(RecipeError, match=r"other data: training fingerprint was .* and is .* it began with"):
            tiny.loop.train(tiny.recipe(), tmp_path, sources=sources, progress=False)
    fewer = (tiny.source(48), tiny.source(24))
    with pytest.raises(RecipeError, match="training images was 56 and is 48"):
        tiny.loop.train(tiny.recipe(), tmp_path, sources=fewer, progress=False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.name != ".lock"} == before


CUT = "the last byte is missing"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("weights.safetensors", None, "is missing"),
        ("weights.safetensors", CUT, "is damaged: "),
        ("result.json", "", "is damaged: "),
        ("result.json", "[1]", "is damaged: "),
        ("result.json", '{"status": "done", "step": 1, "odd": 2}', "is damaged: .*odd"),
        ("result.json", '{"status": "lost", "step": 1}', "is damaged: status 'lost'"),
        ("result.json", '{"status": "done", "step": "x"}', "is damaged: .*at step 'x'"),
        ("result.json", '{"status": "done", "step": 1, "history": [{"top1": null}]}', "is damaged: "),
    ],
)
def test_a_finished_run_with_a_damaged_file_is_not_over(finished, tmp_path, capsys, file, content, says):
    path = copied(finished, tmp_path) / file
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(whole[:-1] if content is CUT else content.encode())
    assert state.RunFolder(path.parent, tiny.recipe()).result() is None
    assert re.search(f"{file} {says}.*; making it again from the last checkpoint", capsys.readouterr().err)


def test_what_is_missing_or_damaged_at_the_end_is_made_again(finished: Path, tmp_path: Path):
    out = copied(finished, tmp_path)
    (out / "weights.safetensors").unlink()
    (out / "result.json").write_text("{")
    assert tiny.train(out).status == "done"
    assert tiny.outcome(out) == tiny.outcome(finished)


def test_damaged_metrics_do_not_stop_a_run_and_lost_ones_are_an_error(finished: Path, tmp_path: Path):
    log = interrupted(tmp_path) / "metrics.jsonl"
    whole = log.read_bytes()
    log.write_bytes(b"\xff{" + whole[2:])
    result = tiny.train(tmp_path)
    assert [line["epoch"] for line in result.history] == [1, 2, 3]
    assert tiny.outcome(tmp_path)[2] == tiny.outcome(finished)[2]
    (tmp_path / "result.json").unlink()
    log.write_text("")
    with pytest.raises(CheckpointError, match="is shorter than at"):
        tiny.train(tmp_path)


def test_a_refused_run_does_not_claim_the_folder(tmp_path: Path):
    with pytest.raises(RecipeError, match="batch=57: it must be at most 56, the number of training images"):
        tiny.train(tmp_path, batch=57)
    assert os.listdir(tmp_path) == [".lock"]


def test_folders_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write to the folder"):
        tiny.train(tmp_path / "file" / "run")
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        tiny.train(tmp_path)


def test_a_full_disk_is_an_error_and_the_run_goes_on_when_there_is_room(finished: Path, tmp_path: Path):
    out = tmp_path / "run"
    room = sum(p.stat().st_size for p in finished.glob("checkpoints/*")) // 4
    assert tiny.in_a_process(tiny.on_a_small_disk, out, room) == 2
    assert "What was saved before is untouched" in out.with_suffix(".error").read_text()
    assert not list(out.glob("checkpoints/*"))
    lines = int((finished / "lines").read_text())
    assert tiny.in_a_process(tiny.killed_after, lines // 2, out) == -signal.SIGKILL
    saved = {p.name for p in out.glob("checkpoints/step-*")}
    assert saved
    assert tiny.in_a_process(tiny.on_a_small_disk, out, room) == 2
    assert {p.name for p in out.glob("checkpoints/*")} == saved
    assert tiny.in_a_process(tiny.train, out) == 0
    assert tiny.outcome(out) == tiny.outcome(finished)


def test_two_runs_in_one_folder_are_refused_and_only_a_dead_ones_half_written_files_go(tmp_path: Path):
    out = tmp_path / "run"
    with state.run_folder(out, tiny.recipe(), writes=True):
        (out / ".result.json.partial").write_text("a live run is writing this")
        assert tiny.in_a_process(tiny.refused, out) == 2
        assert state.RunFolder(out, tiny.recipe()).result() is None
        assert sorted(os.listdir(out)) == [".lock", ".result.json.partial"]
    assert "another process is training" in out.with_suffix(".error").read_text()
    with state.run_folder(out, tiny.recipe(), writes=True):  # of a run that is dead by now
        assert os.listdir(out) == [".lock"]


# -- kills ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", range(4))
def test_killed_at_random_lines_and_started_again(finished: Path, chain, tmp_path: Path):
    lines = int((finished / "lines").read_text())
    draw = random.Random(chain)
    for _ in range(5):
        assert tiny.in_a_process(tiny.killed_after, draw.randrange(1, lines // 5), tmp_path) == -signal.SIGKILL
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


@pytest.mark.parametrize(("number", "part"), [(1, 0.5), (3, 0.0), (4, 1.0), (5, 2.0)])
def test_killed_while_a_checkpoint_is_written(finished: Path, number, part, tmp_path: Path):
    assert tiny.in_a_process(tiny.killed_in_write, number, part, tmp_path) == -signal.SIGKILL
    assert list(tmp_path.glob("checkpoints/.*.partial"))
    assert len(list(tmp_path.glob("checkpoints/step-*"))) == min(number - 1, 2)
    assert tiny.in_a_process(tiny.train, tmp_path) == 0
    assert not list(tmp_path.glob("checkpoints/.*.partial"))
    assert tiny.outcome(tmp_path) == tiny.outcome(finished)


def test_rounded_activations_killed_at_random_lines_and_started_again(tmp_path: Path):
    changes = {"activation_bits": 4, "model": "tiny:wide"}
    whole, cut, draw = tmp_path / "whole", tmp_path / "cut", random.Random(0)
    assert tiny.in_a_process(tiny.killed_after, 0, whole, changes) == 0
    lines = int((whole / "lines").read_text())
    for _ in range(2):
        assert tiny.in_a_process(tiny.killed_after, draw.randrange(lines // 3, lines // 2), cut, changes) == -9
    assert list(cut.glob("checkpoints/step-*"))
    assert tiny.in_a_process(tiny.killed_after, 0, cut, changes) == 0
    assert tiny.outcome(cut) == tiny.outcome(whole)
