"""The data sets by name, and where their files are."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimicnorm.data.folder import Folder
from mimicnorm.data.memory import Memory
from mimicnorm.data.parquet import KnownSet, read
from mimicnorm.data.selection import Selection, Split, subset
from mimicnorm.data.source import Augment, Source
from mimicnorm.errors import DataError, NameNotFoundError

_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))
_FINE, _COARSE = ("fine_label", "label"), ("coarse_label",)
_KNOWN = (
    KnownSet("digits", 10, (1, 8, 8), (0.3053,), (0.3761,), 1, False),
    KnownSet("mnist", 10, (1, 28, 28), (0.1307,), (0.3081,), 2, False, "ylecun/mnist", "mnist"),
    KnownSet("cifar10", 10, (3, 32, 32), *_CIFAR10, 4, True, "uoft-cs/cifar10", "plain_text"),
    KnownSet("cifar100", 100, (3, 32, 32), *_CIFAR100, 4, True, "uoft-cs/cifar100", "cifar100", _FINE),
    KnownSet("cifar100-coarse", 20, (3, 32, 32), *_CIFAR100, 4, True, "uoft-cs/cifar100", "cifar100", _COARSE),
)
IMAGENET_CLASSES = 1000
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.parquet$")


def names() -> list[str]:
    """Return the data sets that `load` knows; ``folder:PATH`` is any folder of class folders."""
    return [*(known.name for known in _KNOWN), "imagenet", "folder:PATH"]


def load(
    name: str,
    split: Split = "train",
    *,
    data_dir: str | Path | None = None,
    limit: int | None = None,
    augment: Augment = "standard",
    classes: Sequence[int] | None = None,
    validation: float = 0.0,
) -> Source:
    """Load a split of a data set.

    Args:
        name: digits (inside scikit-learn), mnist, cifar10, cifar100, cifar100-coarse (Parquet files, as on the Hugging
            Face hub), imagenet (1000 class folders in each of train and val) or ``folder:PATH`` (the same of any
            classes). Other data under one of these names is an error.
        split: train, validation (what ``validation`` holds out of the training set) or test.
        data_dir: where the files are, in a folder of the data set's name or directly. If not given, the environment
            variable MIMICNORM_DATA; if that is not set, the hub.
        limit: samples to take at most, spread evenly over the classes; taken last.
        augment: what `Source.batches` does where asked to augment. standard: shifts (4 pixels, CIFAR; 2, MNIST; 1,
            digits) and, except for digits and MNIST, mirror images; crops of 8 to 100 % of the area for folders.
            light: mirror images alone; crops of 25 to 100 %. none: nothing.
        classes: class indices to use, renumbered from 0 in this order. Mean and variance stay those of the whole set.
        validation: fraction of each class of the training set that is held out of split train.

    Example:
        >>> digits = load("digits", "test")
        >>> images, labels = next(digits.batches([torch.arange(4)], seed=0, epoch=0, augment=False))
        >>> images.shape, labels.shape, len(digits)
        (torch.Size([4, 1, 8, 8]), torch.Size([4]), 359)
    """
    selection = Selection(split, limit, None if classes is None else tuple(classes), validation)
    if augment not in ("standard", "light", "none"):
        raise DataError(f"augment must be standard, light or none, not {augment!r}")
    try:
        return _load(name, data_dir, selection, augment)
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed. Install it with: pip install 'mimicnorm[data]'") from error


def _load(name: str, data_dir: str | Path | None, selection: Selection, augment: Augment) -> Source:
    if name.startswith("folder:"):
        path = Path(name.removeprefix("folder:")).expanduser()
        return Folder.open(path, selection.files, augment=augment).select(selection)
    data_dir = data_dir if data_dir is not None else os.environ.get("MIMICNORM_DATA") or None
    root = None if data_dir is None else Path(data_dir).expanduser()
    if name == "imagenet":
        return _imagenet(root, selection.files, augment).select(selection)
    known = next((known for known in _KNOWN if known.name == name), None)
    if known is None:
        raise NameNotFoundError(f"there is no data set {name!r}.", name, names())
    if name == "digits":
        images, labels, classes = _digits(selection)
    else:
        split = selection.files
        files = _hub_files(known, split) if root is None else _local_files(known, split, root)
        images, labels, classes = read(files, known, selection)
    about = (name, classes, known.shape, "cifar", augment, known.mean, known.std)
    return Memory(*about, images, labels, known.pad, known.flip)


def _imagenet(root: Path | None, split: Split, augment: Augment) -> Folder:
    if root is None:
        raise DataError("imagenet is read from a folder: give data_dir (--data-dir) or set MIMICNORM_DATA")
    path = root / "imagenet" if (root / "imagenet").is_dir() else root
    source = Folder.open(path, split, augment=augment)
    if source.classes != IMAGENET_CLASSES:
        raise DataError(
            f"{str(path)!r} does not hold imagenet: it has {source.classes} class folders, and imagenet has "
            f"{IMAGENET_CLASSES}. Load data of other classes as folder:{path} (--data folder:{path})"
        )
    return source


def _digits(selection: Selection) -> tuple[Tensor, Tensor, int]:
    """Return one in five images of a class, chosen at random but always the same, for testing; else the others."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = torch.from_numpy(data.images * (255 / 16)).round().to(torch.uint8)[:, None]
    labels = torch.from_numpy(data.target).long()
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[subset(labels, len(labels) // 5)] = True
    part = test if selection.files == "test" else ~test
    chosen, labels, classes = selection.choose(labels[part], 10, "digits")
    return images[part][chosen], labels, classes


def _local_files(known: KnownSet, split: Split, root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"the data folder {str(root)!r} {'is a file' if root.exists() else 'does not exist'}")
    inner = known.folder  # of the hub's repository, where that was copied as a whole
    places = (root / known.name, root / known.name / inner, root / inner, root)
    folder = next((place for place in places if any(place.glob("*.parquet"))), root / known.name)
    files = sorted(file for file in folder.glob(f"{split}*.parquet") if file.is_file())  # no pipes: they would block
    if not files:
        raise DataError(
            f"no {split}*.parquet of {known.name} in {str(folder)!r}: put the hub's files there, or give no data "
            "folder to fetch them from the hub"
        )
    shards = [(int(m[1]), int(m[2])) for file in files if (m := _SHARD.search(file.name))]
    missing = {(number, of) for _, of in shards for number in range(of)} - set(shards)
    if missing:
        name = "{}-{:05d}-of-{:05d}.parquet".format(split, *min(missing))
        raise DataError(f"{str(folder)!r} holds a part of {known.name}: {name} is missing")
    return files


def _hub_files(known: KnownSet, split: Split) -> list[Path]:
    from huggingface_hub import hf_hub_download

    file = f"{known.folder}/{split}-00000-of-00001.parquet"
    try:
        return [Path(hf_hub_download(known.repository, file, repo_type="dataset"))]
    except Exception as error:  # the hub's client raises many kinds, for one cause: the file cannot be had
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{known.name} cannot be fetched from the hub ({known.repository}: {reason}). Give a folder of its Parquet "
            "files as data_dir (--data-dir) or in MIMICNORM_DATA"
        ) from error
