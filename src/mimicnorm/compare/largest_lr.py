"""The largest learning rate at which a method still trains: doubled until it fails, then refined once."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any

from mimicnorm.compare.job import Contestant, Job
from mimicnorm.data import Source
from mimicnorm.errors import NonFiniteError
from mimicnorm.training.build import network
from mimicnorm.training.processes import Processes
from mimicnorm.training.schedule import batches_of
from mimicnorm.training.step import Trainer

STEPS, DOUBLINGS = 100, 10


def largest_lr(
    job: Job, contestant: Contestant, source: Source, processes: Processes, steps: int = STEPS
) -> dict[str, Any]:
    """Search the largest stable learning rate, to a factor of sqrt(2).

    Stable is a run of ``steps`` steps (the rate rises over the first fifth, then stays) whose loss is always finite
    and, over the last ten steps, below that of guessing. The search begins at the recipe's rate.
    """

    def stable(lr: float) -> bool:
        return _trains(job, contestant, source, processes, lr, steps)

    lr, tried = job.recipe.lr, 0
    if stable(lr):
        while tried < DOUBLINGS and stable(2 * lr):
            lr, tried = 2 * lr, tried + 1
    else:
        while tried < DOUBLINGS:
            lr, tried = lr / 2, tried + 1
            if stable(lr):
                break
        else:
            return {"value": None, "steps": steps, "why_not": f"unstable from {job.recipe.lr:g} down to {lr:g}"}
    if tried < DOUBLINGS and stable(lr * math.sqrt(2)):
        lr *= math.sqrt(2)
    return {"value": lr, "steps": steps, "at_least": tried == DOUBLINGS and lr > job.recipe.lr}


def _trains(job: Job, contestant: Contestant, source: Source, processes: Processes, lr: float, steps: int) -> bool:
    recipe = dataclasses.replace(
        job.run_recipe(contestant),
        lr=lr,
        milestones=(),
        warmup_epochs=0.2,
        epochs=1,
        batch=min(job.recipe.batch, len(source)),
    )
    trainer = Trainer(recipe, network(recipe, source), processes, steps_per_epoch=steps)
    last: deque[float] = deque(maxlen=10)
    step = epoch = 0
    while step < steps:
        order = batches_of(recipe, len(source), epoch)[: steps - step]
        found = source.batches(order, seed=0, epoch=epoch, augment=True, device=processes.device)
        for images, labels in found:
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
