"""A network and data so small that a whole run takes a moment, and a process that runs them and can be killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from mimicnorm.data import Memory
from mimicnorm.training import Recipe, checkpoint, loop

# One process imports torch and the others are forked from it: importing is most of what a short run does.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "mimicnorm.training.loop", "mimicnorm.memory", "tiny"])
TRAINING = str(Path(loop.__file__).parent)


def net(num_classes: int = 4, in_channels: int = 3, dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(8, num_classes),
    )


def dry(num_classes: int = 4, in_channels: int = 3) -> nn.Module:
    """Without dropout, whose draws depend on the number of processes."""
    return net(num_classes, in_channels, 0.0)


def source(samples: int, seed: int = 0) -> Memory:
    """Images whose class is their brightest corner."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 4
    images = torch.randint(0, 160, (samples, 3, 6, 6), generator=generator, dtype=torch.uint8)
    for i, label in enumerate(labels.tolist()):
        images[i, :, 3 * (label // 2) :, 3 * (label % 2) :][:, :3, :3] += 60
    return Memory("tiny", 4, (3, 6, 6), "cifar", "standard", (0.4,) * 3, (0.2,) * 3, images, labels, 1, True)


SOURCES = (source(56), source(24, seed=1))


def recipe(**changes: Any) -> Recipe:
    fields = {"batch": 8, "epochs": 3, "warmup_epochs": 1.0, "milestones": (2,), "log_every": 3, "lr": 0.05}
    return Recipe(**{"model": "tiny:net", "data": "tiny", **fields, **changes})


def train(out: Path, checkpoint_steps: int = 2, **changes: Any) -> Any:
    torch.set_num_threads(1)
    options = {"sources": SOURCES, "progress": False, "checkpoint_steps": checkpoint_steps}
    return loop.train(recipe(**changes), out, **options)


def outcome(out: Path) -> tuple[bytes, bytes, list]:
    """What must not depend on what happened on the way."""
    history = json.loads((out / "result.json").read_text())["history"]
    timed = ("seconds", "images_per_second")
    plain = [{k: v for k, v in line.items() if k not in timed} for line in history]
    return (out / "weights.safetensors").read_bytes(), (out / "metrics.jsonl").read_bytes(), plain


def in_a_process(job: Callable, *args: Any) -> int:
    """The exit code of a job in a process of its own; minus the signal that ended it."""
    process = CONTEXT.Process(target=_quietly, args=(job, *args))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def _quietly(job: Callable, *args: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        job(*args)


def killed_after(lines: int, out: Path) -> None:
    """Train, and be killed when so many lines of the training code have run; exits with 0 if it ends before."""
    left = [lines]

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(TRAINING):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    train(out)
    sys.settrace(None)
    (out / "lines").write_text(str(lines - left[0]))


def killed_in_write(number: int, part: float, out: Path) -> None:
    """Train, and be killed when the numberth checkpoint is written to this part; above 1, before it is renamed."""
    count = [0]
    real_open, real_replace = open, os.replace

    def torn_open(path: Any, mode: str = "r") -> Any:
        file = real_open(path, mode)
        if "step-" in str(path) and "w" in mode:
            count[0] += 1
            if count[0] == number and part <= 1:
                return _Torn(file, part)
        return file

    def no_replace(old: Any, new: Any) -> None:
        if count[0] == number and part > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        real_replace(old, new)

    checkpoint.open = torn_open  # type: ignore[attr-defined]
    os.replace = no_replace
    train(out)


class _Torn:
    def __init__(self, file: Any, part: float):
        self.file, self.part = file, part

    def __enter__(self) -> _Torn:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        self.file.write(data[: int(len(data) * self.part)])
        self.file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
