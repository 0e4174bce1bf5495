"""Train a narrow ResNet-18 on CIFAR-100 with BatchNorm and with MimicNorm, same recipe, same seed.

MimicNorm once as the recipe has it (at a quarter of the width, layers with a fan-in above 12 are centred), once with
the authors' threshold of 50.

    python benchmarks/cifar100.py --data-dir FOLDER [--runs runs/cifar100] [--threads 1]

Ten minutes each on one core. Each run is a folder of ``mimicnorm train``, so it resumes; a run that is
finished there is read. Writes ``results/training-cifar100.json`` and ``docs/figures/training-cifar100.png``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from provenance import ROOT, provenance, save

from mimicnorm.training import recipe, train

METHODS = {"batchnorm": "#1f5fae", "mimicnorm": "#c4411a", "mimicnorm+min_fan_in=50": "#2e7d32"}
CHANGES: dict = {"limit": 20_000, "epochs": 10, "milestones": (0.5, 0.7, 0.9), "warmup": 0.2, "precision": "bf16"}


def figure(runs: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, (accuracy, loss) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for method, colour in METHODS.items():
        epochs = [line["epoch"] for line in runs[method]["history"]]
        for axes, solid, dotted, factor in (
            (accuracy, "top1", "train_accuracy", 100),
            (loss, "test_loss", "train_loss", 1),
        ):
            axes.plot(epochs, [factor * line[solid] for line in runs[method]["history"]], color=colour, label=method)
            axes.plot(epochs, [factor * line[dotted] for line in runs[method]["history"]], color=colour, ls=":")
    for axes, title in ((accuracy, "accuracy, %"), (loss, "cross entropy")):
        axes.set_title(f"{title} (dotted: training images)", fontsize=10)
        axes.set_xlabel("epoch")
        axes.spines[["top", "right"]].set_visible(False)
    accuracy.legend(frameon=False)
    drawn.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "cifar100")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    runs: dict[str, dict] = {}
    for label in METHODS:
        method, *settings = label.split("+")
        made = recipe("cifar100-resnet18-desk", method=method, settings=tuple(settings), **CHANGES)
        folder = options.runs / f"{label}-seed{made.seed}"
        result = train(made, folder, data_dir=options.data_dir)
        if result.status == "interrupted":
            raise SystemExit(130)
        written = json.loads((folder / "recipe.json").read_text())
        runs[label] = {"status": result.status, "top1": result.top1, "recipe": written, "history": result.history}
    about = provenance(recipe="cifar100-resnet18-desk", threads=options.threads, **CHANGES)
    print(save("training-cifar100", {**about, "runs": runs}))
    figure(runs, ROOT / "docs" / "figures" / "training-cifar100.png")


if __name__ == "__main__":
    main()
