"""Images and labels from Parquet files as the Hugging Face hub keeps them: a column {bytes, path} and one of labels."""

from __future__ import annotations

import bisect
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mimicnorm.data.decode import opened
from mimicnorm.data.selection import Selection, subset
from mimicnorm.data.source import spread
from mimicnorm.errors import DataError

MANY, OFF = 256, 0.02  # images whose mean identifies a data set, and how far it may be off beside chance
IMAGE_COLUMNS = ("img", "image")


@dataclass(frozen=True)
class KnownSet:
    """A data set that fits in memory, and what its files must hold.

    Attributes:
        pad: largest random shift, in pixels.
        flip: whether images may be mirrored.
        folder: of the Parquet files in the hub's repository.
        label_columns: accepted names. The first one says by itself what the labels are; under another name every class
            must occur, or the labels may be those of another data set.
    """

    name: str
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool
    repository: str = ""
    folder: str = ""
    label_columns: tuple[str, ...] = ("label",)

    @property
    def remedy(self) -> str:
        """Return what to do if files hold other data."""
        return f"Give the files of {self.repository} (Hugging Face hub), or load other data by its own name"

    def mismatch(self, where: Path, reason: str) -> DataError:
        """Return the error for files that hold other data."""
        return DataError(f"{str(where)!r} does not hold {self.name}: {reason}. {self.remedy}")


def read(files: Sequence[Path], known: KnownSet, selection: Selection) -> tuple[Tensor, Tensor, int]:
    """Read images (N, C, H, W) of bytes and labels; return them with the number of classes.

    Args:
        files: in order.
        known: the data set that the files must hold.
        selection: the samples to take; only those are decoded.
    """
    columns = [_columns(file, known) for file in files]
    labels = torch.cat([_labels(file, column[1], known) for file, column in zip(files, columns, strict=True)])
    _require_classes(files[0].parent, {column[2] for column in columns}, labels, known)
    starts = list(itertools.accumulate((len(column[0]) for column in columns), initial=0))

    def decoded(indices: Tensor) -> Tensor:
        images = torch.empty((len(indices), *known.shape), dtype=torch.uint8)
        pixels = images.permute(0, 2, 3, 1).numpy()  # a view: what is decoded into it is in images
        for target, index in zip(pixels, indices.tolist(), strict=True):
            part = bisect.bisect_right(starts, index) - 1
            row = index - starts[part]
            _decode(columns[part][0][row].as_py(), f"{files[part]}, row {row}: the image", target, known)
        return images

    chosen, chosen_labels, classes = selection.choose(labels, known.classes, known.name)
    images = decoded(chosen)
    # some classes are brighter than others: the data set's mean is that of all
    _require_mean(files[0].parent, images if selection.classes is None else decoded(subset(labels, 4 * MANY)), known)
    return images, chosen_labels, classes


def _columns(file: Path, known: KnownSet) -> tuple[Any, Any, str]:
    """Return the encoded images and the labels of a file as Arrow arrays, and the name of the second column."""
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(file)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error
    names = []
    for accepted in (IMAGE_COLUMNS, known.label_columns):
        present = [name for name in accepted if name in table.column_names]
        if not present:
            columns = ", ".join(table.column_names)
            raise known.mismatch(file, f"it has no column {' or '.join(accepted)}; its columns are {columns}")
        names.append(present[0])
    if not table.num_rows:
        raise DataError(f"{file} has no rows")
    images, labels = (table.column(name).combine_chunks() for name in names)
    if arrow.types.is_struct(images.type) and (position := images.type.get_field_index("bytes")) >= 0:
        images = images.flatten()[position]
    if not (arrow.types.is_binary(images.type) or arrow.types.is_large_binary(images.type)):
        raise DataError(f"{file}: column {names[0]} must hold encoded images (bytes), not {images.type}")
    if not arrow.types.is_integer(labels.type):
        raise DataError(f"{file}: column {names[1]} must hold integers, not {labels.type}")
    return images, labels, names[1]


def _labels(file: Path, column: Any, known: KnownSet) -> Tensor:
    missing = column.is_null().to_numpy(zero_copy_only=False)
    labels = column.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(missing | (labels < 0) | (labels >= known.classes))
    if len(wrong):
        row = int(wrong[0])
        value = "missing" if missing[row] else labels[row]
        allowed = f"labels of {known.name} must be 0 to {known.classes - 1}"
        raise DataError(f"{file}, row {row}: the label is {value}; {allowed}. {known.remedy}")
    return torch.from_numpy(labels.astype(np.int64))


def _require_classes(folder: Path, names: set[str], labels: Tensor, known: KnownSet) -> None:
    """Refuse labels of fewer classes in a column whose name does not say what they are."""
    usual, other = known.label_columns[0], names - {known.label_columns[0]}
    present = labels.unique()
    if other and len(present) < known.classes:
        raise known.mismatch(
            folder,
            f"the labels in column {min(other)} are of {len(present)} classes ({int(present[0])} to "
            f"{int(present[-1])}), and {known.name} has {known.classes}, in column {usual}",
        )


def _require_mean(folder: Path, images: Tensor, known: KnownSet) -> None:
    """Refuse images whose mean is not the data set's: Fashion-MNIST has all else in common with MNIST."""
    some = images[spread(len(images), 4096)].double().mean((2, 3)) / 255
    if len(some) < MANY:
        return
    mean, usual = some.mean(0), torch.tensor(known.mean, dtype=torch.float64)
    by_chance = 5 * some.std(0) / len(some) ** 0.5
    if ((mean - usual).abs() > OFF + by_chance).any():
        measured, expected = (", ".join(f"{value:.3f}" for value in m.tolist()) for m in (mean, usual))
        raise known.mismatch(
            folder, f"the mean of its images is ({measured}) by channel, and that of {known.name} is ({expected})"
        )


def _decode(encoded: bytes | None, where: str, target: np.ndarray, known: KnownSet) -> None:
    if encoded is None:
        raise DataError(f"{where} is missing")
    height, width, channels = target.shape
    expected = f"{height} x {width} {'RGB' if channels == 3 else 'L'}"  # a palette's numbers would pass for greys
    with opened(io.BytesIO(encoded), where) as image:
        if (actual := f"{image.height} x {image.width} {image.mode}") != expected:
            raise DataError(
                f"{where} is {actual} (height, width, Pillow's mode); an image of {known.name} must be {expected}. "
                f"{known.remedy}"
            )
        target[...] = np.asarray(image).reshape(target.shape)
