"""Appendix C's outlook: "full integral training is possible under our method, which may lead to 4x throughput".

Two networks on scikit-learn's digits, each in integers and in fp32 under the same recipe, at any scale.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from mimicnorm.paper.scales import Runs, Scale, Setting, authors_settings
from mimicnorm.paper.tables import finals
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

    def fields(recipe: Mapping[str, Any]) -> dict[str, str]:
        return {"network": recipe["model"], "precision": recipe["precision"]}

    made = finals(runs, fields)
    for row in made:
        group = [run for run in runs.values() if fields(run["recipe"]).items() <= row.items()]
        speeds = [line["images_per_second"] for run in group for line in run["history"]]
        row["images_per_second"] = statistics.median(speeds) if speeds else 0.0
    return made
