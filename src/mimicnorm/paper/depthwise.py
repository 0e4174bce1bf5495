"""ShuffleNetV2 with its depthwise layers centred, too: the paper blames them, uncentred, for a small deficit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mimicnorm.paper.scales import Runs, Scale, Setting
from mimicnorm.paper.tables import finals
from mimicnorm.training.recipes import Recipe

NETWORK = "shufflenetv2"
CENTRED = ("logit_scale=false", "min_fan_in=1")
"""The authors' settings, except that every layer is centred."""


def recipes(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """Table 1's two runs of the network, and one more with every layer centred; the network's seeds each."""
    made = {}
    for seed in scale.seeds_of(NETWORK):
        for method in ("batchnorm", "mimicnorm"):
            made[f"cifar100 {NETWORK} {method} seed {seed}"] = scale.recipe("cifar100", NETWORK, method, seed=seed)
        label = f"cifar100 {NETWORK} mimicnorm, depthwise centred, seed {seed}"
        made[label] = scale.recipe("cifar100", NETWORK, "mimicnorm", seed=seed, settings=CENTRED)
    return made


def rows(runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return a row per way: final accuracies in percent, and how many runs diverged."""

    def way(recipe: Mapping[str, Any]) -> dict[str, str]:
        centred = ", depthwise centred" if "min_fan_in=1" in recipe["settings"] else ""
        return {"way": recipe["method"] + centred}

    return finals(runs, way)
