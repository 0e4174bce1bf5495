"""Data sets by name: where files are found, what is said where they are not, subsets, the real sets where they are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import parquet_files
import pytest
import torch

from mimicnorm import data
from mimicnorm.errors import DataError, NameNotFoundError

REAL = Path(os.environ.get("MIMICNORM_DATA") or Path(__file__).parents[3] / "shared" / "data")


@pytest.fixture(autouse=True)
def _no_folder_from_outside(monkeypatch):
    monkeypatch.delenv("MIMICNORM_DATA", raising=False)


def test_digits_are_split_once_and_for_all():
    train, test = data.load("digits"), data.load("digits", "test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.shape == (1, 8, 8)
    assert train.input == "cifar"
    assert test.labels.bincount().min() >= 35
    everything = torch.cat([train.images, test.images]).flatten(1).double()
    assert len(everything.unique(dim=0)) == 1797  # no image is in both
    images, labels = next(train.batches([torch.arange(len(train))], seed=0, epoch=0, augment=False))
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert images.mean().item() == pytest.approx(0, abs=0.02)
    assert images.std().item() == pytest.approx(1, abs=0.02)


def test_subsets_are_even_over_classes_and_grow():
    some, more = data.load("digits", limit=100), data.load("digits", limit=250)
    assert some.labels.bincount().tolist() == [10] * 10
    rows = {tuple(x) for x in more.images.flatten(1).tolist()}
    assert all(tuple(x) in rows for x in some.images.flatten(1).tolist())
    assert len(data.load("digits", limit=10**6)) == 1438
    for limit in (0, 2.5, True):
        with pytest.raises(DataError, match=f"at least 1, not {limit}"):
            data.load("digits", limit=limit)


@pytest.mark.parametrize("where", ["", "cifar10", "cifar10/plain_text", "plain_text"])
@pytest.mark.parametrize("by_environment", [True, False])
def test_local_files_are_found(tmp_path, monkeypatch, where, by_environment):
    folder = tmp_path / where
    pictures = parquet_files.pictures(5)
    parquet_files.write(folder / "train-00000-of-00002.parquet", pictures[:3], [0, 1, 2], label="label")
    parquet_files.write(folder / "train-00001-of-00002.parquet", pictures[3:], [9, 4], label="label")
    if by_environment:
        monkeypatch.setenv("MIMICNORM_DATA", str(tmp_path))
    source = data.load("cifar10", data_dir=None if by_environment else tmp_path)
    assert source.labels.tolist() == [0, 1, 2, 9, 4]
    for image, pixels in zip(source.images, pictures, strict=True):
        assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"no test\*\.parquet of cifar10 in"):
        data.load("cifar10", "test", data_dir=tmp_path)


def test_a_missing_part_is_named(tmp_path):
    parquet_files.write(tmp_path / "train-00000-of-00002.parquet", parquet_files.pictures(1), [0])
    with pytest.raises(DataError, match=r"holds a part of cifar100: train-00001-of-00002.parquet is missing"):
        data.load("cifar100", data_dir=tmp_path)


@pytest.mark.parametrize("count", [10, 20], ids=["cifar10", "coarse"])
def test_labels_of_other_classes_are_not_cifar100(tmp_path, count):
    """CIFAR-10 has images of the same size, and its labels, in a column `label`, are all below 100."""
    labels = [i % count for i in range(40)]
    parquet_files.write(tmp_path / "cifar100" / "train.parquet", parquet_files.pictures(40), labels, label="label")
    says = rf"cifar100' does not hold cifar100: the labels in column label are of {count} classes \(0 to {count - 1}\)"
    with pytest.raises(DataError, match=rf"{says}, and cifar100 has 100, in column fine_label\. Give the files"):
        data.load("cifar100", data_dir=tmp_path)


def test_a_column_called_label_with_all_classes_is_cifar100(tmp_path):
    labels = [99 - i for i in range(100)]
    parquet_files.write(tmp_path / "train.parquet", parquet_files.pictures(100), labels, label="label")
    assert data.load("cifar100", data_dir=tmp_path, limit=50).classes == 100


def test_cifar100_is_not_cifar10(tmp_path):
    parquet_files.write(tmp_path / "train.parquet", parquet_files.pictures(3), [0, 1, 2])
    with pytest.raises(DataError, match=r"does not hold cifar10: it has no column label; .*fine_label.*own name"):
        data.load("cifar10", data_dir=tmp_path)


def grey(count: int, mean: float) -> list:
    """Images of digits by their mean alone: some pixels are white."""
    return [x * np.uint8(255) for x in np.random.default_rng(0).random((count, 28, 28)) < mean]


def test_fashion_mnist_is_not_mnist(tmp_path):
    """Columns, size, number of classes and of images are the same; the brightness is not."""
    labels = [i % 10 for i in range(300)]
    parquet_files.write(tmp_path / "train.parquet", grey(300, 0.286), labels, "image", "label")
    with pytest.raises(DataError, match=r"not hold mnist: the mean of its images is \(0\.28.* mnist is \(0\.131\)"):
        data.load("mnist", data_dir=tmp_path)
    parquet_files.write(tmp_path / "train.parquet", grey(300, 0.1307), labels, "image", "label")
    assert len(data.load("mnist", data_dir=tmp_path)) == 300


def test_imagenet_has_a_thousand_classes(tmp_path):
    for split in ("train", "val"):
        for number in range(1000):
            folder = tmp_path / split / f"n{number:08d}"
            folder.mkdir(parents=True)
            (folder / "a.JPEG").touch()
    assert data.load("imagenet", data_dir=tmp_path).classes == 1000
    for split in ("train", "val"):
        (tmp_path / split / "n00000001" / "a.JPEG").unlink()
        (tmp_path / split / "n00000001").rmdir()
    with pytest.raises(DataError, match=rf"999 class folders, and imagenet has 1000\. Load .* as folder:{tmp_path}"):
        data.load("imagenet", data_dir=tmp_path)
    assert data.load(f"folder:{tmp_path}").classes == 999


def test_the_hub_is_asked_where_no_folder_is_given(tmp_path, monkeypatch):
    import huggingface_hub

    file = parquet_files.write(tmp_path / "t.parquet", parquet_files.pictures(2, (28, 28)), [3, 7], "image", "label")
    asked = []

    def download(repository, name, repo_type):
        asked.append((repository, name, repo_type))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert data.load("mnist", "test").labels.tolist() == [3, 7]
    assert asked == [("ylecun/mnist", "mnist/test-00000-of-00001.parquet", "dataset")]

    def offline(*_, **__):
        raise ConnectionError("no route\nsecond line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(DataError, match=r"cannot be fetched from the hub .*no route\)\. Give a folder") as caught:
        data.load("cifar100")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [("sklearn", "digits", "sklearn"), ("pyarrow", "cifar10", "pyarrow"), ("huggingface_hub", "mnist", "hugg")],
)
def test_a_missing_package_is_said_with_the_extra(module, name, package, tmp_path, monkeypatch):
    parquet_files.write(tmp_path / "train.parquet", parquet_files.pictures(1), [0], label="label")
    for loaded in [m for m in sys.modules if m == module or m.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        DataError, match=rf"{package}.* is not installed\. Install it with: pip install 'mimicnorm\[data\]'"
    ):
        data.load(name, data_dir=None if name == "mnist" else tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "cifar1000"}, "Near ones: cifar100, cifar10"),
        ({"name": "digits", "split": "val"}, "split must be"),
        ({"name": "digits", "augment": "much"}, "augment must be"),
        ({"name": "cifar10", "data_dir": "/nowhere/at/all"}, "'/nowhere/at/all' does not exist"),
        ({"name": "cifar10", "data_dir": __file__}, "test_catalogue.py' is a file"),
        ({"name": "imagenet"}, "is read from a folder"),
        ({"name": "folder:/nowhere"}, "'/nowhere' does not exist"),
    ],
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises((DataError, NameNotFoundError), match=says):
        data.load(**arguments)
    assert "digits" in data.names()


@pytest.mark.parametrize(("name", "sizes"), [("mnist", (60000, 10000)), ("cifar100", (50000, 10000))])
def test_the_real_sets(name, sizes):
    if not (REAL / name).is_dir():
        pytest.skip(f"no {name} in {REAL}: set MIMICNORM_DATA to a folder of its Parquet files")
    source = data.load(name, "test", data_dir=REAL, limit=2000)
    assert source.labels.bincount(minlength=source.classes).tolist() == [2000 // source.classes] * source.classes
    images, _ = next(source.batches([torch.arange(2000)], seed=0, epoch=0, augment=False))
    assert images.mean().item() == pytest.approx(0, abs=0.05)
    assert images.std().item() == pytest.approx(1, abs=0.05)
    import pyarrow.parquet as pq

    counts = [pq.read_metadata(REAL / name / f"{s}-00000-of-00001.parquet").num_rows for s in ("train", "test")]
    assert tuple(counts) == sizes
