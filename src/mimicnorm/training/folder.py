"""A run's folder: recipe.json, data.json, metrics.jsonl, timing.jsonl, checkpoints/; in the end weights and result."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from mimicnorm.data import Source
from mimicnorm.errors import CheckpointError, RecipeError
from mimicnorm.training.checkpoint import write_atomically
from mimicnorm.training.recipes import Recipe

METRICS, TIMING, DATA = "metrics.jsonl", "timing.jsonl", "data.json"


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: "done", "diverged" (a loss that is not finite, at ``step``), or "interrupted" (saved at ``step``).
        step: Steps taken; of a diverged run, the first step with a loss that is not finite, counted from 1.
        history: One dict per epoch: epoch (from 1), step, lr, train_loss, train_accuracy, test_loss, top1, top5 (parts
            of 1), last_norm_variance where there is a LastNorm, seconds and images_per_second of its training part.
        signal: Of an interrupted run, the number of the signal.
    """

    status: Literal["done", "diverged", "interrupted"]
    step: int
    history: list[dict[str, Any]] = field(default_factory=list)
    signal: int | None = None

    @property
    def top1(self) -> float | None:
        """Test accuracy after the last epoch."""
        return self.history[-1]["top1"] if self.history else None


class RunFolder:
    """What is on disk of a run. Lines are appended; what a kill left behind the checkpoint is cut off on resume."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._open: dict[str, IO[str]] = {}

    def begin(self, recipe: Recipe, data: dict | None = None) -> Result | None:
        """See that the folder is new or holds a run of this recipe; returns the result if the run is over.

        With ``data`` (see `data_identity`), a run on other data is refused, too.
        """
        for partial in (*self.path.glob(".*.partial"), *self.checkpoints.glob(".*.partial")):
            partial.unlink(missing_ok=True)  # a kill while writing
        if (self.path / "recipe.json").exists():
            self.require_same(recipe, self._read("recipe.json"))
        if data is not None:
            self.require_data(data)
        if (self.path / "result.json").exists():
            return self._result()
        return None

    def _result(self) -> Result:
        found = self._read("result.json")
        try:
            result = Result(**found)
            if result.status not in ("done", "diverged") or any("top1" not in line for line in result.history):
                raise TypeError(f"status {result.status!r}")
            return result
        except TypeError as error:
            path = self.path / "result.json"
            raise CheckpointError(f"{path} holds no result of a run ({error}). Use another folder") from error

    def claim(self, recipe: Recipe, data: dict) -> None:
        """Write down recipe and data, and make room for checkpoints: a run of them begins, or goes on, here."""
        try:
            self.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {self.checkpoints}: {error.strerror}") from error
        self.write(DATA, data)
        self.write("recipe.json", recipe.as_dict())

    def require_same(self, recipe: Recipe, earlier: dict) -> None:
        """Refuse to resume a run of another recipe."""
        now = recipe.as_dict()
        names = sorted(k for k in now.keys() | earlier.keys() if now.get(k) != earlier.get(k))
        if names:
            changed = ", ".join(f"{k} was {earlier.get(k)!r} and is {now.get(k)!r}" for k in names)
            raise RecipeError(
                f"{self.path} holds a run of another recipe: {changed}. Use another folder, or the recipe it began with"
            )

    def require_same_data(self, data: dict, earlier: dict | list) -> None:
        """Refuse to go on with a run on other data; a run of an older version knows the sizes of its data alone."""
        was = {"sizes": earlier} if isinstance(earlier, list) else earlier
        changed = [key for key in data if key in was and was[key] != data[key]]
        if not changed:
            return
        key = changed[0]
        what = "[training images, test images, classes]" if key == "sizes" else f"the fingerprint of the {key} images"
        raise RecipeError(
            f"{self.path} holds a run on other data: {what} was {was[key]}, is {data[key]}. Use another folder, or the "
            "data it began with"
        )

    def require_data(self, data: dict) -> None:
        """Refuse a folder that was claimed for other data."""
        if (self.path / DATA).exists():
            self.require_same_data(data, self._read(DATA))

    def append(self, name: str, line: dict) -> None:
        """Add one line to a log."""
        try:
            if name not in self._open:
                self._open[name] = open(self.path / name, "a")  # noqa: SIM115 (closed by close)
            self._open[name].write(json.dumps(line, allow_nan=False) + "\n")
            self._open[name].flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path / name}: {error.strerror}. Checkpoints stay") from error

    def lengths(self) -> dict[str, int]:
        """Bytes of each log, which are on the disk when this returns."""
        for file in self._open.values():
            os.fsync(file.fileno())
        return {name: (self.path / name).stat().st_size for name in (METRICS, TIMING) if (self.path / name).exists()}

    def cut(self, lengths: dict[str, int]) -> None:
        """Bring the logs back to the lengths a checkpoint knows."""
        for name in (METRICS, TIMING):
            path, length = self.path / name, lengths.get(name, 0)
            size = path.stat().st_size if path.exists() else 0
            if size < length:
                raise CheckpointError(f"{path} has lost lines that the checkpoint counts on: put the file back")
            if size > length:
                os.truncate(path, length)

    def history(self) -> list[dict]:
        """Metrics and timing of every finished epoch."""
        timing = {line["epoch"]: line for line in self._lines(TIMING)}
        return [{**m, **timing.get(m["epoch"], {})} for m in self._lines(METRICS) if "top1" in m]

    def write(self, name: str, data: dict) -> None:
        """Write a JSON file, whole or not at all."""
        write_atomically(self.path / name, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())

    def _lines(self, name: str) -> list[dict]:
        path = self.path / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _read(self, name: str) -> dict:
        try:
            found = json.loads((self.path / name).read_text())
            if not isinstance(found, dict):
                raise ValueError(f"it holds a {type(found).__name__}, not fields by name")
            return found
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}. Use another folder") from error

    def close(self) -> None:
        """Close the logs."""
        for file in self._open.values():
            with contextlib.suppress(OSError):  # a full disk said so when the line was written
                file.close()
        self._open.clear()


def data_identity(train_set: Source, test_set: Source) -> dict[str, Any]:
    """What tells the data of a run from other data: sizes, and fingerprints of images and labels."""
    return {
        "sizes": [len(train_set), len(test_set), train_set.classes],
        "training": train_set.fingerprint(),
        "test": test_set.fingerprint(),
    }


@contextlib.contextmanager
def opened(path: Path, writes: bool) -> Iterator[RunFolder]:
    """A run's folder, held against a second run in the same place by the process that writes."""
    folder = RunFolder(path)
    try:
        with _held(path) if writes else contextlib.nullcontext():
            yield folder
    finally:
        folder.close()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # Windows: nobody watches
        yield
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = open(path / ".lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise CheckpointError(f"cannot write to the folder {path}: {error.strerror}") from error
    with lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except OSError as error:
            raise CheckpointError(
                f"another process is training in {path}: wait for it, or use another folder"
            ) from error
        yield
