"""A finished run, read back: its recipe, its network with the trained weights, its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mimicnorm.data import Source
from mimicnorm.errors import CheckpointError
from mimicnorm.training.build import network
from mimicnorm.training.loop import load
from mimicnorm.training.recipes import Recipe, recipe
from mimicnorm.training.state import last_line, load_tensors


@dataclass
class Finished:
    """What `finished` reads.

    Attributes:
        recipe: What was trained.
        model: The network, in eval mode.
        train_set: The training images.
        test_set: The test images.
    """

    recipe: Recipe
    model: nn.Module
    train_set: Source
    test_set: Source


def finished(folder: str | Path, *, data_dir: str | Path | None = None) -> Finished:
    """Read the run in a folder; its network is built as it was for training, and gets the final weights."""
    folder = Path(folder)
    if not (folder / "recipe.json").exists():
        raise CheckpointError(f"{folder} does not hold a run: there is no recipe.json")
    if not (folder / "weights.safetensors").exists():
        raise CheckpointError(f"{folder}: the run is not finished, or diverged: there is no weights.safetensors")
    trained = recipe(str(folder / "recipe.json"))
    sources = load(trained, data_dir)
    with torch.random.fork_rng([]):  # building a network seeds
        model = network(trained, sources[0])
    weights, _ = load_tensors(folder / "weights.safetensors")
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = last_line(error)
        raise CheckpointError(f"{folder}: the weights do not fit what {trained.model} builds now: {reason}") from error
    return Finished(trained, model.eval(), *sources)
