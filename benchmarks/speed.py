"""Time per training step, all methods in turns, and the share of centring in it; ``results/speed.json``.

    python benchmarks/speed.py [--rounds 24] [--threads 2] [--cells resnet50-8-112 resnet50-8-112-contiguous ...]

A cell is NETWORK-BATCH-PIXELS of torchvision's network, channels last unless it ends in -contiguous; the largest are
timed with BatchNorm, MimicNorm and no norm only. A step is forward pass, cross entropy, backward pass and SGD with
momentum. Every round runs one step of every method, beginning with another one each time; ratios are taken within a
round, and their median is given with its 95 % interval. Times are those of the clock and, beside them, of the
processor, which neighbours on the machine stretch less.

The share of centring is the time inside profiler ranges around every piece of it (means, differences, scalars, the
gradient's adjoint), over the time of the step in the same profile. Rows are kept: the same command goes on.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from provenance import Rows, zoo
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from mimicnorm.compare.intervals import median
from mimicnorm.compare.timing import interleaved
from mimicnorm.layers import weight
from mimicnorm.methods import METHODS
from mimicnorm.surgery.convert import convert_

CELLS = (
    "resnet50-8-224",
    "resnet50-8-224-contiguous",
    "resnet50-32-224",
    "resnet50-32-224-contiguous",
    "resnet50-8-112",
    "resnet18-32-112",
)
FEW = ("batchnorm", "mimicnorm", "nonorm")  # of cells whose steps take seconds
PIECES = ("_sums", "_made", "_made_backward")
RANGE = "mimicnorm centring"


def networks(name: str, pixels: int) -> dict[str, Callable[[], nn.Module]]:
    """By name, how to build the network under every method, and what others offer."""

    def under(method: str) -> nn.Module:
        torch.manual_seed(0)
        model = zoo.torchvision().models.get_model(name, weights=None)
        convert_(model, METHODS[method](), example=(2, 3, pixels, pixels), init=None)
        return model

    def group_norm() -> nn.Module:
        from opacus.validators import ModuleValidator

        return ModuleValidator.fix(under("batchnorm"))

    made = {method: lambda method=method: under(method) for method in (*FEW, *(m for m in METHODS if m not in FEW))}
    made["GroupNorm (opacus)"] = group_norm
    if name == "resnet50":
        made["nf_resnet50 (timm)"] = lambda: zoo.timm().create_model("nf_resnet50")
    return made


def step_of(model: nn.Module, batch: int, pixels: int, layout: torch.memory_format) -> Callable[[], None]:
    model.to(memory_format=layout).train()
    images = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)).to(memory_format=layout)
    labels = torch.arange(batch) % 1000
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9, weight_decay=1e-4)  # the weights stay

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def times(cell: str, rounds: int) -> dict[str, Any]:
    name, batch, pixels, layout = parsed(cell)
    processor: dict[str, list[float]] = {}

    def timed(label: str, step: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            start = time.process_time()
            step()
            processor.setdefault(label, []).append(time.process_time() - start)

        return run

    made = {n: make for n, make in networks(name, pixels).items() if n in FEW or batch * pixels <= 32 * 112}
    steps = {n: timed(n, step_of(make(), batch, pixels, layout)) for n, make in made.items()}
    wall = interleaved(steps, rounds=rounds, budget=float("inf"))
    clocks = {"wall": wall, "processor": {n: seconds[-rounds:] for n, seconds in processor.items()}}

    def ratio(clock: str, over: str, under: str) -> dict[str, float]:
        pairs = zip(clocks[clock][over], clocks[clock][under], strict=True)
        return {k: round(v, 4) for k, v in median([a / b for a, b in pairs])._asdict().items()}

    return {
        "batchnorm_over": {clock: {n: ratio(clock, "batchnorm", n) for n in steps} for clock in clocks},
        "mimicnorm_over_nonorm": {clock: ratio(clock, "mimicnorm", "nonorm") for clock in clocks},
        "median_seconds": {n: round(median(s).value, 4) for n, s in wall.items()},
    }


def share(cell: str, steps: int) -> dict[str, float]:
    """The share of centring in each of several profiled steps: median with its interval."""
    name, batch, pixels, layout = parsed(cell)
    step = step_of(networks(name, pixels)["mimicnorm"](), batch, pixels, layout)
    step()
    found = []
    with ranges():
        for _ in range(steps):
            with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("whole step"):
                step()
            total = {event.key: event.cpu_time_total for event in profiled.key_averages()}
            found.append(total[RANGE] / total["whole step"])
    return {k: round(v, 4) for k, v in median(found)._asdict().items()}


@contextmanager
def ranges() -> Iterator[None]:
    """Profiler ranges around the pieces of centring, none inside another."""
    before, inside = {piece: getattr(weight, piece) for piece in PIECES}, [False]

    def ranged(piece: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(piece)
        def run(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return piece(*args, **kwargs)
            inside[0] = True
            try:
                with record_function(RANGE):
                    return piece(*args, **kwargs)
            finally:
                inside[0] = False

        return run

    try:
        for piece, function in before.items():
            setattr(weight, piece, ranged(function))
        yield
    finally:
        for piece, function in before.items():
            setattr(weight, piece, function)


def parsed(cell: str) -> tuple[str, int, int, torch.memory_format]:
    name, batch, pixels, *rest = cell.split("-")
    layout = torch.contiguous_format if rest == ["contiguous"] else torch.channels_last
    return name, int(batch), int(pixels), layout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cells", nargs="+", default=CELLS)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = Rows("speed", "cell", rounds=asked.rounds, threads=asked.threads)
    for cell in asked.cells:
        if (cell,) not in rows:
            row = {"cell": cell, "centring_share": share(cell, max(6, asked.rounds // 2))}
            rows.add({**row, **times(cell, asked.rounds)})
            gc.collect()


if __name__ == "__main__":
    main()
