"""Training runs that several scripts share, cached in ``results/runs``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from provenance import RESULTS, ROOT

from mimicnorm.training import cache, recipe
from mimicnorm.training.recipes import Recipe

FOLDER = RESULTS
RUNS = ROOT / "runs"
SHORT: dict[str, Any] = {"epochs": 10, "limit": 8000, "test_limit": 4000, "schedule": "linear", "warmup": 0.2}


def short(method: str, seed: int = 0, **changes: Any) -> Recipe:
    """Return what several scripts train: a narrow ResNet-18, ten epochs on 8,000 images of CIFAR-100, annealed to 0."""
    return recipe("cifar100-resnet18-desk", method=method, seed=seed, **{**SHORT, **changes})


def trained(recipes: Mapping[str, Recipe], data_dir: str, jobs: int = 2) -> dict[str, dict]:
    """Train what is missing; return every run by its label."""
    return cache.trained(recipes, FOLDER, RUNS, jobs=jobs, data_dir=data_dir)


def available(recipes: Mapping[str, Recipe]) -> dict[str, dict]:
    """Return the runs that are finished, by label."""
    return cache.finished_runs(recipes, FOLDER)
