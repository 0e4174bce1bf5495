"""Which samples of a data set are used: some classes, a part held out for validation, a number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mimicnorm.arguments import positive_int
from mimicnorm.data.counter import uniforms
from mimicnorm.errors import DataError

Split = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Selection:
    """The samples to use, decided by their labels alone: the same in every process and for every seed.

    Classes are chosen first, then the validation part is held out, and ``limit`` is taken from what is left. So
    another limit leaves the held-out images as they are.

    Attributes:
        split: validation is the part of the training set that is held out, train what is left of it.
        limit: samples to take at most, spread evenly over the classes.
        classes: class indices to use, renumbered from 0 in this order; None is all.
        validation: fraction of each class of the training set that is held out.
    """

    split: Split = "train"
    limit: int | None = None
    classes: tuple[int, ...] | None = None
    validation: float = 0.0

    def __post_init__(self) -> None:
        if self.split not in ("train", "validation", "test"):
            raise DataError(f"split must be 'train', 'validation' or 'test', not {self.split!r}")
        if not 0 <= self.validation < 1:
            raise DataError(f"validation={self.validation!r}: use a fraction of the training set, from 0 to below 1")
        if self.split == "validation" and not self.validation:
            raise DataError("split='validation' needs a fraction of the training set, such as validation=0.1")

    @property
    def files(self) -> Literal["train", "test"]:
        """The split that the files have."""
        return "test" if self.split == "test" else "train"

    def choose(self, labels: Tensor, classes: int, name: str) -> tuple[Tensor, Tensor, int]:
        """Return the indices of the samples, their labels, and the number of classes.

        Args:
            labels: of all samples in the files.
            classes: how many there are.
            name: of the data set, for errors.
        """
        chosen = torch.arange(len(labels))
        if self.classes is not None:
            number = torch.full((classes,), -1)
            number[self._checked_classes(classes, name)] = torch.arange(len(self.classes))
            chosen, classes = (number[labels] >= 0).nonzero()[:, 0], len(self.classes)
            labels = number[labels[chosen]]
        if self.split != "test" and self.validation:
            part = held_out(labels, self.validation)
            part = part if self.split == "validation" else ~part
            chosen, labels = chosen[part], labels[part]
        few = subset(labels, self.limit)
        if not len(few):
            raise DataError(f"no sample of {name} is left in split {self.split!r} with {self}")
        return chosen[few], labels[few], classes

    def _checked_classes(self, classes: int, name: str) -> list[int]:
        chosen = list(self.classes or ())
        wrong = [c for c in chosen if isinstance(c, bool) or not isinstance(c, int) or not 0 <= c < classes]
        if wrong:
            raise DataError(f"classes: {name} has classes 0 to {classes - 1}, and not {', '.join(map(repr, wrong))}")
        if not chosen or len(set(chosen)) < len(chosen):
            raise DataError(f"classes={chosen}: name some of the {classes} classes of {name}, each once")
        return chosen


def held_out(labels: Tensor, fraction: float) -> Tensor:
    """Return which samples are held out, as booleans: the fraction of each class, rounded, but never a whole class.

    Example:
        >>> labels = torch.arange(2).repeat_interleave(10)
        >>> labels[held_out(labels, 0.3)]
        tensor([0, 0, 0, 1, 1, 1])
    """
    counts = labels.bincount()
    most = (counts * fraction).round().minimum(counts - 1)
    return _turns(labels) < most[labels]


def subset(labels: Tensor, limit: int | None) -> Tensor:
    """Return the indices of at most ``limit`` samples, spread evenly over the classes: the same in every process.

    A larger limit adds samples to those of a smaller one.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> labels[subset(labels, 4)]
        tensor([0, 0, 1, 1])
    """
    if limit is None:
        return torch.arange(len(labels))
    limit = positive_int(limit, "limit", error=DataError)
    by_class = labels.argsort(stable=True)
    return by_class[_turns(labels)[by_class].argsort(stable=True)][:limit].sort().values


def _turns(labels: Tensor) -> Tensor:
    """Number the samples of each class from 0, at random but always the same."""
    order = uniforms(0, 0, torch.arange(len(labels)), 1)[:, 0].argsort()
    order = order[labels[order].argsort(stable=True)]  # by class, at random within each
    counts = labels.bincount()
    starts = counts.cumsum(0) - counts
    turns = torch.empty_like(order)
    turns[order] = torch.arange(len(order)) - starts[labels[order]]
    return turns
