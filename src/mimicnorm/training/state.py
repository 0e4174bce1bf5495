"""All of resume: what a run leaves on disk, and how it continues from there.

    recipe.json  data.json                 what the folder was claimed for; anything else is refused
    metrics.jsonl                          the log; on resume it is cut back to the checkpoint
    checkpoints/step-*.safetensors         weights, optimizer, scaler and `Position`; the newest two
    weights.safetensors  result.json       of a finished run
    .lock                                  locked by the process that trains here

Every file but the log is whole or not there: it is written under another name, synced and renamed. Tensor files carry
a SHA-256 over every name, type, shape and byte and over their counters; nothing in them is executed on load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mimicnorm.data import Source
from mimicnorm.errors import CheckpointError, IntegerError, RecipeError
from mimicnorm.training.progress import print_line
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.step import Trainer

METRICS = "metrics.jsonl"
CHECKPOINTS = 2
"""How many checkpoints stay: the newest, and one to fall back on."""


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        status: "done", "diverged" (a loss that is not finite, at ``step``), or "interrupted" (saved at ``step``).
        step: Steps taken; of a diverged run, the first step with a loss that is not finite, counted from 1.
        history: One dict per epoch: epoch (from 1), step, lr, train_loss, train_accuracy, what `evaluate` measures
            (test_loss, top1, top5, confidence, calibration_error), last_norm_variance where there is a LastNorm,
            seconds and images_per_second of its training part.
        signal: Of an interrupted run, the number of the signal.
    """

    status: Literal["done", "diverged", "interrupted"]
    step: int
    history: list[dict[str, Any]] = field(default_factory=list)
    signal: int | None = None

    @property
    def top1(self) -> float | None:
        """Accuracy after the last epoch, on the test set or the images held out for validation."""
        return self.history[-1]["top1"] if self.history else None


@dataclass
class Position:
    """Where a run is. Everything else that decides the next step is a function of (recipe, step).

    Attributes:
        epoch: Epochs trained and evaluated.
        step: Steps taken in all.
        loss: Summed, like ``correct`` and ``seconds``, over the steps of the epoch that has begun.
        history: As in `Result`.
    """

    epoch: int = 0
    step: int = 0
    loss: float = 0.0
    correct: float = 0.0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class RunFolder:
    """The folder of one recipe's run; ``identity`` is what decides it beside the recipe."""

    def __init__(self, path: Path, recipe: Recipe, identity: Mapping[str, Any] | None = None):
        self.path, self.checkpoints = path, path / "checkpoints"
        self.recipe = recipe.resolved().as_dict() | dict(identity or {})
        self._log: IO[str] | None = None

    # -- beginning --------------------------------------------------------------------------------------------------

    def result(self, data: dict[str, Any] | None = None) -> Result | None:
        """Return the result if the run is over; only reads, so it needs no lock.

        A finished run whose result is damaged, or whose weights are missing or damaged, is not over: it makes them
        again from its last checkpoint.

        Args:
            data: See `data_identity`; a run on other data is an error.
        """
        self._require_claimed_for(data)
        path = self.path / "result.json"
        if not path.exists():
            return None
        try:
            result = Result(**json.loads(path.read_text()))
            if result.status not in ("done", "diverged") or not isinstance(result.step, int):
                raise TypeError(f"status {result.status!r} at step {result.step!r}")
            for line in result.history:
                float(line["top1"])
            if result.status == "done":
                load_tensors(self.path / "weights.safetensors")
        except (TypeError, ValueError, LookupError) as error:
            reason = error if isinstance(error, CheckpointError) else f"{path} is damaged: {error}"
            print_line(f"{reason}; making it again from the last checkpoint", error=True)
            return None
        return result

    def resume(self, data: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Go back to the newest good checkpoint, or to the start: cut the log, claim the folder.

        Returns:
            The checkpoint's tensors and counters, for `restore`; None at the start.
        """
        self._require_claimed_for(data)
        checkpoint = self._newest()
        if checkpoint is not None:
            self._require_same("recipe", self.recipe, checkpoint[1]["recipe"])
            self._require_same("data", data, checkpoint[1]["data"])
        self._cut_log(checkpoint[1]["logs"].get(METRICS, 0) if checkpoint else 0)
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot make the folder {self.checkpoints}: {error.strerror}") from error
        self.data = data
        write_json(self.path / "data.json", data)
        write_json(self.path / "recipe.json", self.recipe)  # last: a command that is refused must not claim a folder
        return checkpoint

    def _require_claimed_for(self, data: dict[str, Any] | None) -> None:
        for what, now in (("recipe", self.recipe), ("data", data)):
            path = self.path / f"{what}.json"
            if now is not None and path.exists():
                self._require_same(what, now, _read_json(path))

    def _require_same(self, what: str, now: dict[str, Any], earlier: dict[str, Any]) -> None:
        names = sorted(k for k in now.keys() | earlier.keys() if now.get(k) != earlier.get(k))
        if names:
            changed = ", ".join(f"{k} was {earlier.get(k)!r} and is {now.get(k)!r}" for k in names)
            other = "of another recipe" if what == "recipe" else "on other data"
            raise RecipeError(
                f"{self.path} holds a run {other}: {changed}. Use another folder, or the {what} it began with"
            )

    def _newest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the newest checkpoint that is whole."""
        paths = self._newest_first()
        for path in paths:
            try:
                return load_tensors(path)
            except CheckpointError as error:
                print_line(f"{error}; resuming from the checkpoint before it", error=True)
        if paths:
            raise CheckpointError(f"{self.checkpoints} has no checkpoint that is whole: start in another folder")
        return None

    def _newest_first(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*.safetensors"), reverse=True)

    # -- on the way -------------------------------------------------------------------------------------------------

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the log."""
        path = self.path / METRICS
        try:
            if self._log is None:
                self._log = open(path, "a")  # noqa: SIM115 (closed by close)
            self._log.write(json.dumps(line, allow_nan=False) + "\n")
            self._log.flush()
        except OSError as error:
            raise CheckpointError(f"cannot write {path}: {error.strerror}. Checkpoints stay") from error

    def save(self, trainer: Trainer, position: Position) -> None:
        """Write a checkpoint, then remove all but it and the one before."""
        if self._log is not None:
            os.fsync(self._log.fileno())  # what the checkpoint counts on is on the disk
        logs = {METRICS: _size(self.path / METRICS)}
        state = {"recipe": self.recipe, "data": self.data, "logs": logs, "scaler": trainer.scaler.state_dict()}
        path = self.checkpoints / f"step-{position.step:09d}.safetensors"
        save_tensors(path, trainer.tensors(), state | {"position": dataclasses.asdict(position)})
        others = self._newest_first()
        at = others.index(path)  # newer ones are damaged, or the run would have resumed from them
        for other in others[:at] + others[at + CHECKPOINTS :]:
            with contextlib.suppress(OSError):
                other.unlink()

    def _cut_log(self, length: int) -> None:
        path = self.path / METRICS
        if _size(path) < length:
            raise CheckpointError(f"{path} is shorter than at the last checkpoint: restore it, or use another folder")
        if path.exists():
            os.truncate(path, length)

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, result: Result, trainer: Trainer) -> None:
        """Write the final weights and the result; a diverged run has no weights."""
        if result.status == "done":
            save_tensors(self.path / "weights.safetensors", trainer.bare.state_dict(), {})
        write_json(self.path / "result.json", dataclasses.asdict(result))

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk was an error when the line was written
                self._log.close()


@contextlib.contextmanager
def run_folder(
    path: Path, recipe: Recipe, writes: bool, identity: Mapping[str, Any] | None = None
) -> Iterator[RunFolder]:
    """Open a run's folder; the process that writes locks it and removes what a kill left half written."""
    folder = RunFolder(path, recipe, identity)
    try:
        with lock(path, "training") if writes else contextlib.nullcontext():
            for partial in path.rglob(".*.partial") if writes else ():
                partial.unlink(missing_ok=True)
            yield folder
    finally:
        folder.close()


@contextlib.contextmanager
def lock(path: Path, doing: str) -> Iterator[None]:
    """Make a folder and hold it against other processes; the lock ends with the process, however that ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = open(path / ".lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise CheckpointError(f"cannot write to the folder {path}: {error.strerror}") from error
    with file:
        try:
            import fcntl

            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such locks
            pass
        except OSError as error:
            raise CheckpointError(
                f"another process is {doing} in {path}: wait for it, or use another folder"
            ) from error
        yield


def data_identity(train_set: Source, test_set: Source) -> dict[str, Any]:
    """Return what tells the data of a run from other data: sizes, and fingerprints of images and labels."""
    return {
        "training images": len(train_set),
        "test images": len(test_set),
        "classes": train_set.classes,
        "training fingerprint": train_set.fingerprint(),
        "test fingerprint": test_set.fingerprint(),
    }


# -- tensors of a run ----------------------------------------------------------------------------------------


def restore(trainer: Trainer, tensors: dict[str, Tensor], state: dict[str, Any]) -> Position:
    """Put a checkpoint back; return where it was."""
    try:
        trainer.load_tensors(tensors)
    except (RuntimeError, IndexError, IntegerError) as error:
        raise CheckpointError(
            f"the checkpoint does not fit the network that {trainer.recipe.model} builds now: {last_line(error)} Train "
            "in another folder"
        ) from error
    trainer.scaler.load_state_dict(state["scaler"])
    return Position(**state["position"])


def last_line(error: Exception) -> str:
    """Return one of the differences that ``load_state_dict`` lists, each on a line of its own."""
    return str(error).strip().splitlines()[-1].strip()


# -- files ---------------------------------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes) -> None:
    """Put bytes into a file so that, whatever happens, it has either its old content or all of the new."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        if os.name == "posix":  # bring the rename to the disk; Windows cannot open folders
            handle = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}. What was saved before is untouched: make room or make "
            "the folder writable, then start the same command again"
        ) from error


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write_atomically(path, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}, not an object")
        return data
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}. Restore it, or use another folder") from error


def save_tensors(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write tensors and counters into one safetensors file with a checksum."""
    plain = {k: t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format) for k, t in tensors.items()}
    text = json.dumps(state, allow_nan=False)
    header = json.dumps({"sha256": _checksum(plain, text), "state": text})
    write_atomically(path, safetensors.torch.save(plain, {"mimicnorm": header}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `save_tensors` wrote, into host memory; a ``CheckpointError`` if a bit is not as it was written."""
    try:
        with safe_open(path, "pt", device="cpu") as file:
            header = json.loads(file.metadata()["mimicnorm"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if _checksum(tensors, header["state"]) != header["sha256"]:
            raise ValueError("its checksum is wrong")
        return tensors, json.loads(header["state"])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def _checksum(tensors: dict[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # pyrefly: ignore
    return digest.hexdigest()
