"""Checkpoints that are whole or not there: one safetensors file each, with a checksum, never overwritten in place.

A file is written under another name, brought to the disk, and renamed. Its header holds the run's counters as JSON
and a SHA-256 over every tensor's name, type, shape and bytes and those counters; nothing in it is executed on load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimicnorm.errors import CheckpointError

KEPT = 2
"""How many checkpoints stay: the newest, and one to fall back on."""


def write_atomically(path: Path, data: bytes) -> None:
    """Put bytes into a file so that, whatever happens, it has either its old content or all of the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. What was saved before is untouched: make room or make "
            "the folder writable, then start the same command again"
        ) from error


def weights(tensors: dict[str, Tensor]) -> bytes:
    """A state dict as a plain safetensors file."""
    return safetensors.torch.save({k: _plain(t) for k, t in tensors.items()})


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict) -> Path:
    """Add the checkpoint of a step to a folder, then remove all but it and the one before.

    What is there of later steps was damaged, or the run would have gone on from it.
    """
    plain = {k: _plain(t) for k, t in tensors.items()}
    text = json.dumps(state, allow_nan=False)
    header = json.dumps({"sha256": _checksum(plain, text), "state": text})
    path = folder / f"step-{step:09d}.safetensors"
    write_atomically(path, safetensors.torch.save(plain, {"mimicnorm": header}))
    found = _newest_first(folder)
    at = found.index(path)
    for other in found[:at] + found[at + KEPT :]:
        with contextlib.suppress(OSError):
            other.unlink()
    return path


def load(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors and counters of one checkpoint; ``CheckpointError`` if a single bit is not as it was written."""
    try:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()["mimicnorm"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        text = header["state"]
        if _checksum(tensors, text) != header["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum is wrong")
        return tensors, json.loads(text)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged: {error}") from error


def load_latest(folder: Path) -> tuple[dict[str, Tensor] | None, dict, list[str]]:
    """(tensors, counters, what was wrong with newer ones) of the newest good checkpoint; None if there is none yet."""
    damaged: list[str] = []
    found = _newest_first(folder)
    for path in found:
        try:
            return *load(path), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    if found:
        raise CheckpointError(f"{'; '.join(damaged)}. There is no other to go on from: start again in another folder")
    return None, {}, damaged


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _checksum(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # pyrefly: ignore
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk (where folders can be opened: not on Windows)."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
