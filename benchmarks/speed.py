"""Time per training step, in turns: BatchNorm, MimicNorm with its two ways of centring, no norm, and what others offer.

    python benchmarks/speed.py [cells] [grid] [--rounds 20] [--threads 2]

``cells`` writes ``results/speed.json``. A cell is NETWORK-BATCH-PIXELS of torchvision's network, channels last unless
it ends in -contiguous, or the network of ``make demo`` on digits. A step is forward pass, cross entropy, backward pass
and SGD with momentum. Every round runs one step of every method, beginning with another one each time; ratios are taken
within a round, and their median is given with its 95 % interval.

The share of centring is the time inside profiler ranges around every piece of it (sums, differences, scalars, centred
gradients), over the time of the step in the same profile.

``grid`` writes ``results/speed-grid.json`` and ``docs/figures/speed-grid.png``: ResNet-50 over batch and image
sizes. Rows that are there stay: the same command goes on. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from provenance import ROOT, Rows, zoo
from steps import ratio, training_step
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from mimicnorm import models
from mimicnorm.compare.timing import LEAST_ROUNDS, interleaved
from mimicnorm.layers import weight, weight_mean
from mimicnorm.methods import BatchNorm, Method, MimicNorm, NoNorm
from mimicnorm.surgery.convert import convert_

CELLS = (
    "resnet50-8-224",
    "resnet50-8-224-contiguous",
    "resnet50-32-224",
    "resnet50-32-224-contiguous",
    "resnet50-8-112",
    "resnet18-32-112",
    "digits-64-8",
)
GRID = (*(f"resnet50-{batch}-112" for batch in (2, 4, 8, 16, 32, 64)), *(f"resnet50-8-{px}" for px in (64, 160, 224)))
METHODS: dict[str, Method] = {
    "batchnorm": BatchNorm(),
    "mimicnorm, forward": MimicNorm(),
    "mimicnorm, backward": MimicNorm(centre="backward"),
    "nonorm": NoNorm(),
}
IN_GRID = ("batchnorm", "mimicnorm, backward", "nonorm")
PIECES = ((weight, "_sums"), (weight, "_made"), (weight, "_made_backward"), (weight_mean, "centre_rows"))
RANGE = "mimicnorm centring"


def networks(name: str, pixels: int) -> dict[str, Callable[[], nn.Module]]:
    """Return how to build the network under every method, and what others offer, by name."""

    def under(method: Method) -> nn.Module:
        torch.manual_seed(0)
        if name == "digits":
            model, shape = models.build("resnet10", num_classes=10, in_channels=1, width=0.25), (2, 1, pixels, pixels)
            if isinstance(method, MimicNorm):  # as recipes have it at this width
                method = dataclasses.replace(method, min_fan_in=12)
        else:
            model, shape = zoo.torchvision().models.get_model(name, weights=None), (2, 3, pixels, pixels)
        convert_(model, method, example=shape, init=None)
        return model

    def group_norm() -> nn.Module:
        from opacus.validators import ModuleValidator

        return ModuleValidator.fix(under(BatchNorm()))

    made: dict[str, Callable[[], nn.Module]] = {n: lambda m=m: under(m) for n, m in METHODS.items()}
    made["GroupNorm (opacus)"] = group_norm
    if name == "resnet50":
        made["nf_resnet50 (timm)"] = lambda: zoo.timm().create_model("nf_resnet50")
    return made


def step_of(model: nn.Module, cell: str) -> Callable[[], None]:
    name, batch, pixels, layout = parsed(cell)
    model.to(memory_format=layout).train()  # pyrefly: ignore
    channels, classes = (1, 10) if name == "digits" else (3, 1000)
    images = torch.randn(batch, channels, pixels, pixels, generator=torch.Generator().manual_seed(0))
    images, labels = images.to(memory_format=layout), torch.arange(batch) % classes
    return training_step(model, images, labels)


def times(cell: str, rounds: int, only: tuple[str, ...] = ()) -> dict[str, Any]:
    name, batch, pixels, _ = parsed(cell)
    made = {n: make for n, make in networks(name, pixels).items() if not only or n in only}
    if batch * pixels**2 > 8 * 224**2:  # steps of seconds
        made, rounds = {n: make for n, make in made.items() if n in METHODS}, max(LEAST_ROUNDS, rounds // 2)
    rounds = 10 * rounds if name == "digits" else rounds
    seconds = interleaved({n: step_of(make(), cell) for n, make in made.items()}, rounds=rounds, budget=float("inf"))
    return {
        "batchnorm_over": {n: ratio(seconds["batchnorm"], s) for n, s in seconds.items()},
        "over_nonorm": {n: ratio(s, seconds["nonorm"]) for n, s in seconds.items()},
        "median_seconds": {n: round(statistics.median(s), 4) for n, s in seconds.items()},
    }


def share(cell: str, method: str, steps: int = 4) -> dict[str, float]:
    """Return the share of centring in each of several profiled steps: median with its interval."""
    name, _, pixels, _ = parsed(cell)
    step = step_of(networks(name, pixels)[method](), cell)
    step()
    centring, whole = [], []
    with ranges():
        for _ in range(steps):
            with profile(activities=[ProfilerActivity.CPU]) as profiled, record_function("whole step"):
                step()
            total = {event.key: event.cpu_time_total for event in profiled.key_averages()}
            centring.append(total[RANGE])
            whole.append(total["whole step"])
    return ratio(centring, whole)


@contextmanager
def ranges() -> Iterator[None]:
    """Profiler ranges around the pieces of centring, none inside another."""
    before, inside = [(module, piece, getattr(module, piece)) for module, piece in PIECES], [False]

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
        for module, piece, function in before:
            setattr(module, piece, ranged(function))
        yield
    finally:
        for module, piece, function in before:
            setattr(module, piece, function)


def parsed(cell: str) -> tuple[str, int, int, torch.memory_format]:
    name, batch, pixels, *rest = cell.split("-")
    layout = torch.contiguous_format if rest == ["contiguous"] else torch.channels_last
    return name, int(batch), int(pixels), layout


def figure(rows: list[dict]) -> None:
    """Draw the step time over no norm at all, over batch sizes and image sizes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = {row["cell"]: row["over_nonorm"] for row in rows}
    drawn, both = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for axes, label, which in ((both[0], "batch, 112 px", 1), (both[1], "pixels, batch 8", 2)):
        cells = [c for c in points if c.split("-")[3 - which] == {1: "112", 2: "8"}[which]]
        cells.sort(key=lambda c, which=which: int(c.split("-")[which]))
        at = [int(c.split("-")[which]) for c in cells]
        for method, colour in (("batchnorm", "#1f5fae"), ("mimicnorm, backward", "#c4411a")):
            values = [points[c][method] for c in cells]
            axes.plot(at, [v["value"] for v in values], "o-", color=colour)
            axes.fill_between(at, [v["low"] for v in values], [v["high"] for v in values], color=colour, alpha=0.15)
            axes.annotate(method, (at[-1], values[-1]["value"]), (4, 0), textcoords="offset points", color=colour)
        axes.axhline(1.0, color="grey", lw=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(at, [str(a) for a in at])
        axes.set_xlabel(label)
        axes.set_xlim(right=at[-1] * 2.2 if which == 1 else at[-1] * 1.5)
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("step time / no norm")
    drawn.suptitle("ResNet-50, training step on a CPU, channels last", fontsize=10)
    drawn.savefig(ROOT / "docs" / "figures" / "speed-grid.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["cells", "grid"], default=["cells"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if "cells" in asked.parts:
        rows = Rows("speed", "cell", rounds=asked.rounds, threads=asked.threads)
        for cell in CELLS:
            if (cell,) not in rows:
                shares = {method: share(cell, method) for method in METHODS if method.startswith("mimicnorm")}
                rows.add({"cell": cell, "centring_share": shares, **times(cell, asked.rounds)})
                gc.collect()
    if "grid" in asked.parts:
        rows = Rows("speed-grid", "cell", rounds=asked.rounds, threads=asked.threads)
        for cell in GRID:
            if (cell,) not in rows:
                rows.add({"cell": cell, **times(cell, asked.rounds, IN_GRID)})
                gc.collect()
        figure(rows.rows)


if __name__ == "__main__":
    main()
