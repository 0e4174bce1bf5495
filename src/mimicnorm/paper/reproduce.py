"""Run an item: train what is missing (``training/cache``), reduce the runs to rows, write them with their verdicts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mimicnorm.paper.items import ITEMS, SCALES
from mimicnorm.paper.verdicts import judge
from mimicnorm.training.cache import trained
from mimicnorm.training.state import write_json


def reproduce(
    item: str,
    scale: str = "desk",
    *,
    results: str | Path = "results",
    runs: str | Path = "runs",
    jobs: int = 1,
    data_dir: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Train an item's runs, and write ``RESULTS/paper/ITEM-SCALE.json``: rows, verdicts, and the key of every run.

    Run it again to resume; finished runs are read. Other arguments are those of ``trained``.

    Args:
        item: A name of ``ITEMS``.
        scale: "desk" or "paper".
        results: For finished runs and items.
        runs: For the folders of runs on their way.
        jobs: Runs to train at once.
        data_dir: Where the data is.
        device: "auto" is the GPU if there is one.

    Example:
        >>> reproduce("table2", data_dir="data", jobs=2)["verdicts"]  # doctest: +SKIP
    """
    chosen = ITEMS[item]
    recipes = chosen.recipes(SCALES[scale])
    out_of_reach = chosen.needs_gpus and scale == "desk"
    where = {"jobs": jobs, "data_dir": data_dir, "device": device}
    done = {} if out_of_reach else trained(recipes, results, runs, **where)
    rows = chosen.rows(done)
    data = {
        "item": item,
        "scale": scale,
        "title": chosen.title,
        "rows": rows,
        "verdicts": [asdict(judgement) for judgement in judge(item, scale, rows)],
        "runs": {label: recipes[label].key() for label in done},
        "missing": [label for label in recipes if label not in done],
        "seconds": sum(line.get("seconds") or 0.0 for run in done.values() for line in run["history"]),
    }
    path = Path(results) / "paper" / f"{item}-{scale}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, data)
    return data
