"""Parity, which the paper lacks: BatchNorm at its best against MimicNorm's defaults, each at its own learning rate.

First every method is trained at four learning rates and judged on images held out of the training set, at desk scale in
ten epochs; where the first or the last of them is best, one beyond it is tried, too. Then each is trained at its best
rate, with several seeds. Of the test set, only the last epoch's accuracy
counts.
"""

from __future__ import annotations

from typing import Any

from mimicnorm.paper.scales import Runs, Scale, Setting
from mimicnorm.paper.tables import finals as final_rows
from mimicnorm.training.recipes import Recipe

RATES = (0.05, 0.1, 0.2, 0.4)
SEEDS = {
    ("cifar100", "batchnorm"): 3,
    ("cifar100", "mimicnorm"): 3,
    ("cifar100", "groupnorm-ws"): 1,
    ("cifar100-coarse", "batchnorm"): 1,
    ("cifar100-coarse", "mimicnorm"): 1,
}
"""Labels and methods, each with its number of seeds."""
SEARCH_SEED = 100


def _recipe(scale: Scale, labels: str, method: str, lr: float, **changes: Any) -> Recipe:
    """Return a run of a ResNet-18 with the library's defaults, annealed to 0; at desk scale on half of the images."""
    fields: dict[str, Any] = {"data": labels, "settings": (), "schedule": "linear", "warmup": 0.1, "milestones": ()}
    if scale.name == "desk":
        fields |= {"limit": 25_000, "test_limit": 0, "epochs": 25}
    return scale.recipe("cifar100", "resnet18", method, lr=lr, **{**fields, **changes})


def search(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """Each method at four learning rates, on images held out; at desk scale in ten epochs."""
    return dict(_trial(scale, labels, method, lr) for labels, method in SEEDS for lr in RATES)


def wider(scale: Scale, runs: Runs) -> dict[str, Recipe]:
    """One more rate for each method that is best at an end of the range."""
    beyond = {min(RATES): min(RATES) / 2, max(RATES): max(RATES) * 2}
    best = best_rates(_of_rates(runs, RATES))
    return dict(_trial(scale, *key, beyond[lr]) for key, lr in best.items() if lr in beyond)


def _trial(scale: Scale, labels: str, method: str, lr: float) -> tuple[str, Recipe]:
    short = {"epochs": 10} if scale.name == "desk" else {}
    made = _recipe(scale, labels, method, lr, validation=0.1, seed=SEARCH_SEED, **short)
    return f"search {labels} {method} lr {lr}", made


def _of_rates(runs: Runs, rates: tuple[float, ...]) -> Runs:
    return {label: run for label, run in runs.items() if run["recipe"]["lr"] in rates}


def best_rates(runs: Runs) -> dict[tuple[str, str], float]:
    """Return each method's learning rate whose run was best on the images held out, where at least four are there."""
    tried: dict[tuple[str, str], dict[float, float]] = {}
    for run in runs.values():
        made = run["recipe"]
        if made["validation"]:
            top1 = run["history"][-1]["top1"] if run["status"] == "done" else 0.0
            tried.setdefault((made["data"], made["method"]), {})[made["lr"]] = top1
    return {key: max(rates, key=lambda lr: rates[lr]) for key, rates in tried.items() if len(rates) >= len(RATES)}


def finals(scale: Scale, runs: Runs) -> dict[str, Recipe]:
    """Each method at its best rate, on the test set."""
    best = best_rates(runs)
    return {
        f"parity {labels} {method} seed {seed}": _recipe(scale, labels, method, best[labels, method], seed=seed)
        for (labels, method), seeds in SEEDS.items()
        if (labels, method) in best
        for seed in range(seeds)
    }


def rows(runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return a row per labels and method: the rate, final accuracies, calibration errors, divergences."""
    on_test = {label: run for label, run in runs.items() if not run["recipe"]["validation"]}
    fields = {"labels": "data", "method": "method", "lr": "lr"}
    return final_rows(on_test, lambda recipe: {k: recipe[v] for k, v in fields.items()}, "calibration_error")
