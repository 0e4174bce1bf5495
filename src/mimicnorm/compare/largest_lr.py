"""The largest learning rate at which a method still trains: doubled until it fails, then refined once."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from typing import Any

from torch import nn

from mimicnorm.data import Source
from mimicnorm.errors import NonFiniteError
from mimicnorm.training.build import network
from mimicnorm.training.processes import Processes
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.step import Trainer, epoch_batches

STEPS, DOUBLINGS = 100, 10


def largest_lr(recipe: Recipe, source: Source, processes: Processes, steps: int = STEPS) -> dict[str, Any]:
    """Search the largest stable learning rate, to a factor of sqrt(2), from the recipe's rate on.

    Stable is a run of ``steps`` steps (the rate rises over the first fifth, then stays) whose loss is always finite
    and, over the last ten steps, below that of guessing.
    """
    model = network(recipe, source)

    def stable(lr: float) -> bool:
        return _trains(dataclasses.replace(recipe, lr=lr), copy.deepcopy(model), source, processes, steps)

    lr, tried = recipe.lr, 0
    if stable(lr):
        while tried < DOUBLINGS and stable(2 * lr):
            lr, tried = 2 * lr, tried + 1
    else:
        while tried < DOUBLINGS:
            lr, tried = lr / 2, tried + 1
            if stable(lr):
                break
        else:
            return {"value": None, "steps": steps, "why_not": f"unstable from {recipe.lr:g} down to {lr:g}"}
    if tried < DOUBLINGS and stable(lr * math.sqrt(2)):
        lr *= math.sqrt(2)
    return {"value": lr, "steps": steps, "at_least": tried == DOUBLINGS and lr > recipe.lr}


def _trains(recipe: Recipe, model: nn.Module, source: Source, processes: Processes, steps: int) -> bool:
    recipe = dataclasses.replace(
        recipe, schedule="steps", milestones=(), warmup=0.2, batch=min(recipe.batch, len(source))
    )
    trainer = Trainer(recipe, model, processes, steps)
    last: deque[float] = deque(maxlen=10)
    step = epoch = 0
    while step < steps:
        order = epoch_batches(recipe, len(source), epoch)[: steps - step]
        for images, labels in source.batches(order, seed=0, epoch=epoch, augment=True, device=processes.device):
            try:
                loss = float(trainer.step(images, labels, step)[0])
            except NonFiniteError:
                return False
            if not math.isfinite(loss):
                return False
            last.append(loss)
            step += 1
        epoch += 1
    return sum(last) / len(last) < math.log(source.classes)
