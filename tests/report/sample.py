"""A comparison as it could have ended: one method diverged, one is not finished, one has an odd name."""

from __future__ import annotations

import copy
from typing import Any

LAYER = ["conv1", "Conv2d, owner", "centre x0.500", "72", "1.4142", "1", "fed by relu & <more>"]


def _history(top: float, epochs: int = 3) -> list[dict[str, Any]]:
    return [
        {
            "epoch": e,
            "step": 10 * e,
            "lr": 0.1,
            "train_loss": 2.0 / e,
            "train_accuracy": 0.3 * e,
            "test_loss": 50.0 / 10**e if top > 0.5 else None,
            "top1": top * e / epochs,
            "top5": 0.9,
            "confidence": 0.8,
            "calibration_error": 0.05,
            "seconds": 1.0,
        }
        for e in range(1, epochs + 1)
    ]


def _run(seed: int, top: float | None, status: str = "done") -> dict[str, Any]:
    history = _history(top or 0.2, 3 if status == "done" else 1)
    return {"seed": seed, "folder": f"x-seed{seed}", "status": status, "step": 17, "top1": top, "history": history}


def _method(label: str, runs: list[dict[str, Any]], **entries: Any) -> dict[str, Any]:
    return {
        "label": label,
        "summary": f"What {label} is.",
        "seeds": 2,
        "parameters": 123456,
        "plan": {"method": {}, "init": "theory", "rows": [LAYER], "summary": [f"{label}: 1 BatchNorm", "note: mind"]},
        "runs": runs,
        "accuracy": None,
        "time": None,
        "memory": None,
        "largest_lr": None,
        **entries,
    }


def _calibration(loss: float | None, confidence: float, error: float) -> dict[str, dict[str, float | None]]:
    means = {"test_loss": loss, "confidence": confidence, "calibration_error": error}
    return {name: {"mean": mean, "sd": 0.01} for name, mean in means.items()}


def comparison() -> dict[str, Any]:
    """A copy that may be changed."""
    ratio = {"value": 0.91, "low": 0.84, "high": 0.97}
    one = {"value": 1.0, "low": 1.0, "high": 1.0}
    methods = [
        _method(
            "batchnorm",
            [_run(0, 0.91), _run(1, 0.93)],
            accuracy={"mean": 0.92, "sd": 0.0141, "runs": 2, "diverged": 0, "difference": None},
            calibration=_calibration(0.25, 0.935, 0.0162),
            time={"seconds": 0.0123, "least_seconds": 0.01, "rounds": 20, "ratio": one},
            memory={"saved_bytes_per_image": 43008.0, "peak_bytes": 6291456, "saved_ratio": 1.0, "peak_ratio": 1.0},
            largest_lr={"value": 1.6, "steps": 100, "at_least": False},
        ),
        _method(
            "mimicnorm+residual=<linear>",
            [_run(0, 0.94), _run(1, 0.95)],
            accuracy={
                "mean": 0.945,
                "sd": 0.00707,
                "runs": 2,
                "diverged": 0,
                "difference": {"value": 0.025, "low": -0.0213, "high": 0.0713},
            },
            calibration=_calibration(None, 0.6, 0.345),
            time={"seconds": 2.5, "least_seconds": 2.4, "rounds": 20, "ratio": ratio},
            memory={"saved_bytes_per_image": 20480.0, "peak_bytes": 5242880, "saved_ratio": 0.476, "peak_ratio": 0.833},
            largest_lr={"value": 102.4, "steps": 100, "at_least": True},
        ),
        _method(
            "nonorm",
            [_run(0, None, "diverged"), _run(1, None, "diverged")],
            accuracy={"mean": None, "sd": None, "runs": 0, "diverged": 2, "difference": None},
            memory={"why_not": "it needs values"},
            largest_lr={"value": None, "steps": 100, "why_not": "unstable from 0.1 down to 0.0001"},
        ),
        _method("fixup", []),
    ]
    return copy.deepcopy(
        {
            "schema": 1,
            "status": "interrupted",
            "command": "mimicnorm compare --methods 'a<b'",
            "settings": {"model": "resnet18", "width": 0.25, "data": "digits", "epochs": 3, "batch": 64},
            "data": {"train": 1438, "test": 359, "classes": 10, "shape": [1, 8, 8]},
            "provenance": {"versions": {"torch": "2.13.0"}, "system": "Linux", "device": "x86_64", "threads": 2},
            "methods": methods,
        }
    )
