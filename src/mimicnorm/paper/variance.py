"""Appendix B.2: the variance of the logits in the first two epochs, with a last BN and without one."""

from __future__ import annotations

from typing import Any

from mimicnorm.paper.scales import Runs, Scale, Setting
from mimicnorm.training.recipes import Recipe

NETWORKS = ("vgg11", "resnet18")


def recipes(scale: Scale, _runs: Runs) -> dict[str, Recipe]:
    """Two epochs at a learning rate of 0.1 from the first step on, every step logged."""
    start = {"epochs": 2, "lr": 0.1, "warmup": 0.0, "milestones": (), "log_every": 1}
    return {
        f"variance {network} {method}": scale.recipe("cifar100", network, method, **start)
        for network in NETWORKS
        for method in ("mimicnorm", "last-bn", "nonorm")
    }


def rows(runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return a row per network and method: variance of the classes' logits by step (least, median, largest)."""
    made = []
    for run in runs.values():
        lines = [line for line in run.get("steps", []) if line.get("variance")]
        row = {"network": run["recipe"]["model"], "method": run["recipe"]["method"], "status": run["status"]}
        row |= {"step": [line["step"] for line in lines]}
        row |= {k: [line["variance"][k] for line in lines] for k in ("min", "median", "max")}
        row["diverged_at"] = run["step"] if run["status"] == "diverged" else None
        made.append(row)
    return made
