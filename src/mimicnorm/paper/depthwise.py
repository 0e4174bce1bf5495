"""ShuffleNetV2 with its depthwise layers centred, too: the paper blames them, uncentred, for a small deficit."""

from __future__ import annotations

from typing import Any

from mimicnorm.paper.scales import Runs, Scale, Setting
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
    made: dict[str, dict[str, Any]] = {}
    for run in runs.values():
        method = run["recipe"]["method"]
        way = f"{method}, depthwise centred" if "min_fan_in=1" in run["recipe"]["settings"] else method
        row = made.setdefault(way, {"way": way, "top1": [], "diverged": 0})
        if run["status"] == "done":
            row["top1"].append(100 * run["history"][-1]["top1"])
        else:
            row["diverged"] += 1
    return list(made.values())
