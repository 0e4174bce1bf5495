"""The training runs of a comparison, one after the other or several at once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import torch

from mimicnorm.compare.job import Contestant, Job
from mimicnorm.data import Source
from mimicnorm.errors import CheckpointError
from mimicnorm.training.folder import Result, RunFolder
from mimicnorm.training.loop import train
from mimicnorm.training.recipes import Recipe

Finished = tuple[Contestant, int, Result]
SECONDS_BETWEEN_LINES = 20.0


def folder_of(contestant: Contestant, seed: int) -> str:
    """The name of a run's folder."""
    return f"{contestant.label}-seed{seed}"


def finished(job: Job, out: Path, data: dict[str, Any]) -> Iterator[Finished]:
    """The runs that ended in an earlier call; one on other data is an error."""
    for contestant, seed in job.runs():
        folder = out / folder_of(contestant, seed)
        result = RunFolder(folder).begin(job.run_recipe(contestant, seed), data) if folder.exists() else None
        if result is not None:
            yield contestant, seed, result


def trained(
    job: Job,
    out: Path,
    sources: tuple[Source, Source],
    data_dir: str | Path | None,
    device: str,
    jobs: int,
    say: Callable[[str], None],
    progress: bool,
) -> Iterator[Finished]:
    """Train, or read, every run; the last one is "interrupted" if Ctrl-C or SIGTERM came."""
    runs = job.runs()
    if jobs > 1 and len(runs) > 1:
        yield from _at_once(job, out, data_dir, device, jobs, say)
        return
    for number, (contestant, seed) in enumerate(runs, 1):
        say(f"[{number}/{len(runs)}] {contestant.label}, seed {seed}")
        folder = out / folder_of(contestant, seed)
        recipe = job.run_recipe(contestant, seed)
        result = train(recipe, folder, sources=sources, progress=progress, device=device)
        yield contestant, seed, result
        if result.status == "interrupted":
            return


def _at_once(
    job: Job, out: Path, data_dir: str | Path | None, device: str, jobs: int, say: Callable[[str], None]
) -> Iterator[Finished]:
    """A process of one thread per run: on few cores that is faster than one process with all threads.

    On Ctrl-C, SIGTERM, or if one of them is killed, the others finish their step, save, and end.
    """
    runs = job.runs()
    threads = max(1, torch.get_num_threads() // jobs)
    start = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, start, initializer=_begin, initargs=(threads,)) as pool:
        number = 0
        before = signal.signal(signal.SIGTERM, _interrupt) if _in_main_thread() else None
        try:
            with _deaf_to_ctrl_c():
                waiting = {
                    pool.submit(_train, job.run_recipe(c, seed), out / folder_of(c, seed), data_dir, device): (c, seed)
                    for c, seed in runs
                }
            pending = set(waiting)
            while pending:
                ended, pending = wait(pending, SECONDS_BETWEEN_LINES, FIRST_COMPLETED)
                if not ended:
                    say(_standing(job, out))
                for contestant, seed, result in ((*waiting[future], future.result()) for future in ended):
                    number += 1
                    if result.status != "interrupted":
                        say(f"[{number}/{len(runs)}] {contestant.label}, seed {seed}: {_outcome(result)}")
                    yield contestant, seed, result
        except KeyboardInterrupt as interrupt:
            say("stopping: every run finishes its step and saves")
            for child in multiprocessing.active_children():
                child.terminate()
            yield *runs[0], Result("interrupted", 0, [], *(interrupt.args or (signal.SIGINT,)))
        except BrokenProcessPool as error:
            raise CheckpointError(
                "a training process was killed from outside, perhaps for want of memory. What is finished is in "
                f"{out}: the same command goes on from there, and --jobs 1 needs less memory"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
            if before is not None:
                signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that start here never see a Ctrl-C, which a terminal sends to all of them, not even while they import.

    This process gets it at the end, and ends them by SIGTERM.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _interrupt(number: int, _frame: Any) -> None:
    raise KeyboardInterrupt(number)


def _begin(threads: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for work for ever: save, then end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)  # for a run to finish its step; what is on disk is whole in any case
    os._exit(1)


def _train(recipe: Recipe, folder: Path, data_dir: Any, device: str) -> Result:
    result = train(recipe, folder, data_dir=data_dir, progress=False, device=device)
    if result.signal == signal.SIGTERM:
        signal.raise_signal(signal.SIGTERM)  # the run is saved; now end as the sender wants, who may wait for it
    return result


def _standing(job: Job, out: Path) -> str:
    """Where the runs are that have begun and not ended."""
    standing = []
    for contestant, seed in job.runs():
        folder = out / folder_of(contestant, seed)
        if (folder / "metrics.jsonl").exists() and not (folder / "result.json").exists():
            epochs = [line for line in (folder / "metrics.jsonl").read_text().splitlines() if '"top1"' in line]
            latest = f", top-1 {json.loads(epochs[-1])['top1']:.1%}" if epochs else ""
            standing.append(f"{contestant.label} seed {seed}: epoch {len(epochs)}/{job.recipe.epochs}{latest}")
    return "    " + ("; ".join(standing) or "starting")


def _outcome(result: Result) -> str:
    return f"diverged at step {result.step}" if result.status == "diverged" else f"{result.top1:.2%}"
