"""Data sets by name: where files are found, what is refused, subsets, the real sets where they are."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import parquet_files
import pyarrow.parquet as pq
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
    assert (train.shape, train.input) == ((1, 8, 8), "cifar")
    assert test.labels.bincount().min() >= 35
    everything = torch.cat([train.images, test.images]).flatten(1).double()
    assert len(everything.unique(dim=0)) == 1797  # no image is in both
    assert train.fingerprint() == "1ef4c48382d03eaf2e3f8ecaa7068273"  # else no run could be resumed


@pytest.mark.parametrize(
    ("name", "sizes"), [("mnist", (60000, 10000)), ("cifar100", (50000, 10000)), ("cifar100-coarse", (50000, 10000))]
)
def test_the_real_sets(name, sizes):
    folder = name.removesuffix("-coarse")
    if not (REAL / folder).is_dir():
        pytest.skip(f"no {name} in {REAL}: set MIMICNORM_DATA to a folder of its Parquet files")
    source = data.load(name, "test", data_dir=REAL, limit=2000)
    assert source.labels.bincount(minlength=source.classes).tolist() == [2000 // source.classes] * source.classes
    images, _ = next(source.plain_batches(2000))
    assert images.mean().item() == pytest.approx(0, abs=0.05)
    assert images.std().item() == pytest.approx(1, abs=0.1)
    counts = [pq.read_metadata(REAL / folder / f"{s}-00000-of-00001.parquet").num_rows for s in ("train", "test")]
    assert tuple(counts) == sizes


@pytest.mark.parametrize(
    ("where", "by_environment"), [("", True), ("cifar10", False), ("cifar10/plain_text", False), ("plain_text", False)]
)
def test_local_files_are_found(tmp_path, monkeypatch, where, by_environment):
    folder = tmp_path / where
    pictures = parquet_files.pictures(5)
    parquet_files.write(folder / "train-00000-of-00002.parquet", pictures[:3], [0, 1, 2], label="label")
    parquet_files.write(folder / "train-00001-of-00002.parquet", pictures[3:], [9, 4], label="label")
    os.mkfifo(folder / "test.parquet")  # not a file: reading it would wait for a writer
    if by_environment:
        monkeypatch.setenv("MIMICNORM_DATA", str(tmp_path))
    source = data.load("cifar10", data_dir=None if by_environment else tmp_path)
    assert source.labels.tolist() == [0, 1, 2, 9, 4]
    for image, pixels in zip(source.images, pictures, strict=True):
        assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"no test\*\.parquet of cifar10 in"):
        data.load("cifar10", "test", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "images", "labels", "columns", "says"),
    [
        ("cifar100", parquet_files.pictures(40), [i % 10 for i in range(40)], ("img", "label"),
         r"the labels in column label are of 10 classes \(0 to 9\), and cifar100 has 100, in column fine_label\. Give"),
        ("cifar10", parquet_files.pictures(3), [0, 1, 2], ("img", "fine_label"),
         r"it has no column label; .*fine_label.*own name"),
        ("mnist", parquet_files.bright(300, (28, 28), 0.286), [i % 10 for i in range(300)], ("image", "label"),
         r"the mean of its images is \(0\.28.* mnist is \(0\.131\)"),
    ],
    ids=["cifar10-as-cifar100", "cifar100-as-cifar10", "fashion-mnist-as-mnist"],
)  # fmt: skip
def test_other_data_under_a_name_is_refused(tmp_path, name, images, labels, columns, says):
    parquet_files.write(tmp_path / "train.parquet", images, labels, *columns)
    with pytest.raises(DataError, match=f"does not hold {name}: {says}"):
        data.load(name, data_dir=tmp_path)


def test_a_column_called_label_with_all_classes_is_cifar100(tmp_path):
    labels = [99 - i for i in range(100)]
    parquet_files.write(tmp_path / "train.parquet", parquet_files.pictures(100), labels, label="label")
    assert data.load("cifar100", data_dir=tmp_path, limit=50).classes == 100


def test_the_coarse_labels_of_cifar100_are_a_set_of_their_own(tmp_path):
    """They are read from the same files, in a folder of either name."""
    for folder in ("cifar100", "cifar100-coarse"):
        parquet_files.write(tmp_path / folder / "train.parquet", parquet_files.pictures(3), [5, 6, 7])
        coarse = data.load("cifar100-coarse", data_dir=tmp_path)
        assert (coarse.classes, coarse.labels.tolist()) == (20, [0, 0, 0])
    assert data.load("cifar100", data_dir=tmp_path).labels.tolist() == [5, 6, 7]
    parquet_files.write(tmp_path / "10" / "train.parquet", parquet_files.pictures(2), [0, 1], label="coarse")
    fine_only = pq.read_table(tmp_path / "10" / "train.parquet").drop_columns(["coarse_label"])
    pq.write_table(fine_only, tmp_path / "10" / "train.parquet")
    with pytest.raises(DataError, match=r"does not hold cifar100-coarse: it has no column coarse_label"):
        data.load("cifar100-coarse", data_dir=tmp_path / "10")


def test_a_class_that_is_darker_than_the_others_is_not_taken_for_other_data(tmp_path):
    """And other data is still refused where some classes are chosen."""
    labels = [i % 10 for i in range(1000)]
    pictures = parquet_files.bright(1000, (28, 28), 0.1307)
    pictures = [pixels if label else 0 * pixels for pixels, label in zip(pictures, labels, strict=True)]
    parquet_files.write(tmp_path / "good" / "train-00000-of-00001.parquet", pictures, labels, "image", "label")
    assert len(data.load("mnist", data_dir=tmp_path / "good", classes=range(1))) == 100
    other = parquet_files.bright(1000, (28, 28), 0.286)
    parquet_files.write(tmp_path / "other" / "train.parquet", other, labels, "image", "label")
    with pytest.raises(DataError, match="does not hold mnist: the mean"):
        data.load("mnist", data_dir=tmp_path / "other", classes=[0, 1])


def test_a_missing_part_is_named(tmp_path):
    parquet_files.write(tmp_path / "train-00000-of-00002.parquet", parquet_files.pictures(1), [0])
    with pytest.raises(DataError, match=r"holds a part of cifar100: train-00001-of-00002.parquet is missing"):
        data.load("cifar100", data_dir=tmp_path)


def test_imagenet_has_a_thousand_classes(tmp_path):
    for number in range(1000):
        folder = tmp_path / "train" / f"n{number:08d}"
        folder.mkdir(parents=True)
        (folder / "a.JPEG").touch()
    assert data.load("imagenet", data_dir=tmp_path).classes == 1000
    (folder / "a.JPEG").unlink()
    folder.rmdir()
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
def test_a_missing_package_is_named_with_the_extra(module, name, package, tmp_path, monkeypatch):
    parquet_files.write(tmp_path / "train.parquet", parquet_files.pictures(1), [0], label="label")
    for loaded in [m for m in sys.modules if m == module or m.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        DataError, match=rf"{package}.* is not installed\. Install it with: pip install 'mimicnorm\[data\]'"
    ):
        data.load(name, data_dir=None if name == "mnist" else tmp_path)


def test_readers_that_execute_code_from_files_are_not_accepted():
    """CVE-2023-47248 (pyarrow before 14.0.1), CVE-2023-50447 and CVE-2024-28219 (pillow before 10.3)."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {"pyarrow>=14.0.1", "pillow>=10.3"} <= set(project["optional-dependencies"]["data"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"name": "cifar1000"}, "Did you mean cifar100, cifar10"),
        ({"name": "digits", "split": "val"}, "split must be"),
        ({"name": "digits", "augment": "much"}, "augment must be"),
        ({"name": "cifar10", "data_dir": "/nowhere/at/all"}, "'/nowhere/at/all' does not exist"),
        ({"name": "cifar10", "data_dir": __file__}, "test_catalogue.py' is a file"),
        ({"name": "imagenet"}, "is read from a folder"),
        ({"name": "folder:/nowhere"}, "'/nowhere' does not exist"),
        *(({"name": "digits", "limit": limit}, f"limit={limit}: use a whole number") for limit in (0, 2.5, True)),
    ],
)
def test_mistakes_are_named(arguments, says):
    with pytest.raises((DataError, NameNotFoundError), match=says):
        data.load(**arguments)
    assert "digits" in data.names()
