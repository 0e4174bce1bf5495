"""How large the runs of an item are: on a desk, or as in the paper; and what a reducer is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimicnorm.training.recipes import Recipe, recipe

Runs = Mapping[str, Mapping[str, Any]]
"""By label: ``recipe``, ``status``, ``step``, ``history`` and ``steps`` of a finished run."""
Rows = Sequence[Mapping[str, Any]]
"""What an item measured, in JSON's types."""

GUESSING = 1.0
"""Accuracy of guessing among CIFAR-100's classes, in percent."""
AUTHORS_FAN_IN = 50
"""Layers with this fan-in or less are not centred in the authors' code."""


def authors_settings(method: str, width: float) -> tuple[str, ...]:
    """Return where the library's defaults differ from what the paper's authors do.

    Below full width the threshold shrinks with the channels, so that the layers centred are those of full width.
    """
    if method not in ("mimicnorm", "weight-mean", "last-bn", "nonorm"):
        return ()
    centres = method in ("mimicnorm", "weight-mean")
    least = max(1, int(AUTHORS_FAN_IN * min(width, 1.0))) if centres else AUTHORS_FAN_IN
    scale = ("logit_scale=false",) if method in ("mimicnorm", "last-bn") else ()
    return (f"min_fan_in={least}", *scale)


@dataclass(frozen=True)
class Scale:
    """How large the runs of an item are.

    Attributes:
        name: "desk" or "paper".
        suffix: Of the recipes' names.
        changes: Fields that differ from those recipes, for every network.
        seeds: How many, by network; ``default`` for the others.
        default: Seeds of networks that ``seeds`` does not name.
        max_steps: Stop every run after this many steps: a trial of the whole path, whose numbers mean nothing.
    """

    name: str
    suffix: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    seeds: Mapping[str, int] = field(default_factory=dict)
    default: int = 3
    max_steps: int | None = None

    def recipe(self, data: str, network: str, method: str, /, **changes: Any) -> Recipe:
        """Return a recipe at this scale, with the settings of the paper's authors unless ``settings`` is given."""
        made = recipe(f"{data}-{network}{self.suffix}", method=method, **{**self.changes, **changes})
        if "settings" not in changes:
            made = dataclasses.replace(made, settings=authors_settings(method, made.width))
        return self.trial_of(made)

    def trial_of(self, made: Recipe) -> Recipe:
        """Return a recipe as it is, or cut down to ``max_steps``."""
        if self.max_steps is None:
            return made
        return dataclasses.replace(made, epochs=1, limit=self.max_steps * made.batch, test_limit=made.batch)

    def seeds_of(self, network: str) -> range:
        """Return the seeds that a network is trained with."""
        return range(self.seeds.get(network, self.default))


SCALES = {
    "desk": Scale(
        "desk",
        suffix="-desk",  # a quarter of the width, 12 epochs
        changes={"limit": 10_000, "test_limit": 5000, "precision": "bf16"},
        seeds={"resnet50": 2, "vgg16": 2},
    ),
    "paper": Scale("paper"),
}
"""``desk``: narrow networks on a fifth of CIFAR-100, minutes per run on one core. ``paper``: the paper's recipes."""


@dataclass(frozen=True)
class Setting:
    """What a reducer may need beside the runs.

    Attributes:
        scale: Of the item.
        data_dir: Where the data is.
        images: The data set whose images go through random networks; the paper takes MNIST.
    """

    scale: Scale
    data_dir: str | Path | None = None
    images: str = "mnist"
