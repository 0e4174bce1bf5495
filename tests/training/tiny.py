"""A network and data so small that a whole run takes a moment, and a process that runs them and can be killed."""

from __future__ import annotations

import atexit
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from mimicnorm.cli import main
from mimicnorm.data import Memory
from mimicnorm.errors import MimicNormError
from mimicnorm.training import Recipe, loop, network, state
from mimicnorm.training import recipe as named_recipe
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import Trainer

TRAINING = str(Path(loop.__file__).parent)


def net(num_classes: int = 4, in_channels: int = 3, dropout: float = 0.1, channels: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(channels, num_classes),
    )


def dry(num_classes: int = 4, in_channels: int = 3) -> nn.Module:
    """Without dropout, whose draws depend on the number of processes."""
    return net(num_classes, in_channels, 0.0)


def wide(num_classes: int = 4, in_channels: int = 3) -> nn.Module:
    """Without dropout, with activations that are worth compressing."""
    return net(num_classes, in_channels, 0.0, 32)


def source(samples: int, seed: int = 0) -> Memory:
    """Noise in which one colour is brighter, or none is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(samples) % 4
    images = torch.randint(0, 160, (samples, 3, 6, 6), generator=generator, dtype=torch.uint8)
    for colour in range(3):
        images[labels == colour, colour] += 90
    return Memory("tiny", 4, (3, 6, 6), "cifar", "standard", (0.4,) * 3, (0.2,) * 3, images, labels, 1, True)


SOURCES = (source(56), source(24, seed=1))


def recipe(**changes: Any) -> Recipe:
    fields = {"batch": 8, "epochs": 3, "warmup": 1 / 3, "milestones": (2 / 3,), "log_every": 3, "lr": 0.05}
    return Recipe(**{"model": "tiny:net", "data": "digits", **fields, **changes})


def digits(**changes: Any) -> Recipe:
    """A run of real data that a process of its own can load."""
    fields = {"method": "batchnorm", "limit": 48, "test_limit": 40, "batch": 16, "epochs": 1, **changes}
    return named_recipe("digits-mlp10", **fields)


def trainer(**changes: Any) -> Trainer:
    r = recipe(**changes)
    return Trainer(r, network(r, SOURCES[0]), Processes(torch.device("cpu")), 21)


def train(out: Path | str, checkpoint_steps: int = 2, **changes: Any) -> Any:
    options = {"sources": SOURCES, "progress": False, "checkpoint_steps": checkpoint_steps}
    return loop.train(recipe(**changes), out, **options)


def outcome(out: Path) -> tuple[bytes, bytes, list]:
    """What must not depend on what happened on the way."""
    history = json.loads((out / "result.json").read_text())["history"]
    timed = ("seconds", "images_per_second")
    plain = [{k: v for k, v in line.items() if k not in timed} for line in history]
    return (out / "weights.safetensors").read_bytes(), (out / "metrics.jsonl").read_bytes(), plain


@functools.cache
def _warm() -> subprocess.Popen:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "import warm; warm.serve()"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)
    atexit.register(process.communicate)  # an end of its input ends it
    return process


def in_processes(*jobs: tuple) -> list[int]:
    """The exit codes of functions of this file, each in a process of its own, at once; minus a signal that ended it."""
    process = _warm()
    print(json.dumps([[job[0].__name__, job[1:]] for job in jobs], default=str), file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def in_a_process(job: Callable, *args: Any) -> int:
    return in_processes((job, *args))[0]


def killed_after(lines: int, out: str, changes: dict[str, Any] | None = None) -> None:
    """Train, and be killed when so many lines of the training code have run (0: never); exits with 0 if it ends."""
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
    train(out, **changes or {})
    sys.settrace(None)
    Path(out, "lines").write_text(str(lines - left[0]))


def killed_in_write(number: int, part: float, out: str) -> None:
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

    state.open = torn_open  # type: ignore[attr-defined]
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


def on_a_small_disk(out: str, limit: int) -> None:
    """Train where no file may grow beyond a limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    refused(out)


def refused(out: str) -> None:
    """Train; an error goes to a file beside the folder."""
    try:
        train(out)
    except MimicNormError as error:
        Path(out).with_suffix(".error").write_text(str(error)[:1000])
        sys.exit(2)


def signalled(number: int, at_step: int, out: str, words: tuple[str, ...] = ()) -> None:
    """Run the command line, which gets a signal in the middle of a step."""
    step = loop.Trainer.step

    def and_signal(self: Any, images: Any, labels: Any, now: int) -> Any:
        if now == at_step:
            os.kill(os.getpid(), number)
        return step(self, images, labels, now)

    loop.Trainer.step = and_signal
    sys.exit(command(out, *words))


def command(out: str | Path, *words: str) -> int:
    """``mimicnorm train`` with this file's recipe and data."""
    loop.load = lambda *_: SOURCES
    path = Path(f"{out}.recipe.json")
    path.write_text(json.dumps(recipe().as_dict()))
    return main(["train", str(path), "--out", str(out), *words])


def one_of(rank: int, size: int, meeting: str, out: str, changes: dict) -> None:
    """Train as one of several processes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    result = train(out, **changes)
    Path(f"{out}.{rank}").write_text(f"{result.status} {result.step} {result.top1}")
    time.sleep(0.3)  # gloo's threads still need the interpreter: see training/processes.py
    dist.destroy_process_group()


def together(size: int, out: Path, **changes: Any) -> list[int]:
    """The exit codes of several processes that train in one folder."""
    meeting = out.with_suffix(".meeting")
    meeting.unlink(missing_ok=True)
    return in_processes(*((one_of, rank, size, meeting, out, changes) for rank in range(size)))
