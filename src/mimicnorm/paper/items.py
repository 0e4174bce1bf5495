"""The items that train: each is a dict of recipes and a function from their runs to the item's rows.

Items share runs: a curve of an ablation is the same recipe as a cell of Table 1, so it is trained once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mimicnorm.paper.published import TABLE1, TABLE2, TABLE3
from mimicnorm.training.recipes import Recipe, recipe

Runs = Mapping[str, Mapping[str, Any]]
"""By label: ``recipe``, ``status``, ``step`` and ``history`` of a finished run."""

GUESSING = 1.0
"""Accuracy of guessing among CIFAR-100's classes, in percent."""
_PAPER_SETTINGS = {"mimicnorm": ("logit_scale=false",), "last-bn": ("logit_scale=false",)}


@dataclass(frozen=True)
class Scale:
    """How large the runs of an item are.

    Attributes:
        suffix: Of the recipes' names.
        changes: Fields that differ from those recipes, for every network.
        seeds: How many, by network; ``default`` for the others.
        default: Seeds of networks that ``seeds`` does not name.
    """

    suffix: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    default: int = 3

    def recipe(self, data: str, network: str, method: str, **changes: Any) -> Recipe:
        """Return a recipe with the settings of the paper's authors."""
        fields = {**self.changes, "settings": _PAPER_SETTINGS.get(method, ()), **changes}
        return recipe(f"{data}-{network}{self.suffix}", method=method, **fields)

    def seeds_of(self, network: str) -> range:
        """Return the seeds that a network is trained with."""
        return range(self.seeds.get(network, self.default))


SCALES = {
    "desk": Scale(
        suffix="-desk",  # a quarter of the width, 12 epochs
        changes={"limit": 10_000, "test_limit": 5000, "precision": "bf16"},
        seeds={"resnet50": 2, "vgg16": 2},
    ),
    "paper": Scale(),
}
"""``desk``: narrow networks on a fifth of CIFAR-100, minutes per run on one core. ``paper``: the paper's recipes."""


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        title: What it shows.
        recipes: The runs it needs at a scale, by label.
        rows: From those runs that are finished to the item's rows.
        needs_gpus: Whether even its desk scale is out of reach of a CPU.
    """

    title: str
    recipes: Callable[[Scale], dict[str, Recipe]]
    rows: Callable[[Runs], list[dict[str, Any]]]
    needs_gpus: bool = False


# -- recipes -----------------------------------------------------------------------------------------------------


def _grid(scale: Scale, data: str, methods: Mapping[str, Any]) -> dict[str, Recipe]:
    return {
        f"{data} {network} {method} seed {seed}": scale.recipe(data, network, method, seed=seed)
        for network in methods
        for seed in scale.seeds_of(network)
        for method in methods[network]
    }


def _table1(scale: Scale) -> dict[str, Recipe]:
    return _grid(scale, "cifar100", TABLE1)


def _table2(scale: Scale) -> dict[str, Recipe]:
    """Ten epochs at a constant rate: in the paper's recipe no milestone comes before epoch 80."""
    start = {"epochs": 10, "warmup": 0.2, "milestones": ()}
    return {
        f"vgg16 {method} lr {lr}": scale.recipe("cifar100", "vgg16", method, lr=lr, **start)
        for lr in TABLE2
        for method in TABLE2[lr]
    }


def _table3(scale: Scale) -> dict[str, Recipe]:
    return _grid(Scale(default=1, changes=scale.changes if not scale.suffix else {}), "imagenet", TABLE3)


def _ablation(*networks: str) -> Callable[[Scale], dict[str, Recipe]]:
    methods = ("batchnorm", "mimicnorm", "weight-mean", "last-bn", "nonorm")

    def recipes(scale: Scale) -> dict[str, Recipe]:
        chosen = {n: (*methods, *["fixup"] * n.startswith("resnet")) for n in networks}
        return _grid(scale, "cifar100", chosen)

    return recipes


# -- rows --------------------------------------------------------------------------------------------------------


def best_top1(run: Mapping[str, Any]) -> float:
    """Return the best accuracy of any epoch, in percent; that of guessing for a run that diverged in the first."""
    return max((100 * line["top1"] for line in run["history"]), default=GUESSING)


def accuracies(runs: Runs) -> list[dict[str, Any]]:
    """Return a row per network and method: final accuracies in percent, and how many runs diverged."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs.values():
        model, method = run["recipe"]["model"], run["recipe"]["method"]
        row = rows.setdefault((model, method), {"network": model, "method": method, "top1": [], "diverged": 0})
        if run["status"] == "done":
            row["top1"].append(100 * run["history"][-1]["top1"])
        else:
            row["diverged"] += 1
    return list(rows.values())


def by_rate(runs: Runs) -> list[dict[str, Any]]:
    """Return a row per learning rate: the best accuracy of each method, in percent."""
    rows: dict[float, dict[str, Any]] = {}
    for run in runs.values():
        lr = run["recipe"]["lr"]
        rows.setdefault(lr, {"lr": lr})[run["recipe"]["method"]] = best_top1(run)
    return [rows[lr] for lr in sorted(rows)]


def curves(runs: Runs) -> list[dict[str, Any]]:
    """Return a row per network and method: the mean accuracy after each epoch, over the seeds that got there."""
    histories: dict[tuple[str, str], list[list[float]]] = {}
    for run in runs.values():
        history = [100 * line["top1"] for line in run["history"]]
        histories.setdefault((run["recipe"]["model"], run["recipe"]["method"]), []).append(history)
    rows = []
    for (network, method), group in histories.items():
        longest = max(map(len, group))
        reached = [[h[epoch] for h in group if len(h) > epoch] for epoch in range(longest)]
        rows.append({"network": network, "method": method, "top1": [statistics.mean(epoch) for epoch in reached]})
    return rows


ITEMS = {
    "table1": Item("CIFAR-100, six networks: accuracy", _table1, accuracies),
    "table2": Item("VGG16 at seven learning rates: best accuracy in ten epochs", _table2, by_rate),
    "table3": Item("ImageNet, five networks: accuracy", _table3, accuracies, needs_gpus=True),
    "figure-vgg-ablation": Item("VGG16: both parts, each alone, none", _ablation("vgg16"), curves),
    "figure-resnet-ablation": Item("ResNet18 and 50: the same", _ablation("resnet18", "resnet50"), curves),
}
"""Every item that trains, by name."""
