"""Folders of images, one per class, as ImageNet: decoded in worker processes, batches ahead of their use."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
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
from mimicnorm.data.selection import Selection
from mimicnorm.data.source import Augment, Source, spread
from mimicnorm.errors import DataError

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".tif", ".tiff", ".webp"})
SPLITS = {"train": ("train",), "test": ("val", "validation", "test")}
TRIES = 10  # at a crop that fits, as is usual
AREA = {"standard": 0.08, "light": 0.25}  # the smallest crop, as a fraction of the image
HASHED_FILES = 256  # opened for a fingerprint: a second or two for ImageNet on a slow disk
_Request = tuple[Tensor, int, int, float | None]  # indices, seed, epoch, area of the smallest crop


@dataclass
class Folder(Source):
    """Image files and their labels, numbered by the order of the class folders' names.

    Attributes:
        root: the folder of the class folders.
        names: CLASS/FILE of every image as one array of bytes, which worker processes share. A list of 1.28 million
            paths would be copied into each of them.
        labels: int64.
        workers: processes that decode.
    """

    root: Path
    names: np.ndarray = field(repr=False)
    labels: Tensor = field(repr=False)
    workers: int = field(default_factory=lambda: min(8, _cores()))
    _idle: DataLoader | None = field(default=None, init=False, repr=False)

    @classmethod
    def open(cls, path: Path, split: str, *, augment: Augment, size: int = 224) -> Folder:
        """List the images of a split; nothing is decoded yet."""
        import PIL.Image  # noqa: F401  # missing packages are noticed before training

        if not path.is_dir():
            raise DataError(f"the folder {str(path)!r} does not exist")
        root = next((path / name for name in SPLITS[split] if (path / name).is_dir()), None)
        if root is None:
            raise DataError(f"{str(path)!r} has no folder {' or '.join(SPLITS[split])} of class folders")
        train = path / "train"
        classes = [entry.name for entry in _visible(train if train.is_dir() else root) if entry.is_dir()]
        names, labels = _list_images(root, classes)
        return cls(
            *(path.name, len(classes), (3, size, size), "imagenet", augment),
            *((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            root=root,
            names=np.array([os.fsencode(name) for name in names]),
            labels=labels,
        )

    def select(self, selection: Selection) -> Folder:
        """Return the folder with some of its samples."""
        chosen, labels, classes = selection.choose(self.labels, self.classes, str(self.root))
        return dataclasses.replace(self, names=self.names[chosen.numpy()], labels=labels, classes=classes)

    def __len__(self) -> int:
        return len(self.labels)

    def _content(self) -> Iterator[Tensor | bytes]:
        """Yield all labels and file names (below the class folders) and the bytes of 256 files, evenly spaced."""
        yield from (self.labels, b"\0".join(self.names.tolist()))
        for name in self.names[spread(len(self), HASHED_FILES).numpy()]:
            try:
                yield (self.root / os.fsdecode(name)).read_bytes()
            except OSError as error:
                raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error

    def batches(
        self, indices: Sequence[Tensor], *, seed: int, epoch: int, augment: bool, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, Tensor]]:
        area = AREA.get(self.augment) if augment else None
        # All that changes between epochs is in the requests, so that the workers can stay.
        requests = [(chosen, seed, epoch, area) for chosen in indices]
        loader, self._idle = self._idle, None  # a second iterator at the same time gets workers of its own
        pin = torch.device(device).type == "cuda"
        if loader is None or (loader.num_workers, loader.pin_memory) != (self.workers, pin):
            loader = DataLoader(
                _Decoder(self.root, self.names, self.shape[1]),
                batch_size=None,
                sampler=[],  # filled for each epoch
                num_workers=self.workers,
                persistent_workers=self.workers > 0,
                pin_memory=pin,
                generator=torch.Generator(),  # else the loader draws a number from the caller's generator
            )
        for chosen, decoded in zip(indices, _decoded(loader, requests), strict=True):
            if isinstance(decoded, str):
                raise DataError(decoded)
            images = decoded.to(device, non_blocking=True)
            yield self.normalise(images), self.labels[chosen].to(device, non_blocking=True)
        self._idle = loader  # its workers wait for the next epoch


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder in order, without hidden files, which systems and editors leave there."""
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)


def _list_images(root: Path, classes: list[str]) -> tuple[list[str], Tensor]:
    """Return the images as CLASS/FILE and their labels; whatever is not an image in a class folder is an error."""
    names: list[str] = []
    labels: list[int] = []
    for folder in _visible(root):
        if not folder.is_dir():
            raise DataError(f"{folder.path!r} lies outside the class folders: move it away")
        if folder.name not in classes:
            raise DataError(f"{folder.path!r} is a class that the training folder does not have")
        images = _visible(Path(folder.path))
        if not images:
            raise DataError(f"the class folder {folder.path!r} is empty")
        for image in images:
            if os.path.splitext(image.name)[1].lower() not in ENDINGS:
                known = ", ".join(sorted(ENDINGS))
                raise DataError(f"{image.path!r} is not an image by its ending ({known}): move it away")
            if not image.is_file():  # reading from a pipe would wait for a writer
                raise DataError(f"{image.path!r} is not a regular file (a folder, pipe or broken link): move it away")
            names.append(f"{folder.name}/{image.name}")
        labels += [classes.index(folder.name)] * len(images)
    if not names:
        raise DataError(f"{str(root)!r} has no class folders")
    return names, torch.tensor(labels)


def _decoded(loader: DataLoader, requests: list[_Request]) -> Iterator[Tensor | str]:
    """Yield the decoded batches of one epoch.

    torch watches workers by a SIGCHLD handler that raises wherever the main thread happens to be. Without it, a killed
    worker is noticed here, where batches are waited for.
    """
    sampler: Any = loader.sampler
    sampler[:] = requests
    child = getattr(signal, "SIGCHLD", signal.SIGINT)  # Windows has none, and torch leaves SIGINT alone
    handler = signal.getsignal(child)
    try:
        batches = iter(loader)
        if signal.getsignal(child) is not handler:
            signal.signal(child, handler or signal.SIG_DFL)
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise DataError(
            f"a process that decodes images was killed ({str(error).partition(chr(10))[0]}), usually because memory "
            "ran out: free memory, or shared memory in /dev/shm, and run the same again"
        ) from error


@dataclass
class _Decoder(Dataset):
    """Decodes whole batches; for an image that does not decode, the message is returned, to be raised in the caller."""

    root: Path
    names: np.ndarray
    size: int

    def __getitem__(self, index: _Request) -> Tensor | str:
        indices, seed, epoch, area = index
        draws = uniforms(seed, epoch, indices, 4 * TRIES + 1).tolist()
        images = np.empty((len(draws), self.size, self.size, 3), dtype=np.uint8)
        try:
            for target, position, drawn in zip(images, indices.tolist(), draws, strict=True):
                self._decode(position, area, drawn, target)
        except DataError as error:
            return str(error)
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()

    def _decode(self, index: int, area: float | None, drawn: list[float], target: np.ndarray) -> None:
        from PIL import Image

        file = self.root / os.fsdecode(self.names[index])
        where = f"image {index}, {file}: it"
        with opened(file, where) as encoded:
            if encoded.mode[0] in "IF":  # Pillow would make nearly all of it white
                raise DataError(f"{where} has more than 8 bits per pixel (mode {encoded.mode}): save it with 8")
            image = encoded.convert("RGB")
        box = centre(image.size) if area is None else random_box(image.size, area, drawn)
        resized = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        target[...] = np.asarray(resized)[:, ::-1] if area is not None and drawn[-1] < 0.5 else resized


Box = tuple[float, float, float, float]


def centre(size: tuple[int, int], fraction: float = 224 / 256) -> Box:
    """Return the central square with 224/256 of the shorter side: resizing to 256 and cropping 224, in one step."""
    width, height = size
    side = min(width, height) * fraction
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(size: tuple[int, int], least: float, draws: Sequence[float]) -> Box:
    """Return a crop of ``least`` to 1 of the area with sides 3:4 to 4:3; the central one if ten do not fit."""
    width, height = size
    for attempt in range(TRIES):
        fraction, shape, down, right = draws[4 * attempt : 4 * attempt + 4]
        area = width * height * (least + (1 - least) * fraction)
        ratio = math.exp(math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * shape)
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(right * (width - w + 1)), int(down * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, height * 4 / 3), min(height, width * 4 / 3)
    return (width - w) / 2, (height - h) / 2, (width + w) / 2, (height + h) / 2
