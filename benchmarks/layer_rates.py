"""How fast each layer moves under BatchNorm and under MimicNorm, and whether the last BN's statistics lag behind.

    python benchmarks/layer_rates.py --data-dir FOLDER [--runs runs/layer-rates]

The runs of ``benchmarks/accuracy.py factors`` (20 classes, 10,000 images, five epochs, seed 0), each method at its best
rate. Every tenth step the relative change of each weight, |W' - W| / |W|, is noted: under BatchNorm, which makes layers
scale-invariant, it is the rate that counts. Then the last BN of the trained network gets the mean and the variance of
the logits over all training images, not augmented, in place of its running statistics, and is evaluated again. Writes
``results/layer-rates.json``.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy import HALF, best_rate, run
from provenance import ROOT, provenance, save
from torch import Tensor, nn

from mimicnorm.data import Source
from mimicnorm.layers import LastNorm
from mimicnorm.training import finished, train
from mimicnorm.training.step import Trainer

EVERY = 10


class Measured(Trainer):
    """A trainer that notes how far every tenth step moves each weight."""

    def __init__(self, *args: Any, changes: dict[str, list[float]]):
        super().__init__(*args)
        layers = [(n, m) for n, m in self.bare.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        self.weights = {name: layer.weight for name, layer in layers}
        self.changes = changes

    def step(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        before = {n: w.detach().clone() for n, w in self.weights.items()} if step % EVERY == 0 else {}
        result = super().step(images, labels, step)
        for name, weight in before.items():
            moved = (self.weights[name].detach() - weight).norm() / weight.norm()
            self.changes.setdefault(name, []).append(float(moved))
        return result


@torch.no_grad()
def accuracy(model: nn.Module, source: Source) -> float:
    return sum(int((model(x).argmax(1) == y).sum()) for x, y in source.plain_batches(250)) / len(source)


@torch.no_grad()
def with_statistics_of(model: nn.Module, source: Source) -> None:
    """Give every LastNorm the statistics of its logits over all images of a source."""
    norms = [m for m in model.modules() if isinstance(m, LastNorm)]
    for norm in norms:
        norm.momentum = None  # average all batches alike
        norm.reset_running_stats()
        norm.train()
    for x, _ in source.plain_batches(250):
        model(x)
    for norm in norms:
        norm.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "layer-rates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, Any] = {}
    for method in ("batchnorm", "mimicnorm"):
        changes: dict[str, list[float]] = {}
        made = run("coarse", method, best_rate("coarse", method), **HALF)
        trainer = partial(Measured, changes=changes)
        result = train(made, options.runs / method, data_dir=options.data_dir, make_trainer=trainer)
        if not changes:
            raise SystemExit(f"{options.runs / method} is a finished run, which was measured: remove it to do so again")
        fifths = {
            name: [statistics.mean(c[i * len(c) // 5 : (i + 1) * len(c) // 5]) for i in range(5)]
            for name, c in changes.items()
        }
        measured[method] = {"lr": made.lr, "top1": result.top1, "relative_change_by_epoch": fifths}
    trained = finished(options.runs / "mimicnorm", data_dir=options.data_dir)
    running = accuracy(trained.model, trained.test_set)
    with_statistics_of(trained.model, trained.train_set)
    measured["mimicnorm"]["fp32_top1"] = {
        "running statistics": running,
        "statistics of all training images": accuracy(trained.model, trained.test_set),
    }
    print(save("layer-rates", {**provenance(every=EVERY, **HALF), "methods": measured}))


if __name__ == "__main__":
    main()
