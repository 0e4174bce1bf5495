"""Many runs: processes of ``mimicnorm train`` that are found again, and that end when the sweep does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import types
from pathlib import Path

import pytest
import tiny

from mimicnorm.errors import CheckpointError
from mimicnorm.training import Result, sweep
from mimicnorm.training.sweep import finished, folder_of, run_all


@pytest.fixture
def started(monkeypatch) -> list[subprocess.Popen]:
    """Every process that a sweep starts."""
    processes, popen = [], subprocess.Popen

    def noted(*args, **options):
        processes.append(popen(*args, **options))
        return processes[-1]

    monkeypatch.setattr(sweep.subprocess, "Popen", noted)
    return processes


@pytest.fixture
def acting(monkeypatch) -> list[subprocess.Popen]:
    """Processes that act as runs do and start at once: they save when told to end, or end at once if they can."""
    processes, popen = [], subprocess.Popen

    def act(command, **options):
        script = (
            "import os, signal, sys, time\n"
            "signal.signal(signal.SIGTERM, lambda *_: (open('saved', 'w').close(), sys.exit(143)))\n"
            "if os.path.exists('ready.json'): os.rename('ready.json', 'result.json'); sys.exit(0)\n"
            "open('running', 'w').close()\n"
            "time.sleep(600)"
        )
        folder = command[command.index("--out") + 1]
        processes.append(popen([command[0], "-c", script], cwd=folder))
        while not any((Path(folder) / name).exists() for name in ("running", "result.json")):
            time.sleep(0.01)
        return processes[-1]

    monkeypatch.setattr(sweep.subprocess, "Popen", act)
    return processes


def test_runs_are_found_by_their_resolved_recipe_and_trained_once(tmp_path: Path, started, capfd):
    narrow = tiny.digits(method="mimicnorm")
    recipes = {"the first": narrow, "the same": narrow.resolved()}
    results = dict(run_all(recipes, tmp_path, jobs=2))
    assert results["the first"] == results["the same"] == finished({"any label": narrow}, tmp_path)["any label"]
    assert [path.name for path in tmp_path.iterdir()] == [f"the-first-{narrow.key()}"]
    assert folder_of("any label", narrow, tmp_path).name == f"the-first-{narrow.key()}"
    printed = capfd.readouterr().out
    assert "[1/2] the first: " in printed
    assert "[2/2] the same: " in printed
    assert dict(run_all(recipes, tmp_path)) == results
    assert len(started) == 1


def test_a_killed_process_ends_the_sweep_and_the_others_save(tmp_path: Path, acting, monkeypatch):
    recipes = {"a": tiny.digits(), "b": tiny.digits(seed=1), "c": tiny.digits(seed=2)}
    clock = types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: (acting[0].kill(), time.sleep(0.05)))
    monkeypatch.setattr(sweep, "time", clock)
    with pytest.raises(CheckpointError, match=r"was killed \(signal 9\).*--jobs 1 needs less"):
        dict(run_all(recipes, tmp_path, jobs=2, progress=False))
    assert [process.returncode for process in acting] == [-signal.SIGKILL, 128 + signal.SIGTERM]
    assert (folder_of("b", recipes["b"], tmp_path) / "saved").exists()


def test_runs_end_when_the_sweep_is_closed(tmp_path: Path, acting):
    """As when Ctrl-C comes while the caller works on a result."""
    recipes = {"short": tiny.digits(), "long": tiny.digits(seed=1)}
    short = folder_of("short", tiny.digits(), tmp_path)
    short.mkdir()
    (short / "ready.json").write_text(json.dumps({"status": "diverged", "step": 7}))
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(run_all(recipes, tmp_path, 2, progress=False)) as s:
        assert next(s) == ("short", Result("diverged", 7))
        assert [process.returncode for process in acting] == [0, None]
        raise KeyboardInterrupt
    assert [process.returncode for process in acting] == [0, 128 + signal.SIGTERM]


def test_where_a_run_is_survives_damaged_metrics(tmp_path: Path):
    assert sweep._standing(tmp_path) == "starting"
    epoch = json.dumps({"epoch": 2, "top1": 0.5})
    (tmp_path / "metrics.jsonl").write_bytes(f'{epoch}\n[1]\n{{"epoch": 3, "top1": "x"}}\n{{"ep'.encode() + b"\xff")
    assert sweep._standing(tmp_path) == "epoch 2, top-1 50.0%"


def test_processes_share_the_threads_and_find_the_callers_modules(tmp_path: Path, monkeypatch):
    given = {}
    monkeypatch.setattr(sweep.subprocess, "Popen", lambda command, env, **_: given.update(env, command=command))
    monkeypatch.setattr(sweep.torch, "get_num_threads", lambda: 8)
    command = sweep._command(tmp_path, tiny.digits(), "some/data", "cpu", 1)
    environment = {**sweep._environment(3), sweep.PARENT: str(os.getpid())}
    sweep._start(command, environment, tmp_path / "errors.log", quiet=True)
    assert (given["OMP_NUM_THREADS"], given["MIMICNORM_PARENT"]) == ("2", str(os.getpid()))
    assert str(Path(__file__).parent) in given["PYTHONPATH"].split(os.pathsep)
    assert given["command"][-2:] == ["--data-dir", "some/data"]
