"""The loop: one recipe, one folder, one result, whatever happens on the way.

Everything that decides a step is a function of (recipe, step): the order of the images, their augmentation, the
learning rate, dropout. So a checkpoint is weights, momentum and a few counters, and a run that was killed anywhere
goes on bit for bit as if it had not been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mimicnorm import data
from mimicnorm.errors import NonFiniteError, RecipeError
from mimicnorm.training import checkpoint
from mimicnorm.training.build import network
from mimicnorm.training.evaluate import evaluate, last_norm_variance
from mimicnorm.training.folder import METRICS, TIMING, Result, RunFolder, opened
from mimicnorm.training.processes import Processes, joined
from mimicnorm.training.progress import Progress, TensorBoard
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.schedule import batches_of, learning_rate
from mimicnorm.training.step import Trainer
from mimicnorm.training.stopping import Stopping


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    sources: tuple[data.Source, data.Source] | None = None,
    progress: bool = True,
    tensorboard: bool = False,
    checkpoint_steps: int = 0,
    checkpoint_seconds: float = 600.0,
    device: str = "auto",
) -> Result:
    """Train a recipe in a folder; the same call again resumes, or returns the finished result.

    Args:
        recipe: What to train.
        out: The run's folder.
        data_dir: Where the data is; see ``mimicnorm.data.load``.
        sources: Training and test data to use instead of what the recipe names.
        progress: Show a bar on a terminal, lines elsewhere.
        tensorboard: Write TensorBoard events, too.
        checkpoint_steps: Save every so many steps beside the end of each epoch; 0 is never.
        checkpoint_seconds: Save when this long has passed.
        device: "auto" is the GPU if there is one.

    Example:
        >>> from mimicnorm.training import recipe, train
        >>> train(recipe("digits-resnet10", epochs=1), "runs/digits").status  # doctest: +SKIP
        'done'
    """
    with joined(device) as processes, opened(Path(out), processes.main) as folder:
        with processes.main_does():
            over = folder.begin(recipe) if processes.main else None
        over = processes.from_main(over)
        if over is not None:
            return over
        train_set, test_set = sources or _load(recipe, data_dir)
        steps_per_epoch = len(train_set) // recipe.batch
        if steps_per_epoch == 0 or recipe.batch < processes.size:
            raise RecipeError(
                f"batch={recipe.batch} does not fit {len(train_set)} training images and {processes.size} processes"
            )
        devices = [processes.device] if processes.device.type == "cuda" else []
        with torch.random.fork_rng(devices), Stopping() as stopping:
            trainer = Trainer(recipe, network(recipe, train_set), processes, steps_per_epoch)
            bar = Progress(recipe, steps_per_epoch, progress and processes.main)
            run = _Run(recipe, trainer, processes, folder, bar, stopping, checkpoint_steps, checkpoint_seconds)
            with contextlib.closing(bar):
                return run.to_the_end(train_set, test_set, tensorboard)


def _load(recipe: Recipe, data_dir: str | Path | None) -> tuple[data.Source, data.Source]:
    kinds = (("train", recipe.limit), ("test", recipe.test_limit))
    train_set, test_set = (
        data.load(recipe.data, split, data_dir=data_dir, limit=limit or None, augment=recipe.augment)
        for split, limit in kinds
    )
    return train_set, test_set


@dataclass
class _Position:
    """Where a run is: all that a checkpoint holds beside tensors."""

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0
    correct: float = 0.0
    seconds: float = 0.0


class _Diverged(Exception):
    """A loss was not finite."""


@dataclass
class _Run:
    recipe: Recipe
    trainer: Trainer
    processes: Processes
    folder: RunFolder
    bar: Progress
    stopping: Stopping
    checkpoint_steps: int
    checkpoint_seconds: float

    def to_the_end(self, train_set: data.Source, test_set: data.Source, tensorboard: bool) -> Result:
        self.fingerprint = [len(train_set), len(test_set), train_set.classes]
        self.at = at = self._resume()
        self.board = TensorBoard(self.folder.path, at.step) if tensorboard and self.processes.main else None
        self.bar.start(at.step)
        try:
            while at.epoch < self.recipe.epochs:
                self._start_counting()
                for images, labels in self._rest_of_epoch(train_set):
                    self._count(*self.trainer.step(images, labels, at.step))
                    at.step, at.batch = at.step + 1, at.batch + 1
                    self.bar.step(at.step)
                    if at.step % self.recipe.log_every == 0:
                        self._log_step()
                    if at.batch < self.trainer.steps_per_epoch and self._stop_or_save():
                        return self._interrupted()
                self._read_counts()
                self._log_epoch(evaluate(self.trainer, test_set))
                self._save()
                if self.processes.any(self.stopping.signal is not None)[0] and at.epoch < self.recipe.epochs:
                    return self._interrupted()
        except (_Diverged, NonFiniteError) as error:
            step = int(str(error)) if isinstance(error, _Diverged) else at.step + 1
            self.bar.say(f"diverged: the loss of step {step} is not finite")
            return self._end(Result("diverged", step, self._history()))
        finally:
            if self.board is not None:
                self.board.close()
        with self.processes.main_does():
            if self.processes.main:
                weights = checkpoint.weights(self.trainer.bare.state_dict())
                checkpoint.write_atomically(self.folder.path / "weights.safetensors", weights)
        return self._end(Result("done", at.step, self._history()))

    def _rest_of_epoch(self, source: data.Source) -> Iterator[tuple[Tensor, Tensor]]:
        recipe, epoch = self.recipe, self.at.epoch
        rest = batches_of(recipe, len(source), epoch)[self.at.batch :]
        shares = [self.processes.share(b) for b in rest]
        augment, device = recipe.augment != "none", self.processes.device
        return iter(source.batches(shares, seed=recipe.seed, epoch=epoch, augment=augment, device=device))

    # -- counting: sums stay on the device, where reading them would make it wait -----------------------------------

    def _start_counting(self) -> None:
        start = (self.at.loss, self.at.correct) if self.processes.main else (0.0, 0.0)
        self.sums = torch.tensor(start, dtype=torch.float64, device=self.processes.device)
        self.first_bad = torch.full((), math.inf, dtype=torch.float64, device=self.processes.device)
        self.since = time.perf_counter()

    def _count(self, loss: Tensor, correct: Tensor) -> None:
        self.latest = loss
        self.sums += torch.stack([loss.double(), correct.double()])
        step = torch.where(loss.isfinite(), math.inf, float(self.at.step + 1))
        self.first_bad = torch.minimum(self.first_bad, step.double())

    def _read_counts(self) -> None:
        """Bring the counts of all processes into the position; ends the run if a loss was not finite."""
        bad = float(self.processes.min(self.first_bad))
        if math.isfinite(bad):
            raise _Diverged(int(bad))
        self.at.loss, self.at.correct = self.processes.sum(self.sums).tolist()
        now = time.perf_counter()
        self.at.seconds, self.since = self.at.seconds + now - self.since, now

    def _log_step(self) -> None:
        self._read_counts()
        at, steps = self.at, self.at.batch
        loss = float(self.processes.sum(self.latest))
        line = {"step": at.step, "loss": loss, "lr": self._rate(at.step - 1)}
        self._write(line)
        self.bar.loss(at.step, at.epoch + 1, loss, at.correct / (steps * self.recipe.batch))

    def _log_epoch(self, measured: dict) -> None:
        at, steps = self.at, self.trainer.steps_per_epoch
        images = steps * self.recipe.batch
        line = {
            "epoch": at.epoch + 1,
            "step": at.step,
            "lr": self._rate(at.step - 1),
            "train_loss": at.loss / steps,
            "train_accuracy": at.correct / images,
            **measured,
        }
        timing = {"epoch": at.epoch + 1, "seconds": at.seconds, "images_per_second": images / max(at.seconds, 1e-9)}
        self._write(line)
        if self.processes.main:
            self.folder.append(TIMING, timing)
        self.bar.epoch(line | timing)
        at.epoch, at.batch, at.loss, at.correct, at.seconds = at.epoch + 1, 0, 0.0, 0.0, 0.0

    def _write(self, line: dict) -> None:
        variance = last_norm_variance(self.trainer)
        if variance is not None:
            low, middle, high = (float(f(variance)) for f in (torch.min, torch.median, torch.max))
            line["last_norm_variance"] = {"min": low, "median": middle, "max": high}
        with self.processes.main_does():
            if self.processes.main:
                self.folder.append(METRICS, line)
        if self.board is not None:
            self.board.write(line, variance)

    def _rate(self, step: int) -> float:
        return learning_rate(self.recipe, step, self.trainer.steps_per_epoch)

    # -- saving and ending ------------------------------------------------------------------------------------------

    def _stop_or_save(self) -> bool:
        """Save where it is due; whether to stop."""
        due = time.monotonic() - self.saved > self.checkpoint_seconds and self.processes.main
        due |= bool(self.checkpoint_steps) and self.at.step % self.checkpoint_steps == 0
        stop, due = self.processes.any(self.stopping.signal is not None, due)
        if stop or due:
            self._read_counts()
            self._save()
            self._start_counting()
        return stop

    def _save(self) -> None:
        with self.processes.main_does():
            if self.processes.main:
                state = {
                    "at": dataclasses.asdict(self.at),
                    "recipe": self.recipe.as_dict(),
                    "data": self.fingerprint,
                    "scaler": self.trainer.scaler.state_dict(),
                    "logs": self.folder.lengths(),
                }
                checkpoint.save(self.folder.checkpoints, self.at.step, self.trainer.tensors(), state)
        self.saved = time.monotonic()

    def _resume(self) -> _Position:
        """Go back to the newest checkpoint, in all processes."""
        tensors, state = None, {}
        with self.processes.main_does():
            if self.processes.main:
                tensors, state, damaged = checkpoint.load_latest(self.folder.checkpoints)
                if tensors is not None:
                    self.folder.require_same(self.recipe, state["recipe"])
                    if state["data"] != self.fingerprint:
                        was, now = state["data"], self.fingerprint
                        raise RecipeError(f"the data changed: [training, test images, classes] was {was}, is {now}")
                for text in damaged:
                    self.bar.say(f"{text}; going on from step {state['at']['step']}", error=True)
                self.folder.cut(state.get("logs", {}))
        state = self.processes.from_main(state)
        self.saved = time.monotonic()
        if not state:
            return _Position()
        self.trainer.restore(tensors, state["scaler"])
        self.bar.say(f"resumed at step {state['at']['step']}")
        return _Position(**state["at"])

    def _interrupted(self) -> Result:
        self.bar.say(f"stopped and saved at step {self.at.step}; the same command goes on from there")
        return Result("interrupted", self.at.step, self._history(), self.stopping.signal)

    def _history(self) -> list[dict]:
        return self.processes.from_main(self.folder.history() if self.processes.main else None)

    def _end(self, result: Result) -> Result:
        with self.processes.main_does():
            if self.processes.main:
                self.folder.end(result)
        return result
