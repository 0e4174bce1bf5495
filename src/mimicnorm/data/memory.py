"""Data sets that fit in memory: one tensor of bytes, augmented a batch at a time on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mimicnorm.data.counter import uniforms
from mimicnorm.data.source import Source


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
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.labels)

    def _content(self) -> tuple[Tensor, Tensor]:
        return self.labels, self.images

    def batches(
        self, indices: Sequence[Tensor], *, seed: int, epoch: int, augment: bool, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        all_images, all_labels = self._on(torch.device(device))
        for chosen in indices:
            where = chosen.to(device)
            images = all_images.index_select(0, where)  # ten times as fast as brackets
            if augment and self.augment != "none":
                pad = self.pad if self.augment == "standard" else 0
                images = crop_and_flip(images, uniforms(seed, epoch, chosen, 3), pad=pad, flip=self.flip)
            yield self.normalise(images), all_labels.index_select(0, where)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the data set on a device; it is copied there once and stays, whichever device is asked for next."""
        if device == self.images.device:
            return self.images, self.labels
        if device not in self._copies:
            self._copies[device] = self.images.to(device), self.labels.to(device)
        return self._copies[device]


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
