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

__all__ = ["RESULTS", "ROOT", "Rows", "provenance", "save", "zoo"]


def provenance(**settings: object) -> dict:
    """Versions, commit, state of the source and settings of a run."""
    versions = {}
    for package in ("mimicnorm", "torch", "timm", "torchvision", "opacus"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "python": platform.python_version(),
        "commit": _revision("HEAD"),
        "source": _revision("HEAD:src"),
        "settings": settings,
    }


def _revision(name: str) -> str | None:
    """Return what git calls the commit, or the state of a folder in it."""
    git = subprocess.run(["git", "rev-parse", "--short", name], cwd=ROOT, capture_output=True, text=True, check=False)
    return git.stdout.strip() or None


def save(name: str, data: dict) -> Path:
    """Write ``results/NAME.json`` atomically."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(temporary, path)
    return path


class Rows:
    """The rows of a result file, written as soon as they are there.

    A script that was interrupted goes on where it was, but only with the same source, versions and settings: a file
    never holds rows of two states of ``src/``. Commits that change only pages, tests or results do not matter.
    """

    def __init__(self, name: str, *key: str, **settings: object):
        self.name, self.key = name, key
        self.about = json.loads(json.dumps(provenance(**settings)))
        path = RESULTS / f"{name}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        decides = {key: value for key, value in self.about.items() if key != "commit"}
        self.rows: list[dict] = before["rows"] if decides.items() <= before.items() else []

    def __contains__(self, key: tuple) -> bool:
        """Whether the row with these values of the key is there."""
        return json.loads(json.dumps(key)) in ([row[k] for k in self.key] for row in self.rows)

    def add(self, row: dict, **summary: object) -> None:
        """Append a row, with what sums all of them up, and write the file."""
        print(row, flush=True)
        self.rows.append(row)
        save(self.name, {**self.about, **summary, "rows": self.rows})
