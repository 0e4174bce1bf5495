"""Integer training as a run: the loop, folder, data and evaluation of ``mimicnorm.training``, with integers inside.

result = mimicnorm.integer.run.train(recipe("digits-resnet10", precision="int8"), "runs/digits-int8")
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.errors import IntegerError
from mimicnorm.integer.head import Q
from mimicnorm.integer.trainer import Trainer
from mimicnorm.training import loop, step
from mimicnorm.training.processes import Processes
from mimicnorm.training.progress import print_line
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.state import Result
from mimicnorm.training.step import learning_rate

_USUAL = {"rounding": "stochastic", "master_bits": 16}


class IntegerRun(step.Trainer):
    """What the loop asks of a trainer, answered in integers; ``options`` go to `Trainer`."""

    def __init__(self, recipe: Recipe, model: nn.Module, processes: Processes, steps: int, **options: Any):
        if processes.device.type != "cpu" or processes.size > 1:
            raise IntegerError("integers are trained by one process on the CPU: use --device cpu, without torchrun")
        self.recipe, self.processes, self.steps = recipe, processes, steps
        self.format = torch.contiguous_format
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.integers = Trainer(
            model,
            lr=recipe.lr,
            momentum=recipe.momentum,
            weight_decay=recipe.weight_decay,
            decay_scalars=recipe.decay_scalars,
            scalar_rate=recipe.resolved().scalar_rate or 1.0,
            seed=recipe.seed,
            compile=recipe.compile,
            **options,
        )

    @property
    def bare(self) -> nn.Module:  # pyrefly: ignore[bad-override]
        """The network in floating point, with the integers' values written into it."""
        return self.integers.write_back().train()

    def step(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Take one step; the counts that come back are for the log."""
        self.integers.lr = learning_rate(self.recipe, step, self.steps)
        loss, correct = self.integers.step(images, labels, micro_batch=self.recipe.micro_batch or None)
        return torch.tensor(loss), torch.tensor(correct)

    def predict(self, images: Tensor) -> Tensor:
        """Return logits in evaluation mode."""
        return self.integers.logits(images).float() * 2.0**-Q

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the integers."""
        return self.integers.state_dict()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put it back."""
        self.integers.load_state_dict(tensors)


def train(recipe: Recipe, out: str | Path, *, device: str = "auto", **options: Any) -> Result:
    """Train a recipe of ``precision="int8"`` in a folder, as ``mimicnorm.training.train`` does; it resumes, too.

    Args:
        recipe: What to train.
        out: The run's folder.
        device: "auto" is the CPU, the only one.
        options: Those of ``mimicnorm.training.train``; ``rounding`` and ``master_bits`` of `Trainer`, which are written
            into the folder's recipe.json, so that a call with others is refused there.
    """
    if recipe.precision != "int8":
        raise IntegerError(f'precision={recipe.precision!r}: integers are trained with precision="int8"')
    given = {name: options.pop(name, usual) for name, usual in _USUAL.items()}
    changed = {name: value for name, value in given.items() if value != _USUAL[name]}
    eighths = round(recipe.momentum * 8)
    if options.get("progress", True) and eighths / 8 != recipe.momentum:
        print_line(f"momentum {recipe.momentum:g} is {eighths}/8 in integers")
    make = functools.partial(IntegerRun, **given)
    device = "cpu" if device == "auto" else device
    return loop.train(recipe, out, device=device, make_trainer=make, identity=changed, **options)
