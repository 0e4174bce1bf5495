"""Images per second of the training loop against the bare step of the same network on one fixed batch.

    python benchmarks/training.py [--rounds 5] [--steps 12] [--data-dir FOLDER]

The bare step is forward, loss, backward and SGD on a batch that lies ready in memory; the loop is ``train`` with all
it does: order, augmentation, learning rate, counting, lines of metrics, the progress bar. Rounds of both alternate,
on the same threads; the ratio of a round is within it. The time of evaluation and checkpoints, which come once per
epoch, is given apart: their share depends on the length of an epoch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from provenance import provenance, save

from mimicnorm import data
from mimicnorm.training import network, recipe, train


def bare_rate(r, source, steps: int) -> float:
    """Images per second of the step alone."""
    model = network(r, source).to(memory_format=torch.channels_last).train()
    settings = {"lr": 1e-3, "momentum": r.momentum, "weight_decay": r.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    images, labels = next(source.batches([torch.arange(r.batch)], seed=0, epoch=0, augment=True))
    images = images.to(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    for _ in range(2):
        step()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return steps * r.batch / (time.perf_counter() - start)


def loop_rate(r, source) -> tuple[float, float]:
    """Images per second of a run's second epoch, and the seconds of all that is not training."""
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        result = train(r, Path(out) / "run", sources=(source, source), progress=True)
        seconds = time.perf_counter() - start
    return result.history[1]["images_per_second"], seconds - sum(e["seconds"] for e in result.history)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--data-dir")
    args = parser.parse_args()
    rows = {}
    for method in ("batchnorm", "mimicnorm"):
        r = recipe("cifar100-resnet18-desk", method=method, epochs=2, milestones=(), limit=args.steps * 128)
        source = data.load(r.data, "train", data_dir=args.data_dir, limit=r.limit)
        rounds = []
        for _ in range(args.rounds):
            bare = bare_rate(r, source, args.steps)
            loop, _ = loop_rate(r, source)
            again = bare_rate(r, source, args.steps)  # around the loop, so that a drift of the machine cancels
            rounds.append({"bare": [bare, again], "loop": loop, "ratio": loop / statistics.mean([bare, again])})
            print(method, rounds[-1], flush=True)
        ratio = statistics.median(row["ratio"] for row in rounds)
        rows[method] = {"loop_to_bare": ratio, "rounds": rounds}
        print(f"{method}: the loop runs at {ratio:.1%} of the bare step")
    settings = {"rounds": args.rounds, "steps": args.steps, "threads": torch.get_num_threads(), **r.as_dict()}
    save("training-throughput", {**provenance(**settings), "methods": rows})


if __name__ == "__main__":
    main()
