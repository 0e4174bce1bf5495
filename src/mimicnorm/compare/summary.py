"""The comparison as data: what ``compare.json`` holds, from the methods' plans to the accuracies of their runs."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mimicnorm
from mimicnorm import report
from mimicnorm.compare.intervals import difference
from mimicnorm.compare.job import Entry, Job
from mimicnorm.data import Source
from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training.state import Result, write_atomically, write_json

SCHEMA = 1
JSON, PAGE = "compare.json", "report.html"
_CALIBRATION = ("test_loss", "confidence", "calibration_error")
_SHOWN = ("epoch", "step", "lr", "train_loss", "train_accuracy", "top1", "top5", *_CALIBRATION, "seconds")


def new(
    job: Job, source: Source, identity: dict[str, Any], plans: dict[str, dict[str, Any]], device: torch.device
) -> dict[str, Any]:
    """Begin the data of a comparison; `add_run` and the measurements fill in the rest."""
    return {
        "schema": SCHEMA,
        "status": "running",
        "command": job.command,
        "rounds": job.rounds,
        "settings": job.settings(),
        "data": {
            "train": identity["training images"],
            "test": identity["test images"],
            "classes": identity["classes"],
            "shape": list(source.shape),
            "fingerprints": {split: identity[f"{split} fingerprint"] for split in ("training", "test")},
        },
        "provenance": _provenance(device),
        "methods": [
            {
                "label": entry.label,
                "summary": entry.summary,
                "seeds": entry.seeds,
                **plans[entry.label],
                "runs": [],
                **dict.fromkeys(("accuracy", "calibration", "time", "memory", "largest_lr")),
            }
            for entry in job.entries
        ],
    }


def _provenance(device: torch.device) -> dict[str, Any]:
    versions = {"mimicnorm": mimicnorm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("timm", "torchvision"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"versions": versions, "system": platform.system(), "device": name, "threads": torch.get_num_threads()}


def add_run(data: dict[str, Any], entry: Entry, seed: int, folder: Path, result: Result) -> None:
    """Enter a finished run, and what all runs of its method say together."""
    run: dict[str, Any] = {
        "seed": seed,
        "folder": folder.name,
        "status": result.status,
        "step": result.step,
        "top1": result.top1 if result.status == "done" else None,
        "history": [{k: line.get(k) for k in _SHOWN} for line in result.history],
    }
    method = next(m for m in data["methods"] if m["label"] == entry.label)
    others = [other for other in method["runs"] if other["seed"] != seed]
    method["runs"] = sorted([*others, run], key=lambda run: run["seed"])
    method["accuracy"] = _accuracy(method)
    ends = [run["history"][-1] for run in method["runs"] if run["status"] == "done"]
    method["calibration"] = {name: _mean_and_sd([end[name] for end in ends]) for name in _CALIBRATION} if ends else None
    first = data["methods"][0]
    for other in data["methods"][1:]:
        if other["accuracy"] and first["accuracy"]:
            estimate = difference(_top1(other), _top1(first))
            other["accuracy"]["difference"] = None if estimate is None else estimate._asdict()


def _top1(method: dict[str, Any]) -> list[float]:
    return [run["top1"] for run in method["runs"] if run["top1"] is not None]


def _accuracy(method: dict[str, Any]) -> dict[str, Any]:
    values = _top1(method)
    return {
        **_mean_and_sd(values),
        "runs": len(values),
        "diverged": sum(run["status"] == "diverged" for run in method["runs"]),
        "difference": None,
    }


def _mean_and_sd(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean and standard deviation of the values that are finite."""
    finite = [value for value in values if value is not None]
    return {
        "mean": statistics.mean(finite) if finite else None,
        "sd": statistics.stdev(finite) if len(finite) > 1 else None,
    }


def write(data: dict[str, Any], out: Path) -> None:
    """Write the data and its page, each whole or not at all."""
    write_json(out / JSON, data)
    write_atomically(out / PAGE, report.page(data).encode())


def add_earlier(data: dict[str, Any], out: Path) -> list[str]:
    """Take over times and largest learning rates that an earlier comparison in the folder measured.

    Times are taken only if they are of the same methods and rounds: those of one session alone are comparable.

    Returns:
        The methods of the earlier comparison that this one leaves out.

    Raises:
        RecipeError: The earlier comparison has other settings or other data.
    """
    path = out / JSON
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text())
        if before["schema"] != SCHEMA:
            raise ValueError(f"it has schema {before['schema']!r}, not {SCHEMA}")
        for what, was, now in (
            ("settings", dict(before["settings"]), data["settings"]),
            ("data", dict(before["data"]["fingerprints"]), data["data"]["fingerprints"]),
        ):
            changed = [f"{k} was {was.get(k)!r} and is {v!r}" for k, v in now.items() if was.get(k) != v]
            if changed:
                raise RecipeError(
                    f"{out} holds a comparison of other {what}: {', '.join(changed)}. Use another folder with --out"
                )
        labels = [m["label"] for m in data["methods"]]
        measured = {m["label"]: (_checked_time(m["time"]), m["largest_lr"]) for m in before["methods"]}
        timed = [*measured] == labels and data["rounds"] in (0, before["rounds"])
        data["rounds"] = data["rounds"] or int(before["rounds"])
        for method in data["methods"]:
            time, method["largest_lr"] = measured.get(method["label"], (None, None))
            method["time"] = time if timed else None
        return [label for label in measured if label not in labels]
    except RecipeError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(
            f"{path} is damaged ({reason}). Delete it: the same command makes it again, and finished runs stay"
        ) from error


def _checked_time(time: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a measured time if it has all its numbers; raises what Python raises if not."""
    if time is not None:
        _ = [float(time[k]) for k in ("seconds", "rounds")] + [
            float(time["ratio"][k]) for k in ("value", "low", "high")
        ]
    return time
