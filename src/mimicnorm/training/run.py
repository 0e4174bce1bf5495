"""The state of a run: what it has counted, how it is written down, saved, and found again."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from mimicnorm.training import checkpoint
from mimicnorm.training.evaluate import last_norm_variance
from mimicnorm.training.folder import METRICS, TIMING, Result, RunFolder
from mimicnorm.training.progress import Progress, TensorBoard
from mimicnorm.training.schedule import learning_rate
from mimicnorm.training.step import Trainer
from mimicnorm.training.stopping import Stopping


@dataclass
class Position:
    """Where a run is: all that a checkpoint holds beside tensors.

    Attributes:
        epoch: Epochs done.
        batch: Batches done of the next one; ``loss``, ``correct`` and ``seconds`` are summed over them.
        step: Steps done in all.
    """

    epoch: int = 0
    batch: int = 0
    step: int = 0
    loss: float = 0.0
    correct: float = 0.0
    seconds: float = 0.0


class Diverged(Exception):
    """The loss of a step was not finite."""

    def __init__(self, step: int):
        super().__init__(step)
        self.step = step


@dataclass
class Run:
    """A recipe on its way; every process has one, the main one writes."""

    trainer: Trainer
    folder: RunFolder
    bar: Progress
    stopping: Stopping
    data: dict
    checkpoint_steps: int
    checkpoint_seconds: float
    board: TensorBoard | None = None

    def __post_init__(self) -> None:
        self.recipe, self.processes = self.trainer.recipe, self.trainer.processes
        self.at = Position()
        self.saved = time.monotonic()

    # -- counting: sums stay on the device, where reading them would make it wait -----------------------------------

    def start_counting(self) -> None:
        """Start an epoch, or go on in one."""
        start = (self.at.loss, self.at.correct) if self.processes.main else (0.0, 0.0)
        self.sums = torch.tensor(start, dtype=torch.float64, device=self.processes.device)
        self.first_bad = torch.full((), math.inf, dtype=torch.float64, device=self.processes.device)
        self.since = time.perf_counter()

    def count(self, loss: Tensor, correct: Tensor) -> None:
        """One more step is done."""
        at = self.at
        at.step, at.batch = at.step + 1, at.batch + 1
        self.latest = loss
        self.sums += torch.stack([loss.double(), correct.double()])
        self.first_bad = torch.where(loss.isfinite(), self.first_bad, self.first_bad.clamp(max=at.step))
        self.bar.step(at.step)
        if at.step % self.recipe.log_every == 0:
            self._log_step()

    def read_counts(self) -> None:
        """Bring the counts of all processes into the position; raises `Diverged` in all if in one."""
        bad = float(self.processes.min(self.first_bad))
        if math.isfinite(bad):
            raise Diverged(int(bad))
        self.at.loss, self.at.correct = self.processes.sum(self.sums).tolist()
        now = time.perf_counter()
        self.at.seconds, self.since = self.at.seconds + now - self.since, now

    # -- writing down -----------------------------------------------------------------------------------------------

    def _log_step(self) -> None:
        self.read_counts()
        at, loss = self.at, float(self.processes.sum(self.latest))
        self._write({"step": at.step, "loss": loss, "lr": self._rate()})
        self.bar.loss(at.step, at.epoch + 1, loss, at.correct / (at.batch * self.recipe.batch))

    def log_epoch(self, measured: dict) -> None:
        """An epoch and its evaluation are done: write both down and save."""
        at = self.at
        images = at.batch * self.recipe.batch
        line = {"epoch": at.epoch + 1, "step": at.step, "lr": self._rate()}
        line |= {"train_loss": at.loss / at.batch, "train_accuracy": at.correct / images, **measured}
        timing = {"epoch": at.epoch + 1, "seconds": at.seconds, "images_per_second": images / max(at.seconds, 1e-9)}
        self._write(line, timing)
        self.bar.epoch(line | timing)
        self.at = Position(epoch=at.epoch + 1, step=at.step)
        self.save()

    def _write(self, line: dict, timing: dict | None = None) -> None:
        variance = last_norm_variance(self.trainer)
        if variance is not None:
            low, middle, high = (float(f(variance)) for f in (torch.min, torch.median, torch.max))
            line["last_norm_variance"] = {"min": low, "median": middle, "max": high}
        with self.processes.all_or_none():
            if self.processes.main:
                self.folder.append(METRICS, line)
                if timing is not None:
                    self.folder.append(TIMING, timing)
        if self.board is not None:
            self.board.write(line, variance)

    def _rate(self) -> float:
        """The learning rate of the step that was just done."""
        return learning_rate(self.recipe, self.at.step - 1, self.trainer.steps_per_epoch)

    # -- saving and ending ------------------------------------------------------------------------------------------

    def stop_or_save(self) -> bool:
        """Save where that is due; whether to stop. All processes answer alike."""
        due = self.processes.main and time.monotonic() - self.saved > self.checkpoint_seconds
        due |= bool(self.checkpoint_steps) and self.at.step % self.checkpoint_steps == 0
        stop, due = self.processes.any(self.stopping.signal is not None, due)
        if (stop and self.at.batch) or (due and 0 < self.at.batch < self.trainer.steps_per_epoch):
            self.read_counts()
            self.save()  # at the end of an epoch log_epoch does
            self.start_counting()
        return stop

    def save(self) -> None:
        """Write a checkpoint."""
        with self.processes.all_or_none():
            if self.processes.main:
                state = {
                    "at": dataclasses.asdict(self.at),
                    "recipe": self.recipe.as_dict(),
                    "data": self.data,
                    "scaler": self.trainer.scaler.state_dict(),
                    "logs": self.folder.lengths(),
                }
                checkpoint.save(self.folder.checkpoints, self.at.step, self.trainer.tensors(), state)
        self.saved = time.monotonic()

    def resume(self) -> None:
        """Go back to the newest good checkpoint, in all processes; to the start if there is none."""
        tensors, state = None, {}
        with self.processes.all_or_none():
            if self.processes.main:
                self.folder.require_data(self.data)
                tensors, state, damaged = checkpoint.load_latest(self.folder.checkpoints)
                if state:
                    self.folder.require_same(self.recipe, state["recipe"])
                    self.folder.require_same_data(self.data, state["data"])
                for text in damaged:
                    self.bar.say(f"{text}; going on from step {state['at']['step']} instead", error=True)
                self.folder.cut(state.get("logs", {}))
                self.folder.claim(self.recipe, self.data)  # not before: a mistake must not claim a folder
        state = self.processes.from_main(state)
        if state:
            self.trainer.restore(tensors, state["scaler"])
            self.at = Position(**state["at"])
            self.bar.say(f"resumed at step {self.at.step}")

    def interrupted(self) -> Result:
        """The run was asked to stop, and is saved."""
        self.bar.say(f"stopped and saved at step {self.at.step}; the same command goes on from there")
        return Result("interrupted", self.at.step, self._history(), self.stopping.signal)

    def diverged(self, step: int) -> Result:
        """The run is over: a loss was not finite."""
        self.bar.say(f"diverged: the loss of step {step} is not finite")
        return self._ended(Result("diverged", step, self._history()))

    def done(self) -> Result:
        """The run is over: leave the weights."""
        with self.processes.all_or_none():
            if self.processes.main:
                weights = checkpoint.weights(self.trainer.bare.state_dict())
                checkpoint.write_atomically(self.folder.path / "weights.safetensors", weights)
        return self._ended(Result("done", self.at.step, self._history()))

    def _history(self) -> list[dict]:
        return self.processes.from_main(self.folder.history() if self.processes.main else None)

    def _ended(self, result: Result) -> Result:
        with self.processes.all_or_none():
            if self.processes.main:
                self.folder.write("result.json", dataclasses.asdict(result))
        return result
