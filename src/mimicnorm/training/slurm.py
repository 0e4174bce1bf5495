"""Start the runs of a sweep as SLURM jobs, through submitit: the same commands, in a queue instead of processes."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mimicnorm.errors import RecipeError


class Slurm:
    """A launcher for ``run_all``: every run is one job with its GPUs.

    Args:
        folder: Where submitit keeps its scripts and logs; the nodes must see it, as they must the runs' folders.
        gpus: Per job.
        options: What else sbatch needs, as NAME=VALUE of submitit's ``update_parameters``, such as
            slurm_partition=gpu or timeout_min=600.
        cluster: "slurm"; "local" runs jobs as processes here, for trials.

    Example:
        >>> launcher = Slurm("runs/slurm", options=["slurm_partition=gpu"])  # doctest: +SKIP
        >>> results = dict(run_all(recipes, "runs", jobs=8, launcher=launcher))  # doctest: +SKIP
    """

    def __init__(self, folder: str | Path, gpus: int = 1, options: Iterable[str] = (), cluster: str = "slurm"):
        try:
            import submitit
        except ModuleNotFoundError as error:
            raise RecipeError("submitit is not installed. Install it with: pip install 'mimicnorm[slurm]'") from error
        try:
            self._executor = submitit.AutoExecutor(folder=str(folder), cluster=cluster)
            parameters: dict[str, Any] = {"gpus_per_node": gpus, "timeout_min": 24 * 60, **_parsed(options)}
            self._executor.update_parameters(**parameters)
        except (RuntimeError, NameError, ValueError, TypeError) as error:
            raise RecipeError(f"cannot submit to {cluster}: {error}") from error

    def __call__(self, command: list[str], environment: dict[str, str], errors: Path) -> Submitted:
        """Submit one run."""
        # The scheduler decides about GPUs and threads on the node.
        changes = {name: environment[name] for name in ("PYTHONPATH",)}
        return Submitted(self._executor.submit(_Run(), command, changes, str(errors)), errors)


class Submitted:
    """A job with what a sweep asks of a process."""

    returncode = 1

    def __init__(self, job: Any, errors: Path):
        self._job, self._errors = job, errors

    def poll(self) -> int | None:
        """Return the exit code if the job is over, else None; why a job did not run goes into the run's errors."""
        if not self._job.done():
            return None
        error = self._job.exception()
        if error is None:
            self.returncode = self._job.result()
        elif not self._errors.exists() or not self._errors.read_text(errors="replace").strip():
            self._errors.write_text(f"{error}\n")
        return self.returncode

    def terminate(self) -> None:
        """Cancel the job; the run saves when it is told to end."""
        self._job.cancel()

    def wait(self) -> None:
        """Wait until the job is over, a minute at most: a queue may take its time to cancel."""
        end = time.monotonic() + 60
        while not self._job.done(force_check=True) and time.monotonic() < end:
            time.sleep(1.0)


def _parsed(options: Iterable[str]) -> dict[str, Any]:
    pairs = [option.partition("=") for option in options]
    wrong = [name for name, equals, _ in pairs if not equals or not name]
    if wrong:
        raise RecipeError(f"--slurm {' '.join(wrong)}: use NAME=VALUE, such as slurm_partition=gpu")
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


class _Run:
    """Runs one command on the node. submitit submits it again when its time is over, and the run resumes."""

    def __call__(self, command: list[str], changes: dict[str, str], errors: str) -> int:
        nothing = subprocess.DEVNULL
        with open(errors, "wb") as file:
            environment = {**os.environ, **changes}
            process = subprocess.Popen(command, env=environment, stdin=nothing, stdout=nothing, stderr=file)
            try:
                return process.wait()
            finally:
                process.terminate()
                process.wait()

    def checkpoint(self, *args: Any) -> Any:
        """Return what submitit is to submit when the job has run out of time."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *args)
