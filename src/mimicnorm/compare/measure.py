"""What a method does to a network, before any training: the plan, its memory, its time per step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mimicnorm import memory
from mimicnorm.compare.job import Job
from mimicnorm.compare.timing import interleaved, summary
from mimicnorm.data import Source
from mimicnorm.errors import MemoryPredictionError, RefusedError
from mimicnorm.surgery.plan import Plan
from mimicnorm.training.build import converted, first_batch
from mimicnorm.training.precision import DTYPES
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import Trainer, mean_loss, optimizer


def applied(job: Job, source: Source, processes: Processes) -> tuple[dict[str, Trainer], dict[str, dict[str, Any]]]:
    """Apply every method to the network once, so that what cannot be done is known before anything is trained.

    Returns:
        By label, what takes the training steps, at a learning rate so small that no step is special; and the plan as
        data with the number of parameters.

    Raises:
        RefusedError: Names each method that the network cannot take, and why.
    """
    trainers, plans, refused = {}, {}, []
    for entry in job.entries:
        recipe = dataclasses.replace(job.run_recipe(entry), lr=1e-9)
        try:
            model, plan = converted(recipe, source)
        except RefusedError as error:
            reasons = "; ".join(str(r) for r in error.refusals) or str(error)
            refused.append(f"{entry.label} cannot be applied to {recipe.model}: {reasons}")
            continue
        parameters = sum(p.numel() for p in model.parameters())
        plans[entry.label] = {"parameters": parameters, "plan": _as_data(plan)}
        trainers[entry.label] = Trainer(recipe, model, processes, steps=1)
    if refused:
        raise RefusedError(" ".join((*refused, "Nothing was trained: leave such methods out of --methods.")))
    return trainers, plans


def _as_data(plan: Plan) -> dict[str, Any]:
    return {
        "method": plan.as_dict()["method"],
        "init": plan.init,
        "rows": [list(row) for row in plan.rows()],
        "summary": str(plan).rpartition("\n\n")[2].splitlines(),
    }


def memory_of(trainer: Trainer, source: Source) -> dict[str, Any]:
    """Predict the bytes saved for backward per image and the peak of a step, both of the step that is trained.

    That is: the trainer's network on its device, compiled and channels last as the recipe says, its optimizer, and the
    recipe's batch, at once or in micro-batches. Where the compiled network cannot be predicted, the plain one is, and
    ``note`` says so.
    """
    recipe = trainer.recipe
    shape, device = (recipe.batch, *source.shape), trainer.processes.device
    images = torch.empty(shape, device=device, memory_format=trainer.format)  # never written: no memory yet

    def predicted(model: nn.Module) -> dict[str, Any]:
        analysis = memory.measure(
            model,
            images,
            loss=lambda logits: mean_loss(logits, logits.new_zeros(len(logits), dtype=torch.long)),
            optimizer=lambda parameters: optimizer(recipe, nn.ParameterList(parameters)),
            autocast=DTYPES.get(recipe.precision),
            activation_bits=recipe.activation_bits or None,
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


def memory_by_method(trainers: Mapping[str, Trainer], source: Source) -> dict[str, dict[str, Any]]:
    """Predict the memory of every method, with ratios to the first where both are compiled or neither is."""
    amounts = {label: memory_of(trainer, source) for label, trainer in trainers.items()}
    first = next(iter(amounts.values()))
    for entry in amounts.values():
        if "why_not" not in {*entry, *first} and ("note" in entry) == ("note" in first):
            entry["saved_ratio"] = entry["saved_bytes_per_image"] / first["saved_bytes_per_image"]
            entry["peak_ratio"] = entry["peak_bytes"] / first["peak_bytes"]
    return amounts


def times(trainers: Mapping[str, Trainer], source: Source, rounds: int) -> dict[str, dict[str, Any]]:
    """Time a training step of every method on the same batch, interleaved; ratios are to the first method."""
    first = next(iter(trainers.values()))
    images, labels = (t.to(first.processes.device) for t in first_batch(source, first.recipe.batch))
    steps = {  # reading the loss waits for the device
        label: lambda trainer=trainer: trainer.step(images, labels, 0)[0].item() for label, trainer in trainers.items()
    }
    return summary(interleaved(steps, rounds=rounds), next(iter(trainers)))
