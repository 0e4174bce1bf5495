"""The data sets by name, and where their files are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from mimicnorm.data.folder import Folder
from mimicnorm.data.memory import Memory
from mimicnorm.data.parquet import Expected, read
from mimicnorm.data.requirements import require
from mimicnorm.data.source import Augment, Source, spread, subset
from mimicnorm.errors import DataError, NameNotFoundError

Split = Literal["train", "test"]


@dataclass(frozen=True)
class _Known:
    """A data set that fits in memory, and where it is on the hub."""

    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool
    repository: str = ""
    folder: str = ""
    labels: tuple[str, ...] = ("label",)


_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_KNOWN = {
    "digits": _Known(10, (1, 8, 8), (0.3053,), (0.3761,), 1, False),
    "mnist": _Known(10, (1, 28, 28), (0.1307,), (0.3081,), 2, False, "ylecun/mnist", "mnist"),
    "cifar10": _Known(10, (3, 32, 32), *_CIFAR10, 4, True, "uoft-cs/cifar10", "plain_text"),
    "cifar100": _Known(100, (3, 32, 32), *_CIFAR100, 4, True, "uoft-cs/cifar100", "cifar100", ("fine_label", "label")),
}
IMAGENET_CLASSES = 1000
MANY, OFF = 256, 0.02  # images whose mean says what they are, and how far that may be off beside chance
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


def names() -> list[str]:
    """The data sets that `load` knows; ``folder:PATH`` is any folder of class folders."""
    return [*_KNOWN, "imagenet", "folder:PATH"]


def load(
    name: str,
    split: Split = "train",
    *,
    data_dir: str | Path | None = None,
    limit: int | None = None,
    augment: Augment = "standard",
) -> Source:
    """Load a split of a data set.

    Args:
        name: digits (inside scikit-learn), mnist, cifar10, cifar100 (Parquet files, as on the Hugging Face hub),
            imagenet (1000 class folders in each of train and val) or ``folder:PATH`` (the same of any classes). Other
            data under one of these names is an error.
        split: train or test.
        data_dir: where the files are, in a folder of the data set's name or directly; else the environment variable
            MIMICNORM_DATA says, else they come from the hub.
        limit: take at most so many samples, spread evenly over the classes.
        augment: what `Source.batches` does where asked to augment. standard: shifts (4 pixels, CIFAR; 2, MNIST; 1,
            digits) and, but for digits, mirror images; crops of 8 to 100 % of the area for folders. light: mirror
            images alone; crops of 25 to 100 %. none: nothing.

    Example:
        >>> digits = load("digits", "test")
        >>> images, labels = next(digits.batches([torch.arange(4)], seed=0, epoch=0, augment=False))
        >>> images.shape, labels.shape, len(digits)
        (torch.Size([4, 1, 8, 8]), torch.Size([4]), 359)
    """
    if split not in ("train", "test"):
        raise DataError(f"split must be 'train' or 'test', not {split!r}")
    if augment not in ("standard", "light", "none"):
        raise DataError(f"augment must be standard, light or none, not {augment!r}")
    if data_dir is None:
        data_dir = os.environ.get("MIMICNORM_DATA") or None
    root = None if data_dir is None else Path(data_dir).expanduser()
    if name.startswith("folder:"):
        return Folder.open(Path(name.removeprefix("folder:")).expanduser(), split, limit=limit, augment=augment)
    if name == "imagenet":
        if root is None:
            raise DataError("imagenet is read from a folder: give data_dir (--data-dir) or set MIMICNORM_DATA")
        path = root / "imagenet" if (root / "imagenet").is_dir() else root
        source = Folder.open(path, split, limit=limit, augment=augment)
        if source.classes != IMAGENET_CLASSES:
            raise DataError(
                f"{str(path)!r} does not hold imagenet: it has {source.classes} class folders, and imagenet has "
                f"{IMAGENET_CLASSES}. Load data of other classes as folder:{path} (--data folder:{path})"
            )
        return source
    if name not in _KNOWN:
        raise NameNotFoundError(f"there is no data set {name!r}.", name, names())
    known = _KNOWN[name]
    if name == "digits":
        images, labels = _digits(split, limit)
    else:
        files = _hub_files(name, split) if root is None else _local_files(name, split, root)
        columns = (("img", "image"), known.labels)
        remedy = f"Give the files of {known.repository} (Hugging Face hub), or load other data by its own name"
        images, labels = read(files, Expected(name, columns, known.classes, known.shape, remedy), limit=limit)
        _require_usual_mean(name, files[0].parent, images, remedy)
    kind = (name, known.classes, known.shape, "cifar", augment, known.mean, known.std)
    return Memory(*kind, images, labels, known.pad, known.flip)


def _require_usual_mean(name: str, folder: Path, images: Tensor, remedy: str) -> None:
    """Refuse images whose mean is not the data set's: Fashion-MNIST has all else in common with MNIST."""
    some = images[spread(len(images), 4096)].double().mean((2, 3)) / 255
    if len(some) < MANY:
        return
    usual = torch.tensor(_KNOWN[name].mean, dtype=torch.float64)
    by_chance = 5 * some.std(0) / len(some) ** 0.5
    if ((some.mean(0) - usual).abs() > OFF + by_chance).any():
        means = ", ".join(f"{value:.3f}" for value in some.mean(0).tolist())
        raise DataError(
            f"{str(folder)!r} does not hold {name}: the mean of its images is ({means}) by channel, and that of {name} "
            f"is ({', '.join(f'{value:.3f}' for value in usual.tolist())}). {remedy}"
        )


def _digits(split: Split, limit: int | None) -> tuple[Tensor, Tensor]:
    """Every fifth image of a class, at random but always the same ones, is for testing."""
    data = require("sklearn.datasets").load_digits()
    images = torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(data.target).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[subset(labels, len(labels) // 5)] = True
    mine = (test if split == "test" else ~test).nonzero()[:, 0]
    mine = mine[subset(labels[mine], limit)]
    return images[mine], labels[mine]


def _local_files(name: str, split: Split, root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"the data folder {str(root)!r} {'is a file' if root.exists() else 'does not exist'}")
    inner = _KNOWN[name].folder  # of the hub's repository, where that was copied whole
    places = (root / name, root / name / inner, root / inner, root)
    folder = next((place for place in places if any(place.glob("*.parquet"))), root / name)
    files = sorted(folder.glob(f"{split}*.parquet"))
    if not files:
        raise DataError(
            f"no {split}*.parquet of {name} in {str(folder)!r}: put the hub's files there, or give no data folder to "
            "fetch them from the hub"
        )
    shards = [(int(m[1]), int(m[2])) for file in files if (m := _SHARD.search(file.name))]
    missing = {(number, of) for _, of in shards for number in range(of)} - set(shards)
    if missing:
        lost = "{}-{:05d}-of-{:05d}.parquet".format(split, *min(missing))
        raise DataError(f"{str(folder)!r} holds a part of {name}: {lost} is missing")
    return files


def _hub_files(name: str, split: Split) -> list[Path]:
    hub = require("huggingface_hub")
    known = _KNOWN[name]
    file = f"{known.folder}/{split}-00000-of-00001.parquet"
    try:
        return [Path(hub.hf_hub_download(known.repository, file, repo_type="dataset"))]
    except Exception as error:  # the hub's client raises many kinds, for one cause: the file cannot be had
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{name} cannot be fetched from the hub ({known.repository}: {reason}). Give a folder of its Parquet files "
            f"as data_dir (--data-dir) or in MIMICNORM_DATA"
        ) from error
