"""The loop: one recipe, one folder, one result.

Order of the images, augmentation, learning rate and dropout are functions of (recipe, step). So a checkpoint holds
weights, momentum and a few counters (``state.py``), and a run that was killed anywhere resumes bit for bit.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mimicnorm import data
from mimicnorm.arguments import positive_int
from mimicnorm.errors import NonFiniteError, RecipeError
from mimicnorm.layers import LastNorm
from mimicnorm.training.build import network
from mimicnorm.training.evaluate import evaluate
from mimicnorm.training.processes import Processes, init_process_group
from mimicnorm.training.progress import Progress
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.state import Position, Result, RunFolder, data_identity, restore, run_folder
from mimicnorm.training.step import Trainer, epoch_batches, learning_rate

Sources = tuple[data.Source, data.Source]
PARENT = "MIMICNORM_PARENT"
"""Environment variable with the process without which a run is to stop: a sweep's."""


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data_dir: str | Path | None = None,
    sources: Sources | None = None,
    progress: bool = True,
    tensorboard: bool = False,
    checkpoint_steps: int = 0,
    checkpoint_seconds: float = 600.0,
    device: str = "auto",
    make_trainer: Callable[[Recipe, nn.Module, Processes, int], Trainer] = Trainer,
    identity: Mapping[str, Any] | None = None,
) -> Result:
    """Train a recipe in a folder; the same call again resumes, or returns the finished result.

    To resume on other data is an error. A finished result is returned without reading the data of the recipe again;
    ``sources`` are compared with what it was trained on. Under torchrun every process calls it. The caller's random
    state is left as it was.

    Args:
        recipe: What to train.
        out: The run's folder.
        data_dir: Where the data is; see ``mimicnorm.data.load``.
        sources: Training data, and data to evaluate on, to use instead of what the recipe names.
        progress: Show a bar on a terminal, lines elsewhere.
        tensorboard: Write TensorBoard events, too.
        checkpoint_steps: Steps between checkpoints, which are also saved at the end of each epoch; 0 is never.
        checkpoint_seconds: Seconds between checkpoints.
        device: "auto" is the GPU if there is one.
        make_trainer: Makes what takes the steps; ``mimicnorm.integer.run`` has another.
        identity: What decides the run beside the recipe; a folder that was begun with anything else is refused.

    Example:
        >>> from mimicnorm.training import recipe, train
        >>> train(recipe("digits-resnet10", epochs=1), "runs/digits").status  # doctest: +SKIP
        'done'
    """
    positive_int(checkpoint_steps, "checkpoint_steps", least=0, error=RecipeError)
    if not checkpoint_seconds >= 0:
        raise RecipeError(f"{checkpoint_seconds=}: use a number of seconds of at least 0")
    if sources and (recipe.validation or recipe.classes):
        raise RecipeError("sources are used as they are: choose classes and hold images out before, not in the recipe")
    with contextlib.ExitStack() as stack:
        processes = stack.enter_context(init_process_group(device))
        folder = stack.enter_context(run_folder(Path(out), recipe, processes.main, identity))
        result = processes.on_main(lambda: folder.result(data_identity(*sources) if sources else None))
        if result is not None:
            return result
        train_set, test_set = sources or load(recipe, data_dir)
        if not processes.size <= recipe.batch <= len(train_set):
            raise RecipeError(
                f"batch={recipe.batch}: it must be at most {len(train_set)}, the number of training images, and at "
                f"least {processes.size}, that of processes"
            )
        stack.enter_context(torch.random.fork_rng([processes.device] if processes.device.type == "cuda" else []))
        stop = stack.enter_context(_stop_signals())
        steps = recipe.epochs * (len(train_set) // recipe.batch)
        trainer = make_trainer(recipe, network(recipe, train_set), processes, steps)
        checkpoint = processes.on_main(lambda: folder.resume(data_identity(train_set, test_set)))
        position = restore(trainer, *checkpoint) if checkpoint else Position()
        board = folder.path / "tensorboard" if tensorboard and processes.main else None
        bar = stack.enter_context(Progress(recipe, steps, position.step, progress and processes.main, board))
        run = _Run(trainer, folder, bar, stop, position, checkpoint_steps, checkpoint_seconds)
        return _train_loop(run, train_set, test_set)


def _train_loop(run: _Run, train_set: data.Source, test_set: data.Source) -> Result:
    try:
        while run.position.epoch < run.trainer.recipe.epochs:
            for images, labels in run.rest_of_epoch(train_set):
                run.count(*run.trainer.step(images, labels, run.position.step))
                if run.save_if_due():
                    return run.end("interrupted")
            run.read_pending()
            run.end_epoch(evaluate(run.trainer, test_set))
            if run.save_if_due() and run.position.epoch < run.trainer.recipe.epochs:
                return run.end("interrupted")
    except NonFiniteError:
        return run.end("diverged")
    return run.end("done")


@dataclass
class _Run:
    """A run in progress, the same in every process; the main one writes."""

    trainer: Trainer
    folder: RunFolder
    bar: Progress
    stop: list[int]
    position: Position
    checkpoint_steps: int
    checkpoint_seconds: float

    def __post_init__(self) -> None:
        self.recipe, self.processes = self.trainer.recipe, self.trainer.processes
        self.steps_per_epoch = self.trainer.steps // self.recipe.epochs
        self.saved_at = time.monotonic()
        self.pending: list[Tensor] = []

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that has begun."""
        return self.position.step - self.position.epoch * self.steps_per_epoch

    def rest_of_epoch(self, source: data.Source) -> Iterator[tuple[Tensor, Tensor]]:
        """Give this process's share of every batch that is still to come in the epoch."""
        recipe, epoch = self.recipe, self.position.epoch
        batches = epoch_batches(recipe, len(source), epoch)[self.batches_done :]
        shares = [self.processes.share(batch) for batch in batches]
        augment = recipe.augment != "none"
        self.clock = time.perf_counter()
        yield from source.batches(shares, seed=recipe.seed, epoch=epoch, augment=augment, device=self.processes.device)

    def count(self, loss: Tensor, correct: Tensor) -> None:
        """Count one more step. Its numbers stay on the device for now: reading them would make it wait."""
        self.position.step += 1
        self.pending.append(torch.stack([loss.float(), correct.float()]))
        self.bar.step(self.position.step)
        if self.position.step % self.recipe.log_every == 0:
            loss_now = self.read_pending()
            line: dict[str, Any] = {"step": self.position.step, "loss": loss_now, "lr": self._rate()}
            # Not at the end of an epoch: a run that resumes there has no logits.
            if last_norm_variance(self.trainer) is None and (values := self.trainer.logit_variance()) is not None:
                line["logit_variance"] = _range(values)
            self._log(line)
            accuracy = self.position.correct / (self.batches_done * self.recipe.batch)
            self.bar.loss(self.position.step, self.position.epoch + 1, loss_now, accuracy)

    def read_pending(self) -> float:
        """Add the pending steps of all processes to the position; return the last loss.

        Raises:
            NonFiniteError: In all processes, if a loss is not finite in one; the position's step is the one before.
        """
        loss, position = math.nan, self.position
        counts = self.processes.sum(torch.stack(self.pending)).tolist() if self.pending else []
        self.pending.clear()
        for step, (loss, correct) in enumerate(counts, position.step - len(counts) + 1):
            if not math.isfinite(loss):
                position.step = step - 1
                raise NonFiniteError(f"the loss of step {step} is {loss}")
            position.loss, position.correct = position.loss + loss, position.correct + correct
        now = time.perf_counter()
        position.seconds, self.clock = position.seconds + now - self.clock, now
        return loss

    def end_epoch(self, measured: dict[str, float | None]) -> None:
        """Write down an epoch and its evaluation, and save."""
        at, images = self.position, self.steps_per_epoch * self.recipe.batch
        means = {"train_loss": at.loss / self.steps_per_epoch, "train_accuracy": at.correct / images}
        line = {"epoch": at.epoch + 1, "step": at.step, "lr": self._rate(), **means, **measured}
        timing = {"epoch": at.epoch + 1, "seconds": at.seconds, "images_per_second": images / max(at.seconds, 1e-9)}
        self._log(line)  # without the timing, in which alone two runs of a recipe may differ
        self.bar.epoch(line | timing)
        self.position = Position(at.epoch + 1, at.step, history=[*at.history, line | timing])
        self._save()

    def _log(self, line: dict[str, Any]) -> None:
        variance = last_norm_variance(self.trainer)
        if variance is not None:
            line["last_norm_variance"] = _range(variance)
        self.processes.on_main(lambda: self.folder.append(line))
        self.bar.board_line(line, variance)

    def _rate(self) -> float:
        """Return the learning rate of the step that was just done."""
        return learning_rate(self.recipe, self.position.step - 1, self.trainer.steps)

    def save_if_due(self) -> bool:
        """Save if a checkpoint is due or the run is to stop; return whether to stop. All processes agree."""
        due = time.monotonic() - self.saved_at > self.checkpoint_seconds
        due |= bool(self.checkpoint_steps) and self.position.step % self.checkpoint_steps == 0
        orphan = os.environ.get(PARENT, "") not in ("", str(os.getppid()))
        stop, due = self.processes.any(bool(self.stop) or orphan, due)
        batches = self.batches_done  # 0 after an epoch's end, which has saved
        if batches and (stop or (due and batches < self.steps_per_epoch)):
            self.read_pending()
            self._save()
        return stop

    def _save(self) -> None:
        self.processes.on_main(lambda: self.folder.save(self.trainer, self.position))
        self.saved_at = time.monotonic()

    def end(self, status: Literal["done", "diverged", "interrupted"]) -> Result:
        """Return the result; unless interrupted, write it down."""
        step, history = self.position.step, self.position.history
        if status == "interrupted":
            self.bar.say(f"stopped and saved at step {step}; run the same command to continue")
            return Result(status, step, history, self.stop[0] if self.stop else None)
        if status == "diverged":
            step += 1  # the first one with a loss that is not finite
            self.bar.say(f"diverged: the loss of step {step} is not finite")
        result = Result(status, step, history)
        self.processes.on_main(lambda: self.folder.finish(result, self.trainer))
        return result


def _range(values: Tensor) -> dict[str, float]:
    return {name: float(f(values)) for name, f in (("min", torch.min), ("median", torch.median), ("max", torch.max))}


def last_norm_variance(trainer: Trainer) -> Tensor | None:
    """Return the running variance of each class's logits in the last BN (the paper's Appendix B.2), if there is one."""
    return next((m.running_var for m in trainer.bare.modules() if isinstance(m, LastNorm)), None)


def load(recipe: Recipe, data_dir: str | Path | None = None) -> Sources:
    """Load the training data that a recipe names, and the data to evaluate on.

    That is the test set, or the images held out for validation; the test set is not read then.
    """
    options: dict[str, Any] = {"data_dir": data_dir, "augment": recipe.augment}
    options |= {"classes": recipe.class_indices(), "validation": recipe.validation}
    train_set = data.load(recipe.data, "train", limit=recipe.limit or None, **options)
    split = "validation" if recipe.validation else "test"
    return train_set, data.load(recipe.data, split, limit=recipe.test_limit or None, **options)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT, so that the step can be finished and saved first; a second Ctrl-C stops at once."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)

    here = threading.current_thread() is threading.main_thread()  # elsewhere Python sets no handlers
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT) if here}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
