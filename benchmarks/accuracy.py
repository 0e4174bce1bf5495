"""What decides accuracy and calibration, on images held out of the training set; then one look at the test set.

    python benchmarks/accuracy.py PART [PART ...] --data-dir FOLDER [--jobs 2]

A narrow ResNet-18 (width 0.25) on CIFAR-100, five epochs, annealed to zero. A tenth of the training set is held out
and evaluated; only ``test``, ``mnist``, ``ten`` and ``columns`` read the test set. Run the parts in this order:

    rates    each method at three learning rates, 20,000 images with 100 and 20 classes
    wider    one more rate where the first or the last of them was best; the best of all is used below
    scale    the logit scale on and off, 10,000 images, three seeds
    first    narrow layers centred (min_fan_in=16) or not (the authors' 50), 10,000 images, three seeds
    longer   the same on 20,000 images, three seeds
    wide     ... and at twice the width, one seed
    factors  warm-up, residual rule, scalars, weight decay, AdamW: one change each, 10,000 images with 20 classes
    test     BatchNorm, MimicNorm and others at their best rates, 20,000 images, test set, three seeds
    mnist    BatchNorm and MimicNorm, three seeds, test set
    tuned    ten of the 20 classes, eight epochs: four rates for each, 10,000 images
    ten      ... at their best rates, 20,000 images, test set, three seeds
    columns  the rates 0.1 and 0.2 for all; otherwise as in ``test`` and ``ten``
    summary  of the runs that are finished; trains nothing

Runs are cached in ``results/runs``; the summary is ``results/accuracy.json``.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from provenance import ROOT, provenance, save
from runs import available, trained

from mimicnorm.pictures import canvas
from mimicnorm.pictures import save as save_picture
from mimicnorm.training import recipe
from mimicnorm.training.recipes import Recipe

COMMON: dict[str, Any] = {"limit": 20_000, "epochs": 5, "schedule": "linear", "warmup": 0.1, "precision": "bf16"}
HELD_OUT = {"validation": 0.1}
HALF = {"limit": 10_000}
NAMES = {"batchnorm": "BatchNorm", "mimicnorm": "MimicNorm"}
LABELS = {"fine": "100 classes", "coarse": "20 classes"}
RIVALS = ("groupnorm-ws", "weight-mean")  # at MimicNorm's learning rate
SETS = ("fine", "coarse")
DATA: dict[str, dict[str, Any]] = {
    "fine": {"data": "cifar100"},
    "coarse": {"data": "cifar100-coarse"},
    "ten": {"data": "cifar100-coarse", "classes": "0-9", "epochs": 8},
}
RATES = (0.1, 0.2, 0.4)
TEN_RATES = (0.05, *RATES)
SEEDS = (0, 1, 2)
MIMICNORM = ("logit_scale=true", "min_fan_in=16")
UNSCALED = ("logit_scale=false", "min_fan_in=16")
NARROW_LAYERS = {"min_fan_in=16": MIMICNORM, "min_fan_in=50": ("logit_scale=true", "min_fan_in=50")}
SETTINGS = {"mimicnorm": MIMICNORM, "weight-mean": ("min_fan_in=16",)}
WAYS = {
    "BatchNorm": ("batchnorm", ()),
    "MimicNorm": ("mimicnorm", MIMICNORM),
    "MimicNorm without a logit scale": ("mimicnorm", UNSCALED),
    "weight mean": ("weight-mean", SETTINGS["weight-mean"]),
    "GroupNorm and WS": ("groupnorm-ws", ()),
}
COLUMNS: dict[str, dict[str, tuple[float, ...]]] = {
    "ten": {
        "BatchNorm": (0.1, 0.2),
        "MimicNorm": (0.1, 0.2),
        "MimicNorm without a logit scale": (0.1,),
        "weight mean": (0.1,),
        "GroupNorm and WS": (0.2,),
    },
    "fine": {"BatchNorm": (0.1, 0.2), "MimicNorm": (0.1, 0.2), "MimicNorm without a logit scale": (0.1,)},
}


def run(labels: str, method: str, lr: float, seed: int = 0, **changes: Any) -> Recipe:
    fields = {"settings": SETTINGS.get(method, ()), **COMMON, **HELD_OUT, **DATA[labels], **changes}
    return recipe("cifar100-resnet18-desk", method=method, lr=lr, seed=seed, **fields)


def rates() -> dict[str, Recipe]:
    return {
        f"{data}, {method}, {lr}": run(data, method, lr)
        for data in SETS
        for lr in RATES
        for method in ("batchnorm", "mimicnorm")
    }


def wider() -> dict[str, Recipe]:
    beyond = {min(RATES): min(RATES) / 2, max(RATES): max(RATES) * 2}
    return {
        f"{data}, {method}, {beyond[lr]}": run(data, method, beyond[lr])
        for data in SETS
        for method in ("batchnorm", "mimicnorm")
        if (lr := best_rate(data, method, RATES)) in beyond
    }


def best_rate(data: str, method: str, rates: tuple[float, ...] = (min(RATES) / 2, *RATES, 2 * max(RATES))) -> float:
    """Return the rate with the best accuracy on images held out; other methods take MimicNorm's."""
    tuned = method if method == "batchnorm" else "mimicnorm"
    runs = available({str(lr): run(data, tuned, lr) for lr in rates})
    if len(runs) < len(RATES):
        raise SystemExit("run the parts `rates` and `wider` first")
    return float(max(runs, key=lambda lr: runs[lr]["history"][-1]["top1"] if runs[lr]["history"] else 0.0))


def _over_seeds(
    ways: dict[str, tuple[str, ...]], size: str = "", seeds: tuple[int, ...] = SEEDS, **changes: Any
) -> dict[str, Recipe]:
    return {
        f"{data}, {size}{name}, seed {seed}": run(
            data, "mimicnorm", best_rate(data, "mimicnorm"), seed, settings=settings, **changes
        )
        for data in SETS
        for seed in seeds
        for name, settings in ways.items()
    }


def scale() -> dict[str, Recipe]:
    return _over_seeds({"scaled": MIMICNORM, "unscaled": UNSCALED}, **HALF)


def first() -> dict[str, Recipe]:
    return _over_seeds(NARROW_LAYERS, **HALF)


def longer() -> dict[str, Recipe]:
    return _over_seeds(NARROW_LAYERS, "20,000 images, ")


def wide() -> dict[str, Recipe]:
    return _over_seeds(NARROW_LAYERS, "width 0.5, ", (0,), width=0.5)


def factors() -> dict[str, Recipe]:
    tried: dict[str, dict[str, Any]] = {
        "as it is": {},
        "no warm-up": {"warmup": 0.0},
        "warm-up 0.3": {"warmup": 0.3},
        "residual=linear": {"settings": (*MIMICNORM, "residual=linear")},
        "no residual scalar": {"settings": (*MIMICNORM, "residual=null")},
        "scalars and biases not decayed": {"decay_scalars": False},
        "scalars at 0.1 of the rate": {"scalar_rate": 0.1},
        "weight decay 1e-3": {"weight_decay": 1e-3},
        "weight decay 2e-4": {"weight_decay": 2e-4},
        "AdamW, 0.002": {"optimizer": "adamw", "lr": 2e-3, "weight_decay": 0.05},
    }
    rates = {method: best_rate("coarse", method) for method in NAMES}
    cells = [("mimicnorm", name) for name in tried]
    cells += [("batchnorm", name) for name in ("as it is", "warm-up 0.3", "AdamW, 0.002")]
    return {
        f"{method}, {name}": run("coarse", method, **{"lr": rates[method], **HALF, **tried[name]})
        for method, name in cells
    }


def test() -> dict[str, Recipe]:
    methods = {"fine": tuple(NAMES), "coarse": (*NAMES, *RIVALS)}
    return {
        f"{data}, {method}, seed {seed}": run(data, method, best_rate(data, method), seed, validation=0.0)
        for data in SETS
        for method in methods[data]
        for seed in SEEDS
    }


def mnist() -> dict[str, Recipe]:
    changes: dict[str, Any] = {"data": "mnist", "validation": 0.0, "limit": 10_000, "epochs": 3}
    return {
        f"mnist, {method}, seed {seed}": run("coarse", method, best_rate("coarse", method), seed, **changes)
        for method in ("batchnorm", "mimicnorm")
        for seed in SEEDS
    }


def tuned() -> dict[str, Recipe]:
    return {f"ten, {method}, {lr}": run("ten", method, lr, **HALF) for lr in TEN_RATES for method in NAMES}


def ten() -> dict[str, Recipe]:
    runs = available(tuned())
    if len(runs) < len(NAMES) * len(TEN_RATES):
        return {}  # run the part `tuned` first
    best: dict[str, float] = {}
    for method in NAMES:
        tops = {lr: runs[f"ten, {method}, {lr}"]["history"][-1]["top1"] for lr in TEN_RATES}
        best[method] = max(tops, key=tops.__getitem__)
    best |= dict.fromkeys(RIVALS, best["mimicnorm"])
    return {
        f"ten, {method}, seed {seed}": run("ten", method, lr, seed, validation=0.0)
        for method, lr in best.items()
        for seed in SEEDS
    }


def columns() -> dict[str, Recipe]:
    return {
        f"{data}, {way}, {lr}, seed {seed}": run(data, method, lr, seed, validation=0.0, settings=settings)
        for data, cells in COLUMNS.items()
        for way, rates in cells.items()
        for method, settings in [WAYS[way]]
        for lr in rates
        for seed in SEEDS
    }


PARTS = {
    part.__name__: part
    for part in (rates, wider, scale, first, longer, wide, factors, test, mnist, tuned, ten, columns)
}


def summary() -> dict[str, dict[str, Any]]:
    """Every finished run by part and label: its rate and its last epoch."""
    shown = ("top1", "test_loss", "confidence", "calibration_error", "train_accuracy")
    parts: dict[str, dict[str, Any]] = {}
    for part, make in PARTS.items():
        for label, row in available(make()).items():
            last = row["history"][-1] if row["history"] else {}
            about = {"lr": row["recipe"]["lr"], "status": row["status"]}
            parts.setdefault(part, {})[label] = about | {name: last.get(name) for name in shown}
    return parts


def figure() -> None:
    """Draw accuracy by epoch on the test set: a thin line per seed, a thick one for their mean."""
    panels, axes = canvas(1, 2, 8.6, 3.2)
    runs = available(test())
    for axis, data in zip(axes, SETS, strict=True):
        for method, colour in (("batchnorm", "#1f5fae"), ("mimicnorm", "#c4411a")):
            labels = [f"{data}, {method}, seed {seed}" for seed in SEEDS]
            curves = [[100 * line["top1"] for line in runs[name]["history"]] for name in labels if name in runs]
            for curve in curves:
                axis.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=0.8, alpha=0.45)
            means = [statistics.mean(epoch) for epoch in zip(*curves, strict=True)]
            if means:
                epochs = range(1, len(means) + 1)
                axis.plot(epochs, means, "o-", color=colour, markersize=3, label=NAMES[method])
        axis.set_title(f"{LABELS[data]}: accuracy on the test set, %", fontsize=10)
        axis.set_xlabel("epoch")
        axis.set_xticks(range(1, COMMON["epochs"] + 1))
    axes[0].legend(frameon=False)
    save_picture(panels, ROOT / "docs" / "figures" / "accuracy.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "summary"])
    parser.add_argument("--data-dir")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.jobs)  # one each: two threads of one run wait for each other on a busy machine
    for part in options.parts:
        if part != "summary":
            trained(PARTS[part](), options.data_dir, options.jobs)
    print(save("accuracy", {**provenance(**COMMON), "parts": summary()}))
    figure()


if __name__ == "__main__":
    main()
