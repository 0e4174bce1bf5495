"""Many runs: each is a process of ``mimicnorm train`` in a folder of its own, several at once.

A run is identified by the hash of its resolved recipe, so a changed setting or default never meets a stale run, and the
same sweep again trains only what is not finished. A run that is killed is a killed process: the sweep stops the others,
and raises an error once they have saved.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch

from mimicnorm.errors import CheckpointError
from mimicnorm.training.loop import PARENT
from mimicnorm.training.progress import print_line
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.state import METRICS, Result, RunFolder, write_json

Launcher = Callable[[list[str], dict[str, str], Path], Any]
"""Starts a command; what it returns has ``poll``, ``terminate``, ``wait`` and ``returncode``, as a process has."""
SECONDS_BETWEEN_LINES = 20.0
ERRORS = "errors.log"
"""What a run says on stderr, in its folder."""


def run_all(
    recipes: Mapping[str, Recipe],
    out: str | Path,
    jobs: int = 1,
    *,
    data_dir: str | Path | None = None,
    device: str = "auto",
    data: dict[str, Any] | None = None,
    progress: bool = True,
    launcher: Launcher | None = None,
    gpus: int = 1,
) -> Generator[tuple[str, Result], None, None]:
    """Train recipes in folders under ``out``; yield each label with its result, finished runs first.

    Close the iterator to stop early (``contextlib.closing``): runs that are on their way save and end.

    Args:
        recipes: What to train, by label; labels with the same resolved recipe share a run.
        out: Where the runs' folders are.
        jobs: Runs to train at once, each with its share of this process's threads.
        data_dir: Where the data is; see ``mimicnorm.data.load``.
        device: "auto" is the GPU if there is one.
        data: Refuse finished runs on other data than this; see ``state.data_identity``.
        progress: Print a line per run and, now and then, where the others are; the run's own bar if ``jobs`` is 1.
        launcher: Starts a run from its command, environment and file for errors, such as ``slurm.Slurm``; None starts a
            process here, which ends with this one.
        gpus: Of one run; several train it together (torchrun).

    Raises:
        CheckpointError: A run failed or was killed.

    Example:
        >>> recipes = {f"seed {seed}": recipe("digits-mlp10", seed=seed) for seed in range(3)}  # doctest: +SKIP
        >>> {label: result.top1 for label, result in run_all(recipes, "runs/mlp", jobs=2)}  # doctest: +SKIP
    """
    before = finished(recipes, out, data)
    yield from before.items()
    labels: dict[str, list[str]] = {}  # by key: the same recipe is trained once
    for label in recipes:
        if label not in before:
            labels.setdefault(recipes[label].key(), []).append(label)
    waiting = {folder_of(same[0], recipes[same[0]], out): same for same in labels.values()}
    running: dict[Path, Any] = {}
    slots: dict[Path, int] = {}
    done, last_line = len(before), time.monotonic()
    try:
        while waiting:
            for folder in [folder for folder in waiting if folder not in running][: jobs - len(running)]:
                command = _command(folder, recipes[waiting[folder][0]], data_dir, device, gpus)
                if launcher is not None:
                    running[folder] = launcher(command, _environment(jobs), folder / ERRORS)
                else:
                    slot = min(set(range(jobs)) - {slots[other] for other in running})
                    slots[folder] = slot
                    environment = {**_environment(jobs), PARENT: str(os.getpid()), **_own_gpus(slot, gpus, device)}
                    running[folder] = _start(command, environment, folder / ERRORS, quiet=not progress or jobs > 1)
            time.sleep(0.1)
            for folder in [folder for folder, process in running.items() if process.poll() is not None]:
                _require_success(folder, running.pop(folder).returncode)
                for label, result in finished({name: recipes[name] for name in waiting.pop(folder)}, out, data).items():
                    done, last_line = done + 1, time.monotonic()
                    if progress:
                        print_line(f"[{done}/{len(recipes)}] {label}: {_outcome(result)}")
                    yield label, result
            if progress and jobs > 1 and time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                print_line("    " + "; ".join(f"{waiting[folder][0]}: {_standing(folder)}" for folder in running))
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()


def finished(recipes: Mapping[str, Recipe], out: str | Path, data: dict[str, Any] | None = None) -> dict[str, Result]:
    """Return the results of the runs that are over, by label; a run on other data is an error."""
    results = {label: RunFolder(folder_of(label, r, out), r).result(data) for label, r in recipes.items()}
    return {label: result for label, result in results.items() if result is not None}


def folder_of(label: str, recipe: Recipe, out: str | Path) -> Path:
    """Find the folder of a recipe's run, whatever its label was; a new one is named by label and hash."""
    key, name = recipe.key(), re.sub(r"[^\w.+=-]+", "-", label)
    return next(Path(out).glob(f"*-{key}"), Path(out) / f"{name}-{key}")


def _command(folder: Path, recipe: Recipe, data_dir: str | Path | None, device: str, gpus: int) -> list[str]:
    """Write down the recipe in the run's folder, and return the command that trains it there."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe_file = folder / "recipe.json"
    if not recipe_file.exists():
        write_json(recipe_file, recipe.resolved().as_dict())
    words = [str(recipe_file), "--out", str(folder), "--device", device]
    words += [] if data_dir is None else ["--data-dir", str(data_dir)]
    # -P: a file beside the user must not hide one of Python's own modules
    together = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"] if gpus > 1 else []
    return [sys.executable, "-P", *together, "-m", "mimicnorm", "train", *words]


def _environment(jobs: int) -> dict[str, str]:
    threads = str(max(1, torch.get_num_threads() // jobs))
    # the user's own modules are found there, too
    return {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _own_gpus(slot: int, gpus: int, device: str) -> dict[str, str]:
    """Return what lets the run in a slot see its own GPUs alone, where there are several."""
    count = torch.cuda.device_count()
    if count < 2 or device not in ("auto", "cuda"):
        return {}
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[(slot * gpus + i) % len(names)] for i in range(gpus))}


def _start(command: list[str], environment: dict[str, str], errors: Path, quiet: bool) -> subprocess.Popen[bytes]:
    output = subprocess.DEVNULL if quiet else None
    with open(errors, "wb") as file:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=file)


def _require_success(folder: Path, code: int) -> None:
    if code < 0 or code > 128:
        raise CheckpointError(
            f"the training process of {folder} was killed (signal {code - 128 if code > 0 else -code}), perhaps "
            "because memory ran out. Run the same command to continue; --jobs 1 needs less memory"
        )
    if code != 0:
        lines = (folder / ERRORS).read_text(errors="replace").split("\n")
        reason = next((line for line in reversed(lines) if line.strip()), "no message")
        raise CheckpointError(f"training in {folder} failed: {reason.removeprefix('mimicnorm: ')}")


def _outcome(result: Result) -> str:
    return f"diverged at step {result.step}" if result.status == "diverged" else f"{result.top1:.2%}"


def _standing(folder: Path) -> str:
    """Say where a run is, from its last epoch; a line that is half written or damaged is left out."""
    epochs = []
    with contextlib.suppress(OSError):
        for line in (folder / METRICS).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError):
                fields = json.loads(line)
                epochs.append(f"epoch {fields['epoch']}, top-1 {fields['top1']:.1%}")
    return epochs[-1] if epochs else "starting"
