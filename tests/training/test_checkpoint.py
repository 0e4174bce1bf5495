"""Checkpoints: whole or not there, and never silently wrong."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from mimicnorm.errors import CheckpointError
from mimicnorm.training import checkpoint

STATE = {"step": 3, "loss": 0.1 + 0.2, "logs": {"metrics.jsonl": 12}}


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    odd = {"half": torch.randn(5).bfloat16(), "count": torch.tensor(7), "empty": torch.zeros(0), "mask": image[0] > 0}
    return {"image": image, "transposed": torch.randn(3, 2).t(), **odd}


def test_what_is_loaded_is_what_was_saved(tmp_path: Path):
    path = checkpoint.save(tmp_path, 3, tensors(), STATE)
    found, state = checkpoint.load(path)
    assert state == STATE
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_shared_memory_is_saved_twice(tmp_path: Path):
    one = torch.randn(3)
    found, _ = checkpoint.load(checkpoint.save(tmp_path, 1, {"a": one, "b": one, "part": one[1:]}, {}))
    assert torch.equal(found["a"], found["b"])


def test_the_newest_two_stay(tmp_path: Path):
    for step in (5, 10, 1000):
        checkpoint.save(tmp_path, step, {"x": torch.full((2,), step)}, {"step": step})
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["step-000000010.safetensors", "step-000001000.safetensors"]
    found, state, damaged = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert (int(found["x"][0]), state["step"], damaged) == (1000, 1000, [])


def test_every_altered_byte_and_every_truncation_is_noticed(tmp_path: Path):
    path = checkpoint.save(tmp_path, 1, {"x": torch.arange(8.0), "y": torch.ones(3, dtype=torch.int64)}, STATE)
    good = path.read_bytes()
    for position in range(0, len(good), 3):
        altered = bytearray(good)
        altered[position] ^= 1
        path.write_bytes(altered)
        try:
            found, state = checkpoint.load(path)
        except CheckpointError:
            continue
        assert state == STATE  # a blank in the header's padding is all that may change unnoticed
        assert torch.equal(found["x"], torch.arange(8.0))
    for length in (0, 1, 7, 8, 9, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="is damaged"):
            checkpoint.load(path)


def test_the_one_before_a_damaged_one_is_used_and_the_damage_named(tmp_path: Path):
    for step in (1, 2):
        path = checkpoint.save(tmp_path, step, {"x": torch.tensor(step)}, {"step": step})
    path.write_bytes(path.read_bytes()[:-1])
    _, state, damaged = checkpoint.load_latest(tmp_path)
    assert state == {"step": 1}
    assert len(damaged) == 1
    assert "step-000000002.safetensors is damaged" in damaged[0]
    checkpoint.save(tmp_path, 0, {"x": torch.tensor(0)}, {"step": 0})
    assert len(list(tmp_path.iterdir())) == 1  # the damaged one does not take the place of a good one
    (tmp_path / "step-000000000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no other to go on from"):
        checkpoint.load_latest(tmp_path)


def test_no_checkpoint_yet(tmp_path: Path):
    assert checkpoint.load_latest(tmp_path) == (None, {}, [])


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path, monkeypatch, fails):
    path = tmp_path / "file"
    checkpoint.write_atomically(path, b"old")

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, fails, no_space)
    with pytest.raises(CheckpointError, match=r"No space left on device\. What was saved before is untouched"):
        checkpoint.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
