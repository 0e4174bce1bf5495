"""Folders of images, one per class, as ImageNet is kept: decoded in worker processes, batches ahead of their use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mimicnorm.data.counter import uniforms
from mimicnorm.data.decode import opened
from mimicnorm.data.requirements import require
from mimicnorm.data.source import Augment, Source, spread, subset
from mimicnorm.errors import DataError

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".tif", ".tiff", ".webp"})
SPLITS = {"train": ("train",), "test": ("val", "validation", "test")}
TRIES = 10  # at a crop that fits, as is usual
AREA = {"standard": 0.08, "light": 0.25}  # the smallest crop, as a part of the image
HASHED_FILES = 256  # that are opened for a fingerprint: a second or two, for ImageNet on a slow disk, too


@dataclass
class Folder(Source):
    """Image files and their labels, numbered by the order of the class folders' names."""

    files: list[Path] = field(repr=False)
    labels: Tensor = field(repr=False)
    workers: int = field(default_factory=lambda: min(8, _cores()))

    @classmethod
    def open(cls, path: Path, split: str, *, limit: int | None, augment: Augment, size: int = 224) -> Folder:
        """List the images of a split; nothing is decoded yet."""
        require("PIL.Image")
        if not path.is_dir():
            raise DataError(f"the folder {str(path)!r} does not exist")
        here = next((path / name for name in SPLITS[split] if (path / name).is_dir()), None)
        if here is None:
            raise DataError(f"{str(path)!r} has no folder {' or '.join(SPLITS[split])} of class folders")
        train = path / "train"
        classes = [p.name for p in _visible(train if train.is_dir() else here) if p.is_dir()]
        files, labels = _listed(here, classes)
        chosen = subset(labels, limit)
        return cls(
            *(path.name, len(classes), (3, size, size), "imagenet", augment),
            *((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            files=[files[i] for i in chosen.tolist()],
            labels=labels[chosen],
        )

    def __len__(self) -> int:
        return len(self.files)

    def fingerprint(self) -> str:
        """A hash over all labels and file names (below the class folders) and the bytes of 256 files, evenly spaced."""
        names = "\0".join(f"{file.parent.name}/{file.name}" for file in self.files)
        some = (self.files[i] for i in spread(len(self), HASHED_FILES).tolist())
        try:
            return self._hash(self.labels, os.fsencode(names), *(file.read_bytes() for file in some))
        except OSError as error:
            raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    def batches(
        self, indices: Sequence[Tensor], *, seed: int, epoch: int, augment: bool, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        area = AREA.get(self.augment) if augment else None
        loader = DataLoader(
            _Decoder(self.files, self.shape[1], area, seed, epoch),
            batch_sampler=[chosen.tolist() for chosen in indices],  # pyrefly: ignore
            num_workers=self.workers,
            collate_fn=_as_it_is,
        )
        for chosen, decoded in zip(indices, loader, strict=True):
            if isinstance(decoded, DataError):
                raise decoded
            yield self.normalise(decoded.to(device, non_blocking=True)), self.labels[chosen].to(device)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_it_is(batch: Any) -> Any:
    return batch


def _visible(folder: Path) -> list[Path]:
    """What is in a folder but for what systems and editors leave behind, hidden."""
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))


def _listed(here: Path, classes: list[str]) -> tuple[list[Path], Tensor]:
    found = _visible(here)
    for path in found:
        if not path.is_dir():
            raise DataError(f"{str(path)!r} lies outside the class folders: move it away")
        if path.name not in classes:
            raise DataError(f"{str(path)!r} is a class that the training folder does not have")
    files: list[Path] = []
    labels: list[int] = []
    for path in found:
        inside = _visible(path)
        strange = next((p for p in inside if p.suffix.lower() not in ENDINGS), None)
        if strange is not None:
            raise DataError(f"{str(strange)!r} is no image by its ending ({', '.join(sorted(ENDINGS))}): move it away")
        if not inside:
            raise DataError(f"the class folder {str(path)!r} is empty")
        files += inside
        labels += [classes.index(path.name)] * len(inside)
    if not files:
        raise DataError(f"{str(here)!r} has no class folders")
    return files, torch.tensor(labels)


@dataclass
class _Decoder(Dataset):
    """Decodes whole batches; an image that does not decode comes back as the error, to be raised in one piece."""

    files: list[Path]
    size: int
    area: float | None
    seed: int
    epoch: int

    def __getitems__(self, indices: list[int]) -> Tensor | DataError:
        draws = uniforms(self.seed, self.epoch, torch.tensor(indices), 4 * TRIES + 1).tolist()
        images = np.empty((len(indices), self.size, self.size, 3), dtype=np.uint8)
        try:
            for target, index, drawn in zip(images, indices, draws, strict=True):
                self._decode(index, drawn, target)
        except DataError as error:
            return error
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()

    def _decode(self, index: int, drawn: list[float], target: np.ndarray) -> None:
        where = f"image {index}, {self.files[index]}: it"
        with opened(self.files[index], where) as found:
            if found.mode[0] in "IF":  # Pillow would make nearly all of it white
                raise DataError(f"{where} has more than 8 bits per pixel (mode {found.mode}): save it with 8")
            image = found.convert("RGB")
        box = centre(image.size) if self.area is None else random_box(image.size, self.area, drawn)
        resized = image.resize((self.size, self.size), require("PIL.Image").Resampling.BILINEAR, box=box)
        target[...] = np.asarray(resized)[:, ::-1] if self.area is not None and drawn[-1] < 0.5 else resized


Box = tuple[float, float, float, float]


def centre(size: tuple[int, int], part: float = 224 / 256) -> Box:
    """The central square with 224/256 of the shorter side: resizing to 256 and cropping 224, in one step."""
    width, height = size
    side = min(width, height) * part
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(size: tuple[int, int], least: float, draws: Sequence[float]) -> Box:
    """A crop of ``least`` to 1 of the area and of sides 3:4 to 4:3; the central one if ten do not fit."""
    width, height = size
    for attempt in range(TRIES):
        part, shape, down, right = draws[4 * attempt : 4 * attempt + 4]
        area = width * height * (least + (1 - least) * part)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * shape)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(right * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2
