"""The loop: one recipe, one folder, one result, whatever happens on the way.

Everything that decides a step is a function of (recipe, step): the order of the images, their augmentation, the
learning rate, dropout. So a checkpoint is weights, momentum and a few counters, and a run that was killed anywhere
goes on bit for bit as if it had not been.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from mimicnorm import data
from mimicnorm.errors import NonFiniteError, RecipeError
from mimicnorm.training.build import network
from mimicnorm.training.evaluate import evaluate
from mimicnorm.training.folder import Result, data_identity, opened
from mimicnorm.training.processes import joined
from mimicnorm.training.progress import Progress, TensorBoard
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.run import Diverged, Run
from mimicnorm.training.schedule import batches_of
from mimicnorm.training.step import Trainer
from mimicnorm.training.stopping import Stopping

Sources = tuple[data.Source, data.Source]


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
) -> Result:
    """Train a recipe in a folder; the same call again resumes, or returns the finished result.

    To resume on other data is an error. A finished result is returned without reading the data of the recipe again;
    ``sources`` are compared with what it was trained on. Under torchrun every process calls it. The caller's random
    state is left as it was.

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
    if checkpoint_steps < 0 or not checkpoint_seconds >= 0:
        raise RecipeError(f"{checkpoint_steps=} and {checkpoint_seconds=} must not be negative")
    with joined(device) as processes, opened(Path(out), processes.main) as folder:
        with processes.all_or_none():
            known = data_identity(*sources) if sources and processes.main else None
            over = folder.begin(recipe, known) if processes.main else None
        over = processes.from_main(over)
        if over is not None:
            return over
        train_set, test_set = sources or load(recipe, data_dir)
        steps_per_epoch = len(train_set) // recipe.batch
        if steps_per_epoch == 0 or recipe.batch < processes.size:
            raise RecipeError(
                f"batch={recipe.batch}: it must be at most {len(train_set)}, the number of training images, and at "
                f"least {processes.size}, that of processes"
            )
        own_devices = [processes.device] if processes.device.type == "cuda" else []
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(own_devices))
            stopping = stack.enter_context(Stopping())
            trainer = Trainer(recipe, network(recipe, train_set), processes, steps_per_epoch)
            bar = Progress(recipe, steps_per_epoch, progress and processes.main)
            stack.callback(bar.close)
            with processes.all_or_none():
                known = known or (data_identity(train_set, test_set) if processes.main else {})
            run = Run(trainer, folder, bar, stopping, known, checkpoint_steps, checkpoint_seconds)
            run.resume()
            if tensorboard and processes.main:
                run.board = TensorBoard(folder.path, run.at.step)
                stack.callback(run.board.close)
            bar.start(run.at.step)
            return _to_the_end(run, train_set, test_set)


def _to_the_end(run: Run, train_set: data.Source, test_set: data.Source) -> Result:
    try:
        while run.at.epoch < run.recipe.epochs:
            run.start_counting()
            for images, labels in _rest_of_epoch(run, train_set):
                run.count(*run.trainer.step(images, labels, run.at.step))
                if run.stop_or_save():
                    return run.interrupted()
            run.read_counts()
            run.log_epoch(evaluate(run.trainer, test_set))
            if run.stop_or_save() and run.at.epoch < run.recipe.epochs:
                return run.interrupted()
    except Diverged as error:
        return run.diverged(error.step)
    except NonFiniteError:  # from micro-batches, before the step is counted
        return run.diverged(run.at.step + 1)
    return run.done()


def _rest_of_epoch(run: Run, source: data.Source) -> Iterator[tuple[Tensor, Tensor]]:
    """This process's share of every batch that is still to come in the epoch."""
    recipe, processes, epoch = run.recipe, run.trainer.processes, run.at.epoch
    shares = [processes.share(b) for b in batches_of(recipe, len(source), epoch)[run.at.batch :]]
    augment = recipe.augment != "none"
    yield from source.batches(shares, seed=recipe.seed, epoch=epoch, augment=augment, device=processes.device)


def load(recipe: Recipe, data_dir: str | Path | None = None) -> Sources:
    """The training and test data that a recipe names."""
    options = {"data_dir": data_dir, "augment": recipe.augment}
    train_set = data.load(recipe.data, "train", limit=recipe.limit or None, **options)  # pyrefly: ignore
    return train_set, data.load(recipe.data, "test", limit=recipe.test_limit or None, **options)  # pyrefly: ignore
