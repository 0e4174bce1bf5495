"""What is to be compared: one recipe, several methods, some seeds of each."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mimicnorm.errors import RecipeError
from mimicnorm.methods import METHODS, method
from mimicnorm.training.recipes import RECIPES, Recipe, adapted

DEFAULT_METHODS = "batchnorm,mimicnorm,nonorm,fixup"


@dataclass(frozen=True)
class Contestant:
    """A method with its settings, and how many seeds it is trained with."""

    label: str
    method: str
    settings: tuple[str, ...]
    seeds: int

    @property
    def summary(self) -> str:
        """What the method is, in a sentence."""
        return (METHODS[self.method].__doc__ or "").partition("\n")[0]


def contestants(text: str, seeds: int) -> tuple[Contestant, ...]:
    """Read ``NAME[+SETTING=VALUE...][:SEEDS]``, separated by commas.

    Example:
        >>> contestants("batchnorm,mimicnorm+residual=linear:1", 3)[1]
        Contestant(label='mimicnorm+residual=linear', method='mimicnorm', settings=('residual=linear',), seeds=1)
    """
    found: dict[str, Contestant] = {}
    for entry in filter(None, (e.strip() for e in text.split(","))):
        label, colon, count = entry.partition(":")
        name, *settings = label.split("+")
        if colon and not count.isdecimal():
            raise RecipeError(f"--methods: {entry!r} must end in a number of seeds, as in {label}:3")
        chosen = method(name).name
        label = "+".join((chosen, *settings))
        number = int(count) if colon else seeds
        if number < 1:
            raise RecipeError(f"{label} is to be trained with {number} seeds: it needs at least one")
        if label in found:
            raise RecipeError(f"--methods names {label} twice: once is enough")
        found[label] = Contestant(label, chosen, tuple(settings), number)
    if not found:
        raise RecipeError(f"--methods names no method: give some, such as {DEFAULT_METHODS}")
    return tuple(found.values())


def base_recipe(data: str = "digits", **changes: Any) -> Recipe:
    """The recipe that every method is trained with: the paper's schedule, its milestones in proportion.

    Args:
        data: The data set; digits have a small recipe of their own.
        changes: Fields of the recipe; those that are None stay as they are.

    Example:
        >>> base_recipe("cifar100", epochs=10, lr=None).milestones
        (5, 7, 9)
    """
    base = RECIPES["digits-resnet10" if data == "digits" else "cifar100-resnet18-desk"]
    given = {name: value for name, value in changes.items() if value is not None}
    return adapted(base, RECIPES["cifar100-resnet18"], data=data, **given)


@dataclass(frozen=True)
class Job:
    """A comparison to run.

    Attributes:
        recipe: What all methods share; its method, settings and seed are filled in for each run.
        contestants: The methods; the first is what the others are compared with.
        rounds: Rounds of timed steps; 0 leaves the timing out.
        largest_lr: Whether to look for the largest stable learning rate.
        command: The command line that asks for it, for the report.
    """

    recipe: Recipe
    contestants: tuple[Contestant, ...]
    rounds: int = 20
    largest_lr: bool = False
    command: str = ""

    def run_recipe(self, contestant: Contestant, seed: int = 0) -> Recipe:
        """The recipe of one run."""
        return dataclasses.replace(self.recipe, method=contestant.method, settings=contestant.settings, seed=seed)

    def runs(self) -> list[tuple[Contestant, int]]:
        """Every (method, seed), seed by seed, so that an early look has something of each method."""
        most = max(c.seeds for c in self.contestants)
        return [(c, seed) for seed in range(most) for c in self.contestants if seed < c.seeds]

    def settings(self) -> dict:
        """What must be the same for results to stand side by side."""
        return {k: v for k, v in self.recipe.as_dict().items() if k not in ("method", "settings", "seed")}
