"""Broken files: each an error with file and row, nothing skipped."""

from __future__ import annotations

import io

import numpy as np
import parquet_files
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mimicnorm import data
from mimicnorm.errors import DataError

GOOD = parquet_files.pictures(3)


def load(folder, **settings):
    return data.load("cifar100", data_dir=folder, **settings)


def fails(folder, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        load(folder)
    assert str(folder / "train.parquet") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (b"no image at all", r"row 1: the image does not decode \(not a format that Pillow knows\)"),
        (parquet_files.encoded(GOOD[0])[:900], "row 1: the image does not decode"),
        (None, "row 1: the image is missing"),
        (parquet_files.pictures(1, (32, 31, 3))[0], r"row 1: the image is 32 x 31 RGB .*cifar100 must be 32 x 32 RGB"),
        (parquet_files.pictures(1, (32, 32, 4))[0], "row 1: the image is 32 x 32 RGBA "),
    ],
)
def test_an_image_that_is_wrong(tmp_path, cell, says):
    parquet_files.write(tmp_path / "train.parquet", [GOOD[0], cell, GOOD[2]], [0, 1, 2])
    fails(tmp_path, says)


def test_the_row_is_that_of_the_file_that_holds_it(tmp_path):
    parquet_files.write(tmp_path / "train-0.parquet", GOOD, [0, 1, 2])
    second = parquet_files.write(tmp_path / "train-1.parquet", [GOOD[0], b"?"], [0, 1])
    with pytest.raises(DataError, match=f"{second}, row 1: "):
        load(tmp_path)


def test_a_palette_does_not_pass_for_grey(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(parquet_files.pictures(1, (28, 28))[0]).convert("P").save(buffer, "PNG")
    parquet_files.write(tmp_path / "train.parquet", [buffer.getvalue()], [0], "image", "label")
    with pytest.raises(DataError, match=r"row 0: the image is 28 x 28 P .*mnist must be 28 x 28 L"):
        data.load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ([0, 99, 100], "row 2: the label is 100"),
        ([0, 99, None], "row 2: the label is missing"),
        (pa.array([0, 2**64 - 1, None], pa.uint64()), "row 1: the label is 18446744073709551615"),
    ],
)
def test_a_label_out_of_range(tmp_path, labels, says):
    parquet_files.write(tmp_path / "train.parquet", GOOD, labels)
    fails(tmp_path, says)


def test_wrong_columns_and_an_empty_file(tmp_path):
    parquet_files.write(tmp_path / "train.parquet", GOOD, [0, 1, 2], image="picture")
    fails(tmp_path, "has no column img or image; its columns are picture, fine_label, coarse_label")
    parquet_files.write(tmp_path / "train.parquet", GOOD, [0, 1, 2], label="class")
    fails(tmp_path, "has no column fine_label or label")
    parquet_files.write(tmp_path / "train.parquet", GOOD, ["0", "1", "2"])
    fails(tmp_path, "fine_label must hold integers, not string")
    pq.write_table(pa.table({"img": [1.0], "fine_label": [1]}), tmp_path / "train.parquet")
    fails(tmp_path, "img must hold encoded images")
    parquet_files.write(tmp_path / "train.parquet", [], pa.array([], pa.int64()))
    fails(tmp_path, "has no rows")


def test_files_that_are_no_parquet(tmp_path):
    whole = parquet_files.write(tmp_path / "train.parquet", GOOD, [0, 1, 2]).read_bytes()
    for content in (b"", b"something else", whole[: len(whole) // 2], whole[:-9]):
        (tmp_path / "train.parquet").write_bytes(content)
        fails(tmp_path, "cannot be read as Parquet")
    damaged = bytearray(whole)
    damaged[40:400] = bytes(360)
    (tmp_path / "train.parquet").write_bytes(damaged)
    fails(tmp_path, "cannot be read as Parquet|does not decode|the label is")


def test_plain_bytes_other_names_and_other_formats_are_read(tmp_path):
    cells = [parquet_files.encoded(GOOD[0]), parquet_files.encoded(GOOD[1], "JPEG")]
    pq.write_table(pa.table({"image": cells, "fine_label": pa.array([5, 6], pa.int8())}), tmp_path / "train.parquet")
    source = load(tmp_path)
    assert source.labels.tolist() == [5, 6]
    assert np.array_equal(source.images[0].permute(1, 2, 0).numpy(), GOOD[0])


def test_only_what_a_limit_takes_is_decoded(tmp_path):
    pictures = parquet_files.pictures(40)
    parquet_files.write(tmp_path / "train.parquet", pictures, [i % 4 for i in range(40)])
    some = load(tmp_path, limit=8)
    assert some.labels.bincount().tolist() == [2] * 4
    held = {p.transpose(2, 0, 1).tobytes(): i % 4 for i, p in enumerate(pictures)}
    assert [held[x.numpy().tobytes()] for x in some.images] == some.labels.tolist()
