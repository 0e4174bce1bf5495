"""What a run shows: a bar on a terminal, plain lines elsewhere, TensorBoard if asked for."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mimicnorm.errors import MimicNormError
from mimicnorm.training.recipes import Recipe

if TYPE_CHECKING:
    from torch import Tensor

SECONDS_BETWEEN_LINES = 60.0


def print_line(text: str, *, error: bool = False) -> None:
    """Print a line at once; if nobody reads the output any more (``| head -1``), print nothing from then on."""
    stream = sys.stderr if error else sys.stdout
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        silence(stream)


def silence(stream: TextIO) -> None:
    """Send what is still to be printed nowhere: the reader of a pipe has gone."""
    with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


class Progress:
    """Shows loss, accuracy, images per second and the time left; a context manager.

    Args:
        recipe: For the number of epochs and images per step.
        steps: Of the whole run.
        first: The step to begin at: not 0 in a resumed run.
        shown: False shows nothing (other processes than the first).
        board: The folder for TensorBoard's events, if they are wanted.
    """

    def __init__(self, recipe: Recipe, steps: int, first: int = 0, shown: bool = True, board: Path | None = None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.recipe, self.steps, self.first, self.shown = recipe, steps, first, shown
        self.started = self.last_line = time.monotonic()
        self.board = None if board is None else _summary_writer(board, first)
        console = Console()
        self.on_terminal = shown and console.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self.bar = Progress(*columns, console=console, transient=True, disable=not self.on_terminal)
        self.task = self.bar.add_task("", total=steps, completed=first)

    def __enter__(self) -> Progress:
        self.bar.start()
        if self.first:
            self.say(f"resumed at step {self.first}")
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
        if self.board is not None:
            self.board.close()

    def step(self, step: int) -> None:
        """Show that a step is done."""
        self.bar.update(self.task, completed=step)

    def loss(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """Show loss and accuracy: beside the bar, or as a line once a minute."""
        rate = (step - self.first) * self.recipe.batch / max(time.monotonic() - self.started, 1e-9)
        text = f"epoch {epoch}/{self.recipe.epochs}  loss {loss:.3f}  accuracy {accuracy:.1%}  {rate:.0f} images/s"
        self.bar.update(self.task, description=text)
        if not self.on_terminal and time.monotonic() - self.last_line > SECONDS_BETWEEN_LINES:
            left = (self.steps - step) * self.recipe.batch / max(rate, 1e-9)
            self.say(f"{text}  {left / 60:.0f} min left")

    def epoch(self, line: dict[str, Any]) -> None:
        """Show an epoch and its evaluation."""
        evaluated = "validation" if self.recipe.validation else "test"
        loss = "not finite" if line["test_loss"] is None else f"{line['test_loss']:.3f}"
        sure = ""
        if line["confidence"] is not None:
            sure = f" confidence {line['confidence']:.1%} calibration error {line['calibration_error']:.1%}"
        self.say(
            f"epoch {line['epoch']}/{self.recipe.epochs}  train loss {line['train_loss']:.3f} accuracy "
            f"{line['train_accuracy']:.1%}  {evaluated} loss {loss} top-1 {line['top1']:.2%} top-5 {line['top5']:.2%}"
            f"{sure}  {line['images_per_second']:.0f} images/s"
        )

    def say(self, text: str) -> None:
        """Show one plain line, above the bar if there is one."""
        self.last_line = time.monotonic()
        if self.on_terminal:
            self.bar.console.print(text, highlight=False, markup=False)
        elif self.shown:
            print_line(text)

    def board_line(self, line: dict[str, Any], variance: Tensor | None) -> None:
        """Write scalars, and the running variance of the last BN per class, to TensorBoard if it was asked for."""
        if self.board is None:
            return
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "step":
                self.board.add_scalar(name, value, line["step"])
        if variance is not None:
            self.board.add_histogram("last_norm_variance", variance, line["step"])
            for number, value in enumerate(variance.tolist()):
                self.board.add_scalar(f"last_norm_variance_by_class/{number}", value, line["step"])


def _summary_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MimicNormError("TensorBoard is not installed. Install it with: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=step)
