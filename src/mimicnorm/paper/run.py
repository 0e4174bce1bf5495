"""Run an item: train what is missing (``training/cache``), reduce the runs to rows, write them with their verdicts."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import mimicnorm
from mimicnorm.arguments import positive_int
from mimicnorm.paper.items import ITEMS
from mimicnorm.paper.scales import SCALES, Setting
from mimicnorm.training.cache import commit, finished_runs, seconds, trained
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.state import write_json
from mimicnorm.training.sweep import Launcher


def reproduce(
    item: str,
    scale: str = "desk",
    *,
    results: str | Path = "results",
    runs: str | Path = "runs",
    jobs: int = 1,
    data_dir: str | Path | None = None,
    device: str = "auto",
    max_steps: int | None = None,
    images: str = "mnist",
    launcher: Launcher | None = None,
    gpus: int = 1,
    only_finished: bool = False,
) -> dict[str, Any]:
    """Train an item's runs, and write ``RESULTS/paper/ITEM-SCALE.json``: rows, verdicts, and the key of every run.

    Run it again to resume; finished runs are read. A figure is drawn beside the file.

    Args:
        item: A name of ``ITEMS``.
        scale: "desk" or "paper".
        results: For finished runs and items.
        runs: For the folders of runs on their way.
        jobs: Runs to train at once.
        data_dir: Where the data is.
        device: "auto" is the GPU if there is one.
        max_steps: End every run after so many steps: a trial of the whole path, written under a name of its own.
        images: The data set whose images go through random networks.
        launcher: What starts a run, such as ``training.slurm.Slurm``; None is a process here.
        gpus: Of one run.
        only_finished: Train nothing: judge the runs that are there.

    Example:
        >>> reproduce("table2", data_dir="data", jobs=2)["verdicts"]  # doctest: +SKIP
    """
    chosen, size, name = ITEMS[item], SCALES[scale], f"{item}-{scale}"
    if max_steps is not None:
        size = dataclasses.replace(size, max_steps=positive_int(max_steps, "max_steps"))
        name += f"-{max_steps}-steps"
    setting = Setting(size, data_dir, images)
    recipes, done = {}, {}
    only_finished |= chosen.needs_gpus and scale == "desk" and max_steps is None
    for stage in chosen.stages:
        asked = stage(size, done)
        recipes |= asked
        if only_finished:
            done |= finished_runs(asked, results)
        else:
            how: dict[str, Any] = {"data_dir": data_dir, "device": device, "launcher": launcher, "gpus": gpus}
            done |= trained(asked, results, runs, jobs=jobs, **how)
    rows = chosen.rows(done, setting)
    folder = Path(results) / "paper"
    folder.mkdir(parents=True, exist_ok=True)
    picture = None
    if chosen.draw is not None and rows:
        picture = f"{name}.png"
        chosen.draw(rows, folder / picture, setting)
    data = {
        "item": item,
        "scale": scale,
        "max_steps": max_steps,
        "title": chosen.title,
        "versions": {"mimicnorm": mimicnorm.__version__, "torch": torch.__version__},
        "python": platform.python_version(),
        "commit": commit(),
        "rows": rows,
        "verdicts": [judgement._asdict() for judgement in chosen.judge(scale, rows, bool(done))],
        "figure": picture,
        "runs": {label: recipes[label].key() for label in done},
        "costs": {label: round(seconds(run), 1) for label, run in done.items()},
        "missing": [label for label in recipes if label not in done],
        "sizes": _sizes(recipes.values()),
        "seconds": sum(map(seconds, done.values())),
    }
    write_json(folder / f"{name}.json", data)
    return data


def _sizes(recipes: Iterable[Recipe]) -> list[str]:
    """Say how large the runs of an item are, once for all that are alike."""
    texts = (
        f"{r.epochs} epochs of {r.limit or 'all'} images, width {r.width:g}, batch {r.batch}, {r.precision}"
        for r in recipes
    )
    return list(dict.fromkeys(texts))
