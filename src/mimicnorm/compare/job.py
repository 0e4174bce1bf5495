"""What is to be compared: one recipe, several methods, some seeds of each. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mimicnorm.arguments import positive_int
from mimicnorm.errors import RecipeError
from mimicnorm.methods import METHODS, method
from mimicnorm.training.recipes import Recipe, recipe

DEFAULT_METHODS = "batchnorm,mimicnorm,nonorm,fixup"


@dataclass(frozen=True)
class Entry:
    """A method with its settings, and how many seeds it is trained with."""

    label: str
    method: str
    settings: tuple[str, ...]
    seeds: int

    @property
    def summary(self) -> str:
        """What the method is, in a sentence."""
        return (METHODS[self.method].__doc__ or "").partition("\n")[0]


def entries(text: str, seeds: int) -> tuple[Entry, ...]:
    """Read ``NAME[+SETTING=VALUE...][:SEEDS]``, separated by commas.

    Example:
        >>> entries("batchnorm,mimicnorm+residual=linear:1", 3)[1]
        Entry(label='mimicnorm+residual=linear', method='mimicnorm', settings=('residual=linear',), seeds=1)
    """
    read: dict[str, Entry] = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        label, colon, count = item.partition(":")
        name, *settings = label.split("+")
        if colon and not count.isdecimal():
            raise RecipeError(f"--methods: {item!r} must end in a number of seeds, as in {label}:3")
        name = method(name).name
        label = "+".join((name, *settings))
        number = positive_int(int(count) if colon else seeds, f"seeds of {label}", error=RecipeError)
        if label in read:
            raise RecipeError(f"--methods names {label} twice: once is enough")
        read[label] = Entry(label, name, tuple(settings), number)
    if not read:
        raise RecipeError(f"--methods names no method: give some, such as {DEFAULT_METHODS}")
    return tuple(read.values())


def base_recipe(data: str = "digits", **changes: Any) -> Recipe:
    """Return the recipe that every method is trained with: the paper's schedule on a narrow network.

    Args:
        data: The data set; digits have a small recipe of their own.
        changes: Fields of the recipe; those that are None stay as they are.

    Example:
        >>> base_recipe("cifar10", epochs=10, lr=None).model
        'resnet18'
    """
    given = {name: value for name, value in changes.items() if value is not None}
    return recipe("digits-resnet10" if data == "digits" else "cifar100-resnet18-desk", data=data, **given)


@dataclass(frozen=True)
class Job:
    """A comparison to run.

    Attributes:
        recipe: What all methods share; its method, settings and seed are filled in for each run.
        entries: The methods; the first is what the others are compared with.
        rounds: Rounds of timed steps; 0 leaves the timing out.
        largest_lr: Whether to look for the largest stable learning rate.
        command: The command line that asks for it, for the report.
    """

    recipe: Recipe
    entries: tuple[Entry, ...]
    rounds: int = 20
    largest_lr: bool = False
    command: str = ""

    def run_recipe(self, entry: Entry, seed: int = 0) -> Recipe:
        """Return the recipe of one run."""
        return dataclasses.replace(self.recipe, method=entry.method, settings=entry.settings, seed=seed)

    def runs(self) -> dict[str, tuple[Entry, int]]:
        """Return every (method, seed) by label, seed by seed, so that an early look has something of each method."""
        most = max(entry.seeds for entry in self.entries)
        pairs = [(entry, seed) for seed in range(most) for entry in self.entries if seed < entry.seeds]
        return {f"{entry.label}-seed{seed}": (entry, seed) for entry, seed in pairs}

    def settings(self) -> dict[str, Any]:
        """Return what must be the same for results to stand side by side."""
        return {k: v for k, v in self.recipe.as_dict().items() if k not in ("method", "settings", "seed")}
