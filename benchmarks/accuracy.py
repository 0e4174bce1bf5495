"""What decides accuracy and calibration, one factor at a time, on images held out of the training set.

    python benchmarks/accuracy.py PART [PART ...] --data-dir FOLDER [--jobs 2]

A narrow ResNet-18 (width 0.25) on 20,000 images of CIFAR-100, annealed to zero; evaluation on a tenth of the training
set, never on the test set. Parts: ``rates`` (each method at several learning rates, 100 and 20 classes), ``scale`` (the
logit scale on and off), ``first`` (the first layer centred or not), ``factors`` (warm-up, residual rule, rate and decay
of scalars, AdamW), ``seeds`` (the best of each with three seeds). Runs are cached in ``results/runs``; the summary is
``results/accuracy.json``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from provenance import provenance, save
from runs import available, trained

from mimicnorm.training import recipe
from mimicnorm.training.recipes import Recipe

COMMON: dict[str, Any] = {
    "limit": 20_000,
    "validation": 0.1,
    "epochs": 6,
    "schedule": "linear",
    "warmup": 0.1,
    "precision": "bf16",
}
SETS = {"fine": "cifar100", "coarse": "cifar100-coarse"}
SCALED = ("logit_scale=true",)
PAPER = ("logit_scale=false",)


def run(data: str, method: str, lr: float, seed: int = 0, settings: tuple[str, ...] = (), **changes: Any) -> Recipe:
    fields = {**COMMON, **changes}
    return recipe(
        "cifar100-resnet18-desk", data=SETS[data], method=method, lr=lr, seed=seed, settings=settings, **fields
    )


def rates() -> dict[str, Recipe]:
    made = {}
    for data in SETS:
        for lr in (0.1, 0.2, 0.4):
            made[f"{data}, batchnorm, {lr}"] = run(data, "batchnorm", lr)
            made[f"{data}, mimicnorm, {lr}"] = run(data, "mimicnorm", lr, settings=SCALED)
    return made


def scale() -> dict[str, Recipe]:
    return {f"{data}, unscaled, {lr}": run(data, "mimicnorm", lr, settings=PAPER) for data in SETS for lr in (0.1, 0.2)}


def first() -> dict[str, Recipe]:
    thresholds = ("min_fan_in=1", "min_fan_in=50")
    return {f"{data}, {t}": run(data, "mimicnorm", 0.2, settings=(*SCALED, t)) for data in SETS for t in thresholds}


def factors() -> dict[str, Recipe]:
    tried: dict[str, dict[str, Any]] = {
        "no warm-up": {"warmup": 0.0},
        "warm-up 0.3": {"warmup": 0.3},
        "residual=linear": {"settings": (*SCALED, "residual=linear")},
        "no residual scalar": {"settings": (*SCALED, "residual=null")},
        "scalars not decayed": {"decay_scalars": False},
        "scalars at 0.1 of the rate": {"scalar_rate": 0.1},
        "weight decay 1e-3": {"weight_decay": 1e-3},
        "weight decay 2e-4": {"weight_decay": 2e-4},
        "AdamW": {"optimizer": "adamw", "lr": 2e-3, "weight_decay": 0.05},
    }
    made = {}
    for name, changes in tried.items():
        made[f"coarse, {name}"] = run("coarse", "mimicnorm", **{"lr": 0.2, "settings": SCALED, **changes})
    return made


def seeds() -> dict[str, Recipe]:
    made = {}
    for data in SETS:
        for seed in (1, 2):
            for method, settings in (("batchnorm", ()), ("mimicnorm", SCALED)):
                made[f"{data}, {method}, 0.2, seed {seed}"] = run(data, method, 0.2, seed, settings)
    return made


PARTS = {"rates": rates, "scale": scale, "first": first, "factors": factors, "seeds": seeds}


def summary() -> dict[str, dict[str, Any]]:
    """Every finished run by part and label: its last epoch."""
    shown = ("top1", "test_loss", "confidence", "calibration_error", "train_accuracy")
    parts = {part: available(make()) for part, make in PARTS.items()}
    return {
        part: {
            label: {"status": row["status"], **{k: row["history"][-1].get(k) for k in shown if row["history"]}}
            for label, row in rows.items()
        }
        for part, rows in parts.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS))
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(2)
    for part in options.parts:
        trained(PARTS[part](), options.data_dir, options.jobs)
    print(save("accuracy", {**provenance(**COMMON), "parts": summary()}))


if __name__ == "__main__":
    main()
