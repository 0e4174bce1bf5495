"""What a run tells while it goes: a bar on a terminal, plain lines elsewhere, TensorBoard if asked for."""

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


def tell(text: str, *, error: bool = False) -> None:
    """Print a line at once; if nobody reads the output any more (``| head -1``), the work goes on without it."""
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
    """Shows loss, accuracy, images per second and the time left.

    Args:
        recipe: For the number of epochs and images per step.
        steps_per_epoch: For the time left.
        shown: False shows nothing (other processes than the first).
    """

    def __init__(self, recipe: Recipe, steps_per_epoch: int, shown: bool = True):
        self.recipe, self.total = recipe, recipe.epochs * steps_per_epoch
        self.shown = shown
        self.bar: Any = None
        self._first, self._started, self._last_line = 0, time.monotonic(), time.monotonic()

    def start(self, step: int) -> None:
        """Begin at a step (not 0 in a resumed run)."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._first, self._started = step, time.monotonic()
        console = Console()
        if self.shown and console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=console, transient=True)
            self.task = self.bar.add_task("", total=self.total, completed=step)
            self.bar.start()

    def step(self, step: int) -> None:
        """One step is done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=step)

    def loss(self, step: int, epoch: int, loss: float, accuracy: float) -> None:
        """Loss and accuracy are known."""
        rate = (step - self._first) * self.recipe.batch / max(time.monotonic() - self._started, 1e-9)
        text = f"epoch {epoch}/{self.recipe.epochs}  loss {loss:.3f}  accuracy {accuracy:.1%}  {rate:.0f} images/s"
        if self.bar is not None:
            self.bar.update(self.task, description=text)
        elif self.shown and time.monotonic() - self._last_line > SECONDS_BETWEEN_LINES:
            left = (self.total - step) * self.recipe.batch / max(rate, 1e-9)
            self.say(f"{text}  {left / 60:.0f} min left")

    def epoch(self, line: dict) -> None:
        """An epoch and its evaluation are done."""
        loss = "not finite" if line["test_loss"] is None else f"{line['test_loss']:.3f}"
        self.say(
            f"epoch {line['epoch']}/{self.recipe.epochs}  train loss {line['train_loss']:.3f} accuracy "
            f"{line['train_accuracy']:.1%}  test loss {loss} top-1 {line['top1']:.2%} top-5 {line['top5']:.2%}  "
            f"{line['images_per_second']:.0f} images/s"
        )

    def say(self, text: str, *, error: bool = False) -> None:
        """One plain line, above the bar if there is one; an error is said even where nothing else is shown."""
        if not (self.shown or error):
            return
        self._last_line = time.monotonic()
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False)
        else:
            tell(text, error=error)

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()


class TensorBoard:
    """Scalars, and the running variance of the last BN per class (Appendix B.2)."""

    def __init__(self, folder: Path, step: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MimicNormError("TensorBoard is not installed. Install it with: pip install tensorboard") from error
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step)

    def write(self, line: dict, variance: Tensor | None) -> None:
        """One line of metrics, and the variance of each class."""
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(name, value, line["step"])
        if variance is not None:
            self.writer.add_histogram("last_norm_variance", variance, line["step"])
            for number, value in enumerate(variance.tolist()):
                self.writer.add_scalar(f"last_norm_variance_by_class/{number}", value, line["step"])

    def close(self) -> None:
        """Write out what is held."""
        self.writer.close()
