"""What training needs of a data set, and what all data sets share."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Augment = Literal["standard", "light", "none"]


@dataclass
class Source(ABC):
    """A split of a data set.

    Attributes:
        name: of the data set.
        classes: how many labels there are.
        shape: of an image: channels, height, width.
        input: which stem suits the images, as in ``models.build``.
        augment: how strongly images are changed at random when `batches` is asked to.
        mean: of each channel, as a fraction of the largest value; subtracted.
        std: of each channel; divided by.
    """

    name: str
    classes: int
    shape: tuple[int, int, int]
    input: Literal["cifar", "imagenet"]
    augment: Augment
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def batches(
        self, indices: Sequence[Tensor], *, seed: int, epoch: int, augment: bool, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) for each tensor of sample indices: float32, normalised, NCHW; int64.

        The random changes of an image depend on (seed, epoch, its index) alone: any split over processes, any
        micro-batch size and any resumed run see the same images.
        """

    def plain_batches(self, size: int, most: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (images, labels) as they are: all of them, or at most ``most``, evenly spaced."""
        indices = spread(len(self), len(self) if most is None else most)
        return self.batches(indices.split(size), seed=0, epoch=0, augment=False)

    def fingerprint(self) -> str:
        """Return a hash that tells this data from other data of the same size: what a training run is resumed on."""
        about = (len(self), self.classes, self.shape, self.mean, self.std)
        digest = hashlib.blake2b(repr(about).encode(), digest_size=16)
        for part in self._content():
            digest.update(part.cpu().contiguous().numpy() if isinstance(part, Tensor) else part)  # pyrefly: ignore
        return digest.hexdigest()

    def _content(self) -> Iterable[Tensor | bytes]:
        """Yield what is hashed: here the images and labels of 64 samples, as `batches` gives them."""
        images, labels = next(self.plain_batches(64, most=64))
        return images.contiguous().view(-1).view(torch.uint8), labels

    def normalise(self, images: Tensor) -> Tensor:
        """Return images of bytes as float32 with channels of mean 0 and variance 1."""
        mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return images.float().mul_(1 / (255 * std)).sub_(mean / std)


def spread(count: int, most: int) -> Tensor:
    """Return at most ``most`` of ``count`` indices, evenly spaced.

    Example:
        >>> spread(10, 4)
        tensor([0, 2, 5, 7])
    """
    most = min(count, most)
    return torch.arange(most) * count // max(most, 1)
