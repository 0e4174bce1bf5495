"""Images and labels from Parquet files as the Hugging Face hub keeps them: a column {bytes, path} and one of labels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mimicnorm.data.decode import opened
from mimicnorm.data.requirements import require
from mimicnorm.data.source import subset
from mimicnorm.errors import DataError

Columns = tuple[tuple[str, ...], tuple[str, ...]]


def read(
    files: Sequence[Path], columns: Columns, *, classes: int, shape: tuple[int, int, int], limit: int | None
) -> tuple[Tensor, Tensor]:
    """Read images (N, C, H, W) of bytes and labels; only those that ``limit`` takes are decoded.

    Args:
        files: in order.
        columns: the names that the image and the label column may have.
        classes: labels must be below.
        shape: that every image must have.
        limit: samples to take, evenly over the classes.
    """
    tables = [_table(file, columns) for file in files]
    labels = torch.cat([_labels(file, label, classes) for file, (_, label) in zip(files, tables, strict=True)])
    chosen = subset(labels, limit)
    images = torch.empty((len(chosen), *shape), dtype=torch.uint8)
    filled = images.permute(0, 2, 3, 1).numpy()  # a view: what is decoded into it is in images
    start = place = 0
    for file, (column, label) in zip(files, tables, strict=True):
        rows = chosen[(chosen >= start) & (chosen < start + len(label))] - start
        for row, encoded in zip(rows.tolist(), column.take(rows.numpy()).to_pylist(), strict=True):
            _decode(file, row, encoded, filled[place])
            place += 1
        start += len(label)
    return images, labels[chosen]


def _table(file: Path, columns: Columns) -> tuple:
    """The bytes of the images and the labels of a file, as columns."""
    pyarrow, parquet = require("pyarrow"), require("pyarrow.parquet")
    try:
        schema = parquet.read_schema(file)
        found = []
        for accepted in columns:
            name = next((name for name in accepted if name in schema.names), None)
            if name is None:
                raise DataError(f"{file} has no column {' or '.join(accepted)}: it has {', '.join(schema.names)}")
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
    return image, label


def _labels(file: Path, column, classes: int) -> Tensor:
    empty = column.is_null().to_numpy(zero_copy_only=False)
    labels = column.fill_null(0).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero(empty | (labels < 0) | (labels >= classes))
    if len(wrong):
        row = int(wrong[0])
        value = "missing" if empty[row] else labels[row]
        raise DataError(f"{file}, row {row}: the label is {value}; labels must be 0 to {classes - 1}")
    return torch.from_numpy(labels.astype(np.int64))


def _decode(file: Path, row: int, encoded: bytes | None, target: np.ndarray) -> None:
    where = f"{file}, row {row}: the image"
    if encoded is None:
        raise DataError(f"{where} is missing")
    height, width, channels = target.shape
    expected = f"{height} x {width} {'RGB' if channels == 3 else 'L'}"  # a palette's numbers would pass for greys
    with opened(io.BytesIO(encoded), where) as image:
        if (found := f"{image.height} x {image.width} {image.mode}") != expected:
            raise DataError(f"{where} is {found} (height, width, Pillow's mode); it must be {expected}")
        target[...] = np.asarray(image).reshape(target.shape)
