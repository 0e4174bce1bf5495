"""What happens at which step: pure functions of the recipe, so that a resumed run needs no memory of them."""

from __future__ import annotations

import hashlib
from bisect import bisect_right

import torch
from torch import Tensor

from mimicnorm.training.recipes import Recipe


def learning_rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """The learning rate of a step (counted from 0): a linear rise that ends at ``lr``, then steps down.

    Example:
        >>> from mimicnorm.training import recipe
        >>> [round(learning_rate(recipe("cifar100-vgg11"), s, 100), 4) for s in (0, 99, 199, 7999, 8000)]
        [0.0005, 0.05, 0.1, 0.1, 0.01]
    """
    rise = recipe.warmup_epochs * steps_per_epoch
    warm = min(1.0, (step + 1) / rise) if rise else 1.0
    return recipe.lr * warm * recipe.gamma ** bisect_right(sorted(recipe.milestones), step // steps_per_epoch)


def batches_of(recipe: Recipe, samples: int, epoch: int) -> list[Tensor]:
    """The global batches of an epoch, as indices: an order drawn from (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(mixed_seed(recipe.seed, "order", epoch))
    order = torch.randperm(samples, generator=generator)
    return list(order[: samples // recipe.batch * recipe.batch].split(recipe.batch))


def mixed_seed(*parts: int | str) -> int:
    """One seed from several parts, unrelated for any two combinations."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # a seed is a signed number
