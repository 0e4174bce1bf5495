"""The comparison, stage by stage; whatever is finished is on disk, and the same call continues from there."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mimicnorm.compare import summary
from mimicnorm.compare.job import Job
from mimicnorm.compare.largest_lr import largest_lr
from mimicnorm.compare.measure import applied, memory_by_method, times
from mimicnorm.data import Source
from mimicnorm.errors import RecipeError
from mimicnorm.training.loop import load
from mimicnorm.training.processes import init_process_group
from mimicnorm.training.progress import print_line
from mimicnorm.training.state import data_identity, lock
from mimicnorm.training.step import Trainer
from mimicnorm.training.sweep import finished, folder_of, run_all


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

    The same call on the same folder continues where it stopped; with more methods or seeds it adds them.

    Args:
        job: What to compare.
        out: The folder.
        data_dir: Where the data is; see ``mimicnorm.data.load``.
        device: "auto" is the GPU if there is one.
        jobs: Runs to train at once, each in a process with its share of the threads: on a CPU two are faster than
            one after the other. 0 is two on a CPU with two threads or more, one elsewhere.
        progress: Print what happens.

    Returns:
        What ``compare.json`` holds; its status is "done" or "interrupted".

    Example:
        >>> from mimicnorm.compare import Job, base_recipe, entries, run
        >>> job = Job(base_recipe("digits"), entries("batchnorm,mimicnorm", seeds=1))
        >>> run(job, "compared")["status"]  # doctest: +SKIP
        'done'
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise RecipeError("compare starts its own training processes: run it without torchrun")

    def say(text: str) -> None:
        if progress:
            print_line(text)

    out = Path(out)
    source, test_set = load(job.recipe, data_dir)
    if job.recipe.batch > len(source):
        raise RecipeError(f"batch={job.recipe.batch} is more than the {len(source)} training images: give less")
    with init_process_group(device) as processes:
        say(f"{job.recipe.model} on {job.recipe.data}: applying {', '.join(entry.label for entry in job.entries)}")
        trainers, plans = applied(job, source, processes)
        identity = data_identity(source, test_set)
        data = summary.new(job, source, identity, plans, processes.device)
        with lock(out, "comparing"), _sigterm_interrupts():
            left_out = ", ".join(summary.add_earlier(data, out))
            if left_out:
                say(f"left out this time: {left_out}. Their runs stay in {out} and come back when they are named again")
            runs = job.runs()
            recipes = {label: job.run_recipe(entry, seed) for label, (entry, seed) in runs.items()}
            before = finished(recipes, out, identity)
            for label, result in before.items():  # a page that was whole stays so meanwhile
                summary.add_run(data, *runs[label], folder_of(label, recipes[label], out), result)
            summary.write(data, out)  # a folder that cannot be written is known before the work
            try:
                say("predicting memory, timing steps")
                _measure(data, trainers, source, job.rounds)
                trainers.clear()  # the runs need the memory
                summary.write(data, out)
                if jobs == 0:
                    jobs = min(2, torch.get_num_threads()) if processes.device.type == "cpu" else 1
                sweep = run_all(recipes, out, jobs, data_dir=data_dir, device=device, data=identity, progress=progress)
                with contextlib.closing(sweep):  # whatever happens meanwhile, the training processes are stopped
                    for label, result in sweep:
                        if label not in before:
                            summary.add_run(data, *runs[label], folder_of(label, recipes[label], out), result)
                            summary.write(data, out)
                for entry, method in zip(job.entries, data["methods"], strict=True):
                    if job.largest_lr and method["largest_lr"] is None:
                        say(f"{entry.label}: looking for the largest stable learning rate")
                        method["largest_lr"] = largest_lr(job.run_recipe(entry), source, processes)
                        summary.write(data, out)
                data["status"] = "done"
            except KeyboardInterrupt as interrupt:
                data.update(status="interrupted", signal=int(next(iter(interrupt.args), signal.SIGINT)))
            summary.write(data, out)
    return data


def _measure(data: dict[str, Any], trainers: dict[str, Trainer], source: Source, rounds: int) -> None:
    amounts = memory_by_method(trainers, source)
    timed = {method["label"]: method["time"] for method in data["methods"]}
    if rounds and None in timed.values():
        timed = times(trainers, source, rounds)
    for method in data["methods"]:
        method.update(memory=amounts[method["label"]], time=timed[method["label"]])


@contextlib.contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does: training processes are stopped on the way out."""

    def interrupt(number: int, _frame: Any) -> None:
        raise KeyboardInterrupt(number)

    here = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handlers
    before = signal.signal(signal.SIGTERM, interrupt) if here else None
    try:
        yield
    finally:
        if here:
            signal.signal(signal.SIGTERM, before)
