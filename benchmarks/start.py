"""What the first two epochs depend on: a narrow ResNet-18 on CIFAR-100, one thing changed at a time.

    python benchmarks/start.py --data-dir FOLDER [--threads 1]

Two epochs of 20,000 images (312 steps, of which 156 are warm-up) per row, one seed, a minute each on one core; and how
much of what the first layer reads is its mean, which centring takes away. Writes ``results/training-start.json``; rows
are kept, so the same command goes on.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from provenance import Rows

from mimicnorm import data
from mimicnorm.training import recipe, train

BASE: dict = {"epochs": 2, "milestones": (), "warmup": 0.5, "limit": 20_000, "precision": "bf16"}
AUTHORS: dict = {"settings": ("min_fan_in=50",)}  # by itself a recipe of this width takes 12
ROWS: tuple[tuple[str, dict], ...] = (
    ("batchnorm", {}),
    ("batchnorm", {"classifier_variance": 2.0}),
    ("mimicnorm", AUTHORS),
    ("mimicnorm", {**AUTHORS, "classifier_variance": 2.0}),
    ("mimicnorm", {**AUTHORS, "init": "calibrate"}),
    ("mimicnorm", {**AUTHORS, "warmup": 0.125}),
    ("mimicnorm", {"settings": ("min_fan_in=27",)}),  # also the projection with a fan-in of 32
    ("mimicnorm", {"settings": ("min_fan_in=16",)}),  # ... and the first layer, 27
    ("mimicnorm", {}),  # ... and the projection with 16
)


def share_of_means(data_dir: str) -> float:
    """Of the energy of 3 x 3 patches of 2,000 training images, how much their means hold."""
    source = data.load("cifar100", "train", data_dir=data_dir, limit=2000)
    images, _ = next(iter(source.batches([torch.arange(2000)], seed=0, epoch=0, augment=False)))
    patches = torch.nn.functional.unfold(images, 3)
    return float(patches.mean(1).square().mean() / patches.square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    share = share_of_means(asked.data_dir)
    rows = Rows("training-start", "method", "changes", recipe="cifar100-resnet18-desk", threads=asked.threads, **BASE)
    for method, changes in ROWS:
        if (method, changes) in rows:
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = recipe("cifar100-resnet18-desk", method=method, **{**BASE, **changes})
            result = train(run, Path(folder) / "run", data_dir=asked.data_dir, progress=False)
        last = result.history[-1] if result.status == "done" else {}
        kept = {k: last.get(k) for k in ("top1", "train_loss", "train_accuracy", "last_norm_variance")}
        rows.add({"method": method, "changes": changes, "status": result.status, **kept}, share_of_means=share)


if __name__ == "__main__":
    main()
