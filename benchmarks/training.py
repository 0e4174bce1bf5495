"""Images per second of the training loop against the bare step of the same network on one fixed batch.

    python benchmarks/training.py [--rounds 5] [--steps 8] [--threads 1] [--data-dir FOLDER]

The bare step is forward, loss, backward and SGD on a batch that lies ready in memory; a step of the loop is all that
happens between two batches of ``train``: order, augmentation, learning rate, counting, metrics, progress. Rounds of
both alternate in one process, on the same threads. Each step is timed by the clock and in processor seconds, which
other work on the machine disturbs less; medians over all steps are compared. Evaluation and checkpoints come once per
epoch and are not in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from provenance import provenance, save
from steps import training_step

from mimicnorm import data
from mimicnorm.training import Recipe, network, recipe, train

Stamp = tuple[float, float]


def now() -> Stamp:
    return time.perf_counter(), time.process_time()


class Stamped:
    """A source that notes when each training batch is asked for."""

    def __init__(self, source: data.Source):
        self.source, self.stamps = source, []

    def __getattr__(self, name: str) -> object:
        return getattr(self.source, name)

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, indices, *, augment: bool, **options):
        for item in self.source.batches(indices, augment=augment, **options):
            if augment:
                self.stamps.append(now())
            yield item


def bare_steps(r: Recipe, source: data.Source, steps: int) -> list[Stamp]:
    """When each bare step began."""
    model = network(r, source).to(memory_format=torch.channels_last).train()
    images, labels = next(source.batches([torch.arange(r.batch)], seed=0, epoch=0, augment=True))
    step = training_step(model, images.to(memory_format=torch.channels_last), labels)
    stamps = []
    for _ in range(steps):
        stamps.append(now())
        step()
    return stamps


def loop_steps(r: Recipe, source: data.Source) -> list[Stamp]:
    """When each step of the loop began."""
    stamped = Stamped(source)
    with tempfile.TemporaryDirectory() as out:
        few = dataclasses.replace(source, images=source.images[:128], labels=source.labels[:128])
        train(r, Path(out) / "run", sources=(stamped, few))
    return stamped.stamps


def durations(stamps: list[Stamp]) -> list[Stamp]:
    """Seconds by the clock and of the processor of each step but the first, which warms up."""
    return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(stamps[1:])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = {}
    for method in ("batchnorm", "mimicnorm"):
        changes = {"epochs": 1, "milestones": (), "limit": args.steps * 128, "log_every": 2}
        r = recipe("cifar100-resnet18-desk", method=method, **changes)
        source = data.load(r.data, "train", data_dir=args.data_dir, limit=r.limit)
        times: dict[str, list[Stamp]] = {"bare": [], "loop": []}
        for _ in range(args.rounds):
            times["bare"] += durations(bare_steps(r, source, args.steps))
            times["loop"] += durations(loop_steps(r, source))
        wall, cpu = ({k: statistics.median(t[i] for t in v) for k, v in times.items()} for i in range(2))
        rows[method] = {
            "loop_to_bare_images_per_second": {"clock": wall["bare"] / wall["loop"], "cpu": cpu["bare"] / cpu["loop"]},
            "median_step_seconds": {"clock": wall, "cpu": cpu},
            "steps": {k: len(v) for k, v in times.items()},
        }
        print(method, rows[method], flush=True)
    settings = {"rounds": args.rounds, "steps": args.steps, "threads": args.threads, **r.as_dict()}
    save("training-throughput", {**provenance(**settings), "methods": rows})


if __name__ == "__main__":
    main()
