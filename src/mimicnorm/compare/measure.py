"""What a method does to a network, before any training: the plan, its memory, its time per step."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm import memory
from mimicnorm.compare.job import Contestant, Job
from mimicnorm.compare.timing import interleaved, summary
from mimicnorm.data import Source
from mimicnorm.errors import MemoryPredictionError, RefusedError
from mimicnorm.methods import BatchNorm
from mimicnorm.surgery.planning import plan
from mimicnorm.training.build import narrowed, network
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import DTYPES, Trainer, mean_loss, optimizer


def applied(job: Job, source: Source) -> dict[str, dict[str, Any]]:
    """Apply every method to the network, so that what cannot be done is known before anything is trained.

    Returns, by label, the plan as data, the number of parameters, and a note on what the width changed.

    Raises:
        RefusedError: Names each method that the network cannot take, and why.
    """
    bare = network(dataclasses.replace(job.recipe, method="batchnorm", settings=(), seed=0), source)
    example = first_images(source, 2)
    done, refused = {}, []
    for contestant in job.contestants:
        try:
            converted = network(job.run_recipe(contestant), source)
        except RefusedError as error:
            reasons = "; ".join(str(r) for r in error.refusals) or str(error)
            refused.append(f"{contestant.label} cannot be applied to {job.recipe.model}: {reasons}")
            continue
        conversion = getattr(converted, "_mimicnorm", None)
        planned = plan(
            bare, conversion.method if conversion else BatchNorm(), example=example, init=job.recipe.starting
        )
        done[contestant.label] = {
            "parameters": sum(p.numel() for p in converted.parameters()),
            "note": note(job, contestant),
            "plan": {
                "method": planned.as_dict()["method"],
                "init": planned.init,
                "rows": [list(row) for row in planned.rows()],
                "summary": str(planned).rpartition("\n\n")[2].splitlines(),
            },
        }
    if refused:
        raise RefusedError(" ".join((*refused, "Nothing was trained: leave such methods out of --methods.")))
    return done


def note(job: Job, contestant: Contestant) -> str:
    """What the method's settings are in a network of this width, where nobody gave them."""
    changed = narrowed(job.run_recipe(contestant))
    return ", ".join(f"{k}={v} at width {job.recipe.width:g}" for k, v in changed.items())


def memory_of(job: Job, contestant: Contestant, source: Source, processes: Processes) -> dict[str, Any]:
    """Bytes saved for backward per image, and the predicted peak of a step, both of the step that is trained.

    That is: the trainer's network on its device, compiled and channels last as the recipe says, its optimizer, and the
    recipe's batch, at once or in micro-batches. Where the compiled network cannot be predicted, the plain one is, and
    ``note`` says so.
    """
    recipe = job.run_recipe(contestant)
    trainer = Trainer(recipe, network(recipe, source), processes, steps_per_epoch=1)
    shape = (recipe.batch, *source.shape)
    images = torch.empty(shape, device=processes.device, memory_format=trainer.format)  # never written: no memory yet

    def predicted(model: nn.Module) -> dict[str, Any]:
        analysis = memory.measure(
            model,
            images,
            loss=lambda logits: mean_loss(logits, logits.new_zeros(len(logits), dtype=torch.long)),
            optimizer=lambda parameters: optimizer(recipe, parameters),
            autocast=DTYPES.get(recipe.precision),
            micro_batch=recipe.micro_batch or None,
        )
        amounts = {"saved_bytes_per_image": analysis.saved_bytes_per_sample, "peak_bytes": analysis.peak_bytes}
        return {**amounts, "device": analysis.device}

    try:
        return predicted(trainer.model)
    except MemoryPredictionError as error:
        why = str(error)
    if recipe.compile:
        with contextlib.suppress(MemoryPredictionError):
            return {**predicted(trainer.bare), "note": f"predicted without torch.compile: {why}"}
    return {"why_not": why}


def times(job: Job, source: Source, processes: Processes) -> dict[str, dict[str, Any]]:
    """Time per training step of every method on the same batch, interleaved; ratios are to the first method."""
    images, labels = (t.to(processes.device) for t in batch(source, job.recipe.batch))

    def step_of(contestant: Contestant) -> Any:
        recipe = dataclasses.replace(job.run_recipe(contestant), lr=1e-9)  # the weights stay: no step is special
        trainer = Trainer(recipe, network(recipe, source), processes, steps_per_epoch=1)
        return lambda: trainer.step(images, labels, 0)[0].item()  # reading the loss waits for the device

    steps = {contestant.label: step_of(contestant) for contestant in job.contestants}
    return summary(interleaved(steps, rounds=job.rounds), job.contestants[0].label)


def first_images(source: Source, count: int) -> Tensor:
    """The first images of a source as they are."""
    return batch(source, count)[0]


def batch(source: Source, count: int) -> tuple[Tensor, Tensor]:
    """The first images of a source and their labels."""
    few = torch.arange(min(count, len(source)))
    return next(iter(source.batches([few], seed=0, epoch=0, augment=False)))
