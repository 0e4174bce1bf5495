"""Images and labels from Parquet files as the Hugging Face hub keeps them: a column {bytes, path} and one of labels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mimicnorm.data.decode import opened
from mimicnorm.data.requirements import require
from mimicnorm.data.source import subset
from mimicnorm.errors import DataError

Columns = tuple[tuple[str, ...], tuple[str, ...]]


@dataclass(frozen=True)
class Expected:
    """What the files of a data set must hold, or they are not of that data set.

    Attributes:
        name: of the data set.
        columns: the names that the image and the label column may have. The first one of labels says by itself what
            they are; under another name every class must occur, or the labels may be those of another data set.
        classes: labels must be below.
        shape: that every image must have.
        remedy: what to do with other data.
    """

    name: str
    columns: Columns
    classes: int
    shape: tuple[int, int, int]
    remedy: str


def read(files: Sequence[Path], expected: Expected, *, limit: int | None) -> tuple[Tensor, Tensor]:
    """Read images (N, C, H, W) of bytes and labels; only those that ``limit`` takes are decoded.

    Args:
        files: in order.
        expected: of the data set that the files are taken for.
        limit: samples to take, evenly over the classes.
    """
    tables = [_table(file, expected) for file in files]
    labels = torch.cat([_labels(file, label, expected) for file, (_, label, _) in zip(files, tables, strict=True)])
    _require_all_classes(files, {name for _, _, name in tables}, labels, expected)
    chosen = subset(labels, limit)
    images = torch.empty((len(chosen), *expected.shape), dtype=torch.uint8)
    filled = images.permute(0, 2, 3, 1).numpy()  # a view: what is decoded into it is in images
    start = place = 0
    for file, (column, label, _) in zip(files, tables, strict=True):
        rows = chosen[(chosen >= start) & (chosen < start + len(label))] - start
        for row, encoded in zip(rows.tolist(), column.take(rows.numpy()).to_pylist(), strict=True):
            _decode(file, row, encoded, filled[place], expected)
            place += 1
        start += len(label)
    return images, labels[chosen]


def _table(file: Path, expected: Expected) -> tuple:
    """The bytes of the images and the labels of a file, as columns, and the name of the second."""
    pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    try:
        schema = parquet.read_schema(file)
        found = []
        for accepted in expected.columns:
            name = next((name for name in accepted if name in schema.names), None)
            if name is None:
                raise DataError(
                    f"{file} does not hold {expected.name}: it has no column {' or '.join(accepted)}; its columns are "
                    f"{', '.join(schema.names)}. {expected.remedy}"
                )
            found.append(name)
        table = parquet.read_table(file, columns=found)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {str(error).partition(chr(10))[0]}") from error
    if not table.num_rows:
        raise DataError(f"{file} has no rows")
    image, label = (table.column(name).combine_chunks() for name in found)
    if pyarrow.types.is_struct(image.type) and image.type.get_field_index("bytes") >= 0:
        image = pyarrow.compute.struct_field(image, "bytes")
    if not (pyarrow.types.is_binary(image.type) or pyarrow.types.is_large_binary(image.type)):
        raise DataError(f"{file}: column {found[0]} must hold encoded images (bytes), not {image.type}")
    if not pyarrow.types.is_integer(label.type):
        raise DataError(f"{file}: column {found[1]} must hold integers, not {label.type}")
    return image, label, found[1]


def _require_all_classes(files: Sequence[Path], columns: set[str], labels: Tensor, expected: Expected) -> None:
    """Refuse labels of fewer classes in a column whose name does not say what they are."""
    other = columns - {expected.columns[1][0]}
    occurring = labels.unique()
    if other and len(occurring) < expected.classes:
        raise DataError(
            f"{str(files[0].parent)!r} does not hold {expected.name}: the labels in column {min(other)} are of "
            f"{len(occurring)} classes ({int(occurring[0])} to {int(occurring[-1])}), and {expected.name} has "
            f"{expected.classes}, in column {expected.columns[1][0]}. {expected.remedy}"
        )


def _labels(file: Path, column, expected: Expected) -> Tensor:
    empty = column.is_null().to_numpy(zero_copy_only=False)
    labels = column.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(empty | (labels < 0) | (labels >= expected.classes))
    if len(wrong):
        row = int(wrong[0])
        value = "missing" if empty[row] else labels[row]
        raise DataError(
            f"{file}, row {row}: the label is {value}; labels of {expected.name} must be 0 to {expected.classes - 1}. "
            f"{expected.remedy}"
        )
    return torch.from_numpy(labels.astype(np.int64))


def _decode(file: Path, row: int, encoded: bytes | None, target: np.ndarray, expected: Expected) -> None:
    where = f"{file}, row {row}: the image"
    if encoded is None:
        raise DataError(f"{where} is missing")
    height, width, channels = target.shape
    size = f"{height} x {width} {'RGB' if channels == 3 else 'L'}"  # a palette's numbers would pass for greys
    with opened(io.BytesIO(encoded), where) as image:
        if (found := f"{image.height} x {image.width} {image.mode}") != size:
            raise DataError(
                f"{where} is {found} (height, width, Pillow's mode); an image of {expected.name} must be {size}. "
                f"{expected.remedy}"
            )
        target[...] = np.asarray(image).reshape(target.shape)
