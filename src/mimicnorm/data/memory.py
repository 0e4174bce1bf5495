"""Data sets that fit in memory: one tensor of bytes, augmented a batch at a time on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mimicnorm.data.counter import uniforms
from mimicnorm.data.source import Source, spread

HASHED_BYTES = 2**28  # all of CIFAR, in a quarter of a second


@dataclass
class Memory(Source):
    """Images (N, C, H, W) of bytes and their labels.

    Attributes:
        images: uint8.
        labels: int64.
        pad: black pixels around an image before it is cropped at random to its own size.
        flip: whether half of the images are mirrored.
    """

    images: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    pad: int = 4
    flip: bool = True

    def __len__(self) -> int:
        return len(self.labels)

    def fingerprint(self) -> str:
        """A hash over all labels and images; where the images are large, over some of them, evenly spaced."""
        image_bytes = max(self.images[:1].nbytes, 1)
        some = spread(len(self), max(HASHED_BYTES // image_bytes, 1))
        images = self.images if len(some) == len(self) else self.images[some.to(self.images.device)]
        return self._hash(self.labels.cpu(), images.cpu())

    def batches(
        self, indices: Sequence[Tensor], *, seed: int, epoch: int, augment: bool, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        self.images, self.labels = self.images.to(device), self.labels.to(device)  # moved once, then stays
        for chosen in indices:
            where = chosen.to(device)
            images = self.images.index_select(0, where)  # ten times as fast as brackets
            if augment and self.augment != "none":
                pad = self.pad if self.augment == "standard" else 0
                images = crop_and_flip(images, uniforms(seed, epoch, chosen, 3), pad=pad, flip=self.flip)
            yield self.normalise(images), self.labels.index_select(0, where)


def crop_and_flip(images: Tensor, draws: Tensor, *, pad: int, flip: bool) -> Tensor:
    """Shift each image by up to ``pad`` pixels each way, with black coming in, and mirror half of them.

    One copy takes every row of every result from the padded images, or from their mirror images.

    Args:
        images: (B, C, H, W).
        draws: (B, 3) uniform numbers: down, right, mirrored.
        pad: the largest shift; 0 for none.
        flip: whether to mirror.
    """
    b, c, h, w = images.shape
    images = F.pad(images, (pad, pad, pad, pad))
    if flip:
        images = torch.cat([images, images.flip(3)])
    height, stride = images.shape[2:]
    down, right = (draws[:, :2] * (2 * pad + 1)).long().unbind(1)
    mirrored = (draws[:, 2] < 0.5).long() * b if flip else 0
    corners = (torch.arange(b) + mirrored) * c * height * stride + down * stride + right
    rows = (torch.arange(c)[:, None] * height + torch.arange(h)) * stride
    starts = (corners[:, None, None] + rows).flatten().to(images.device)
    runs = images.view(-1).unfold(0, w, 1)  # every run of w pixels, as a view
    return runs.index_select(0, starts).view(b, c, h, w)
