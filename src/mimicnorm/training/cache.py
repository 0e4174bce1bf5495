"""Finished runs as small files that are committed: ``RESULTS/runs/KEY.json``, KEY the hash of the resolved recipe.

A run that is there is read; any other is trained by ``mimicnorm train`` and written when it is over. Tables and scripts
that need the same recipe share its run; a changed default makes another key, so it never meets a stale run.
"""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import mimicnorm
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.state import METRICS, write_json
from mimicnorm.training.sweep import folder_of, run_all


def trained(
    recipes: Mapping[str, Recipe],
    results: str | Path,
    runs: str | Path,
    *,
    jobs: int = 1,
    **how: Any,
) -> dict[str, dict[str, Any]]:
    """Train what is not finished; return every run by its label: recipe, status, step, history, steps, versions.

    Args:
        recipes: What to train, by label.
        results: The folder whose ``runs`` holds finished runs, one file each.
        runs: Where the folders of ``mimicnorm train`` are: a run that was stopped resumes there.
        jobs: Runs to train at once.
        how: Other arguments of ``run_all``, such as ``data_dir``.
    """
    missing = {label: r for label, r in recipes.items() if not cache_file(r, results).exists()}
    with closing(run_all(missing, runs, jobs, **how)) as sweep:
        for label, result in sweep:
            if result.status == "interrupted":
                continue
            run = {
                "versions": {"mimicnorm": mimicnorm.__version__, "torch": torch.__version__},
                "python": platform.python_version(),
                "commit": commit(),
                "threads": max(1, torch.get_num_threads() // jobs),
                "recipe": recipes[label].resolved().as_dict(),
                "status": result.status,
                "step": result.step,
                "history": result.history,
                "steps": _steps(folder_of(label, recipes[label], runs) / METRICS),
            }
            path = cache_file(recipes[label], results)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, run)
    return finished_runs(recipes, results)


def finished_runs(recipes: Mapping[str, Recipe], results: str | Path) -> dict[str, dict[str, Any]]:
    """Return the runs that are finished, by label."""
    paths = {label: cache_file(r, results) for label, r in recipes.items()}
    return {label: json.loads(path.read_text()) for label, path in paths.items() if path.exists()}


def cache_file(recipe: Recipe, results: str | Path) -> Path:
    """Return the file of a recipe's run."""
    return Path(results) / "runs" / f"{recipe.key()}.json"


def _steps(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log that are about single steps: step, loss, and the variance of the logits.

    That is the running variance of the last BN, or of the last batch's logits in a network without one.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [
        {
            "step": line["step"],
            "loss": line["loss"],
            "variance": line.get("last_norm_variance") or line.get("logit_variance"),
        }
        for line in lines
        if "loss" in line
    ]


def seconds(run: Mapping[str, Any]) -> float:
    """Return the time that a run has trained for."""
    return sum(line.get("seconds") or 0.0 for line in run["history"])


def commit() -> str | None:
    """Return the commit of this package's code; None if it is not in a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() or None
