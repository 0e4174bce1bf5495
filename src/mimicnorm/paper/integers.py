"""Appendix C's outlook: "full integral training is possible under our method, which may lead to 4x throughput".

Two networks on scikit-learn's digits, each in integers and in fp32 under the same recipe, at any scale.
"""

from __future__ import annotations

import statistics
from typing import Any

from mimicnorm.paper.scales import Runs, Scale, Setting, authors_settings
from mimicnorm.training.recipes import RECIPES, Recipe, recipe

NETWORKS = ("resnet10", "vgg11")
SEEDS = 3
MOMENTUM = 0.875
"""Integers have eighths; fp32 gets the same."""


def recipes(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """Every network in integers and in fp32, three seeds each."""
    settings = authors_settings("mimicnorm", RECIPES["digits-resnet10"].width)
    return {
        f"digits {network} {precision} seed {seed}": scale.trial_of(
            recipe(
                "digits-resnet10",
                model=network,
                settings=settings,
                precision=precision,
                momentum=MOMENTUM,
                seed=seed,
            )
        )
        for network in NETWORKS
        for seed in range(SEEDS)
        for precision in ("fp32", "int8")
    }


def rows(runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return a row per network and precision: final accuracies in percent, divergences, images a second (median)."""
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs.values():
        network, precision = run["recipe"]["model"], run["recipe"]["precision"]
        start = {"network": network, "precision": precision, "top1": [], "diverged": 0, "images_per_second": []}
        row = made.setdefault((network, precision), start)
        row["images_per_second"] += [line["images_per_second"] for line in run["history"]]
        if run["status"] == "done":
            row["top1"].append(100 * run["history"][-1]["top1"])
        else:
            row["diverged"] += 1
    for row in made.values():
        speeds = row["images_per_second"]
        row["images_per_second"] = statistics.median(speeds) if speeds else 0.0
    return list(made.values())
