"""Training runs as a cache: ``results/runs/KEY.json`` holds one run, KEY the hash of its resolved recipe.

A run that is there is read; any other is trained by ``mimicnorm train``, resumes if it was stopped, and is written when
it is finished. Runs are shared between scripts: the same recipe is trained once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import torch
from provenance import RESULTS, ROOT, provenance, save

from mimicnorm.training import run_all
from mimicnorm.training.recipes import Recipe

FOLDER = RESULTS / "runs"


def trained(recipes: Mapping[str, Recipe], data_dir: str, jobs: int = 2, out: Path = ROOT / "runs") -> dict[str, dict]:
    """Train what is missing; return every run by its label: status, recipe, history, provenance."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    missing = {label: r for label, r in recipes.items() if not _file(r).exists()}
    with closing(run_all(missing, out, jobs, data_dir=data_dir)) as results:
        for label, result in results:
            if result.status != "interrupted":
                row = {"recipe": recipes[label].resolved().as_dict(), "status": result.status, "step": result.step}
                about = provenance(threads=max(1, torch.get_num_threads() // jobs))
                save(f"runs/{recipes[label].key()}", {**about, **row, "history": result.history})
    return available(recipes)


def available(recipes: Mapping[str, Recipe]) -> dict[str, dict]:
    """Return the runs that are finished, by label."""
    return {label: json.loads(_file(r).read_text()) for label, r in recipes.items() if _file(r).exists()}


def _file(recipe: Recipe) -> Path:
    return FOLDER / f"{recipe.key()}.json"
