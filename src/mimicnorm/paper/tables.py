"""Tables 1 to 3 and the ablations: their recipes, and the reducers from runs to rows.

Items share runs: a curve of an ablation is the same recipe as a cell of Table 1, so it is trained once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from mimicnorm.paper.published import TABLE1, TABLE2, TABLE3
from mimicnorm.paper.scales import GUESSING, Runs, Scale, Setting
from mimicnorm.training.recipes import Recipe

Stage = Callable[[Scale, Runs], dict[str, Recipe]]
"""From a scale and the runs of the stages before to the recipes of the next, by label."""

ABLATION = ("batchnorm", "mimicnorm", "weight-mean", "last-bn", "nonorm")

# -- recipes -----------------------------------------------------------------------------------------------------


def grid(scale: Scale, data: str, methods: Mapping[str, Any]) -> dict[str, Recipe]:
    """Return the recipes of networks and their methods, each with the network's seeds."""
    return {
        f"{data} {network} {method} seed {seed}": scale.recipe(data, network, method, seed=seed)
        for network in methods
        for seed in scale.seeds_of(network)
        for method in methods[network]
    }


def table1(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """Every cell of the table."""
    return grid(scale, "cifar100", TABLE1)


def table2(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """Ten epochs at a constant rate: in the paper's recipe no milestone comes before epoch 80."""
    start = {"epochs": 10, "warmup": 0.2, "milestones": ()}
    return {
        f"vgg16 {method} lr {lr}": scale.recipe("cifar100", "vgg16", method, lr=lr, **start)
        for lr in TABLE2
        for method in TABLE2[lr]
    }


def table3(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """One seed each. There is no desk scale of ImageNet: the recipes are always the paper's."""
    return grid(Scale("paper", default=1, max_steps=scale.max_steps), "imagenet", TABLE3)


def ablation(*networks: str) -> Stage:
    """Both parts, each alone, neither; Fixup on residual networks."""

    def stage(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
        methods = {n: (*ABLATION, *["fixup"] * n.startswith("resnet")) for n in networks}
        return grid(scale, "cifar100", methods)

    return stage


# -- rows --------------------------------------------------------------------------------------------------------


def best_top1(run: Mapping[str, Any]) -> float:
    """Return the best accuracy of any epoch, in percent; that of guessing for a run that diverged in the first."""
    return max((100 * line["top1"] for line in run["history"]), default=GUESSING)


def finals(runs: Runs, fields: Callable[[Mapping[str, Any]], dict[str, Any]], *also: str) -> list[dict[str, Any]]:
    """Return a row per group of runs: its fields, final accuracies in percent, and how many runs diverged.

    Args:
        runs: The runs.
        fields: From a recipe to the fields of its row; runs with the same fields make a group.
        also: Other numbers of the last epoch, a list each.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs.values():
        group = fields(run["recipe"])
        start = {**group, "top1": [], **{name: [] for name in also}, "diverged": 0}
        row = rows.setdefault(tuple(group.values()), start)
        if run["status"] == "done":
            last = run["history"][-1]
            row["top1"].append(100 * last["top1"])
            for name in also:
                row[name].append(last[name])
        else:
            row["diverged"] += 1
    return list(rows.values())


def accuracies(runs: Runs) -> list[dict[str, Any]]:
    """Return a row per network and method: final accuracies, divergences."""
    return finals(runs, lambda recipe: {"network": recipe["model"], "method": recipe["method"]})


def by_rate(runs: Runs, _setting: Setting | None = None) -> list[dict[str, Any]]:
    """Return a row per learning rate: the best accuracy of each method, in percent."""
    rows: dict[float, dict[str, Any]] = {}
    for run in runs.values():
        lr = run["recipe"]["lr"]
        rows.setdefault(lr, {"lr": lr})[run["recipe"]["method"]] = best_top1(run)
    return [rows[lr] for lr in sorted(rows)]


def curves(runs: Runs, _setting: Setting | None = None) -> list[dict[str, Any]]:
    """Return a row per network and method: mean accuracy after each epoch, final ones, and how many runs diverged.

    A run that diverged counts as guessing from there on, or its method would be judged by the other seeds.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs.values():
        network, method = run["recipe"]["model"], run["recipe"]["method"]
        history = [100 * line["top1"] for line in run["history"]]
        history += [GUESSING] * (run["recipe"]["epochs"] - len(history))
        start = {"network": network, "method": method, "histories": [], "diverged": 0}
        row = rows.setdefault((network, method), start)
        row["histories"].append(history)
        row["diverged"] += run["status"] == "diverged"
    for row in rows.values():
        histories = row.pop("histories")
        row["top1"] = [statistics.mean(epoch) for epoch in zip(*histories, strict=True)]
        row["final"] = [history[-1] for history in histories]
    return list(rows.values())
