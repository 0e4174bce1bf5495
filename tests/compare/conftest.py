from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import small

from mimicnorm.compare import run, stages
from mimicnorm.training import recipe, sweep, train


class TrainsHere:
    """A training process that runs in this one, at once: what starts and ends real ones is tested with the sweep."""

    def __init__(self, command, environment, errors, quiet):
        words = command[command.index("train") + 1 :]
        given = dict(zip(words[1::2], words[2::2], strict=True))
        options = {"data_dir": given.get("--data-dir"), "device": given["--device"]}
        train(recipe(words[0]), given["--out"], **options, progress=False)
        self.returncode = 0

    def poll(self):
        return self.returncode

    terminate = wait = poll


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The folder of a finished comparison, and what it holds."""
    out = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep, "_start", TrainsHere)
        run(small.job(), out, progress=False)
    return out, json.loads((out / "compare.json").read_text())


@pytest.fixture
def trains_here(monkeypatch):
    """Runs are trained in this process, and no memory is predicted."""
    monkeypatch.setattr(sweep, "_start", TrainsHere)
    monkeypatch.setattr(
        stages, "memory_by_method", lambda trainers, _: {name: {"why_not": "a test"} for name in trainers}
    )


@pytest.fixture
def converts_nothing(monkeypatch):
    """For what is refused before anybody looks at a plan."""
    monkeypatch.setattr(stages, "applied", lambda job, *_: ({}, {entry.label: {} for entry in job.entries}))


@pytest.fixture
def trains_nothing(monkeypatch):
    monkeypatch.setattr(sweep, "_start", lambda *_, **__: pytest.fail("a run was started"))
