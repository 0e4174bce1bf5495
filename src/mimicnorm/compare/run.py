"""The comparison, stage by stage; whatever is finished is on disk, and the same call goes on from there."""

from __future__ import annotations

import json
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import mimicnorm
from mimicnorm import report
from mimicnorm.compare.intervals import difference
from mimicnorm.compare.job import Contestant, Job
from mimicnorm.compare.largest_lr import largest_lr
from mimicnorm.compare.measure import applied, memory_of, note, times
from mimicnorm.compare.runs import finished, folder_of, trained
from mimicnorm.data import Source
from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training.checkpoint import write_atomically
from mimicnorm.training.folder import Result, data_identity
from mimicnorm.training.loop import load
from mimicnorm.training.processes import Processes, joined
from mimicnorm.training.progress import tell

SCHEMA = 1
JSON, PAGE = "compare.json", "report.html"
_SHOWN = ("epoch", "step", "lr", "train_loss", "train_accuracy", "test_loss", "top1", "top5", "seconds")


def run(
    job: Job,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    device: str = "auto",
    jobs: int = 0,
    progress: bool = True,
) -> dict[str, Any]:
    """Compare methods in a folder: ``compare.json``, ``report.html``, and one training run per method and seed.

    The same call on the same folder goes on where it was; with more methods or seeds it adds them.

    Args:
        job: What to compare.
        out: The folder.
        data_dir: Where the data is; see ``mimicnorm.data.load``.
        device: "auto" is the GPU if there is one.
        jobs: Train so many runs at once, each in a process with its share of the threads: on a CPU two are faster than
            one after the other. 0 is two on a CPU with two threads or more, one elsewhere.
        progress: Say what happens.

    Returns:
        What ``compare.json`` holds; its status is "done" or "interrupted".

    Example:
        >>> from mimicnorm.compare import Job, base_recipe, contestants, run
        >>> job = Job(base_recipe("digits"), contestants("batchnorm,mimicnorm", seeds=1))
        >>> run(job, "compared")["status"]  # doctest: +SKIP
        'done'
    """
    say = tell if progress else _silent
    sources = load(job.recipe, data_dir)
    if job.recipe.batch > len(sources[0]):
        raise RecipeError(f"batch={job.recipe.batch} is more than the {len(sources[0])} training images: give less")
    before = _earlier(job, Path(out))
    identity = data_identity(*sources)
    _require_same_data(identity, before, Path(out))
    named = [f"{c.label} ({about})" if (about := note(job, c)) else c.label for c in job.contestants]
    say(f"{job.recipe.model} on {job.recipe.data}: applying {', '.join(named)}")
    methods = applied(job, sources[0])
    _require_same_methods(methods, before, Path(out))
    left = [e["label"] for e in before["methods"] if e["label"] not in methods]
    if left:
        say(f"left out this time: {', '.join(left)}. Their runs stay in {out} and come back when they are named again")
    with joined(device) as processes:
        data = _start(job, sources, identity, processes, methods, before)
        for contestant, seed, result in finished(job, Path(out), identity):  # a page that was whole stays so meanwhile
            _add(data, contestant, seed, result)
        _write(data, Path(out))  # a folder that cannot be written is known before the work
        say("predicting memory, timing steps")
        _measure(job, data, sources[0], processes, before)
        _write(data, Path(out))
        if jobs == 0:
            jobs = min(2, torch.get_num_threads()) if processes.device.type == "cpu" else 1
        for contestant, seed, result in trained(job, Path(out), sources, data_dir, device, jobs, say, progress):
            if result.status == "interrupted":
                data["status"], data["signal"] = "interrupted", result.signal
                break
            _add(data, contestant, seed, result)
            _write(data, Path(out))
        else:
            for contestant, entry in zip(job.contestants, data["methods"], strict=True):
                if job.largest_lr and entry["largest_lr"] is None:
                    say(f"{contestant.label}: looking for the largest stable learning rate")
                    entry["largest_lr"] = largest_lr(job, contestant, sources[0], processes)
                    _write(data, Path(out))
            data["status"] = "done"
    _write(data, Path(out))
    return data


def _silent(_: str) -> None:
    """Say nothing."""


def _earlier(job: Job, out: Path) -> dict[str, Any]:
    """What an earlier call left in the folder: it must be of the same settings."""
    path = out / JSON
    if not path.exists():
        return {"methods": []}
    try:
        before = json.loads(path.read_text())
        was, now = dict(before["settings"]), job.settings()
        if before["schema"] != SCHEMA:
            raise ValueError(f"it has schema {before['schema']!r}, not {SCHEMA}")
        for entry in before["methods"]:  # all that is read of it later
            _ = dict(entry["plan"]["method"]), [entry[key] for key in ("label", "time", "largest_lr")]
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise CheckpointError(f"{path} cannot be read ({reason}): use another folder with --out") from error
    changed = [f"{k} was {was.get(k)!r} and is {now[k]!r}" for k in now if was.get(k) != now[k]]
    if changed:
        raise RecipeError(
            f"{out} holds a comparison with other settings: {', '.join(changed)}. Use another folder with --out"
        )
    return before


def _require_same_data(identity: dict[str, Any], before: dict[str, Any], out: Path) -> None:
    """Refuse to set runs beside others on other data; a comparison of an older version has no fingerprints."""
    was = before.get("data", {}).get("fingerprints", {})
    changed = [name for name, value in was.items() if identity.get(name) != value]
    if changed:
        raise RecipeError(
            f"{out} holds a comparison on other data: the fingerprint of the {changed[0]} images was "
            f"{was[changed[0]]}, is {identity.get(changed[0])}. Use another folder with --out, or the data it began "
            "with"
        )


def _require_same_methods(methods: dict[str, dict[str, Any]], before: dict[str, Any], out: Path) -> None:
    """Refuse to set runs beside others whose method had other settings by default."""
    for entry in before["methods"]:
        now = methods.get(entry["label"], entry)["plan"]["method"]
        was = entry["plan"]["method"]
        changed = [f"{k} was {was.get(k)!r} and is {v!r}" for k, v in now.items() if was.get(k) != v]
        if changed:
            raise RecipeError(
                f"{out} holds runs of another {entry['label']}: {', '.join(changed)}. Use another folder with --out"
            )


def _start(
    job: Job,
    sources: tuple[Source, Source],
    identity: dict[str, Any],
    processes: Processes,
    methods: dict[str, dict[str, Any]],
    before: dict[str, Any],
) -> dict[str, Any]:
    train_set, test_set = sources
    known_rates = {entry["label"]: entry["largest_lr"] for entry in before["methods"]}
    return {
        "schema": SCHEMA,
        "status": "running",
        "command": job.command,
        "rounds": job.rounds or before.get("rounds", 0),
        "settings": job.settings(),
        "data": {
            "train": len(train_set),
            "test": len(test_set),
            "classes": train_set.classes,
            "shape": list(train_set.shape),
            "fingerprints": {name: identity[name] for name in ("training", "test")},
        },
        "provenance": _provenance(processes),
        "methods": [
            {
                "label": c.label,
                "summary": c.summary,
                "seeds": c.seeds,
                "runs": [],
                "accuracy": None,
                "time": None,
                "memory": None,
                "largest_lr": known_rates.get(c.label),
                **methods[c.label],
            }
            for c in job.contestants
        ],
    }


def _provenance(processes: Processes) -> dict[str, Any]:
    versions = {"mimicnorm": mimicnorm.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for package in ("timm", "torchvision"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    device = torch.cuda.get_device_name(processes.device) if processes.device.type == "cuda" else platform.machine()
    return {"versions": versions, "system": platform.system(), "device": device, "threads": torch.get_num_threads()}


def _measure(job: Job, data: dict[str, Any], source: Source, processes: Processes, before: dict[str, Any]) -> None:
    for contestant, entry in zip(job.contestants, data["methods"], strict=True):
        entry["memory"] = memory_of(job, contestant, source, processes)
    first = data["methods"][0]["memory"]
    for entry in data["methods"]:
        alike = ("note" in entry["memory"]) == ("note" in first)  # both of the compiled network, or neither
        if "why_not" not in entry["memory"] and "why_not" not in first and alike:
            for what, ratio in (("saved_bytes_per_image", "saved_ratio"), ("peak_bytes", "peak_ratio")):
                entry["memory"][ratio] = entry["memory"][what] / first[what]
    timed = {entry["label"]: entry["time"] for entry in before["methods"] if entry["time"]}
    same = list(timed) == [entry["label"] for entry in data["methods"]]  # only times of one session are comparable
    if not same or data["rounds"] != before.get("rounds", data["rounds"]):
        timed = times(job, source, processes) if job.rounds else {}
    for entry in data["methods"]:
        entry["time"] = timed.get(entry["label"])


def _add(data: dict[str, Any], contestant: Contestant, seed: int, result: Result) -> None:
    """Enter a finished run, and what all runs of its method say together."""
    entry = next(e for e in data["methods"] if e["label"] == contestant.label)
    history = [{k: line.get(k) for k in _SHOWN} for line in result.history]
    entry["runs"] = [run for run in entry["runs"] if run["seed"] != seed]
    entry["runs"].append(
        {
            "seed": seed,
            "folder": folder_of(contestant, seed),
            "status": result.status,
            "step": result.step,
            "top1": result.top1 if result.status == "done" else None,
            "history": history,
        }
    )
    entry["runs"].sort(key=lambda run: run["seed"])
    entry["accuracy"] = _accuracy(entry)
    first = data["methods"][0]
    for other in data["methods"][1:]:
        if other["accuracy"] and first["accuracy"]:
            found = difference(_finished(other), _finished(first))
            other["accuracy"]["difference"] = None if found is None else found._asdict()


def _finished(entry: dict[str, Any]) -> list[float]:
    return [run["top1"] for run in entry["runs"] if run["top1"] is not None]


def _accuracy(entry: dict[str, Any]) -> dict[str, Any]:
    values = _finished(entry)
    return {
        "mean": statistics.mean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
        "runs": len(values),
        "diverged": sum(run["status"] == "diverged" for run in entry["runs"]),
        "difference": None,
    }


def _write(data: dict[str, Any], out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make the folder {out}: {error.strerror}. Give another one with --out") from error
    write_atomically(out / JSON, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())
    write_atomically(out / PAGE, report.page(data).encode())
