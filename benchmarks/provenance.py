"""What every result file carries beside its numbers, and how it is written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT / "tests"))  # the shim for torchvision lives with the tests

import zoo  # noqa: E402

__all__ = ["RESULTS", "ROOT", "provenance", "save", "zoo"]


def provenance(**settings: object) -> dict:
    """Versions, commit and settings of a run."""
    versions = {}
    for package in ("mimicnorm", "torch", "timm", "torchvision", "opacus"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "versions": versions,
        "python": platform.python_version(),
        "commit": git.stdout.strip() or None,
        "settings": settings,
    }


def save(name: str, data: dict) -> Path:
    """Write ``results/NAME.json`` atomically."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)
    return path
