"""Folders of images: the crops, the errors, the workers, the same images for any number of them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
import torch
import zoo
from PIL import Image

from mimicnorm import data
from mimicnorm.data import folder
from mimicnorm.errors import DataError


@pytest.fixture
def tree(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 3), ("val", 1)):
        for name in ("ant", "bee"):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for i in range(count):
                small = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
                Image.fromarray(small).resize((70 + 9 * i, 60)).save(place / f"{i}.JPEG")
    return tmp_path


def batch(source, indices, workers=0, epoch=0, augment=True):
    source.workers = workers
    return torch.cat([x for x, _ in source.batches(indices, seed=3, epoch=epoch, augment=augment)])


def test_splits_classes_and_shapes(tree):
    train, test = data.load(f"folder:{tree}"), data.load(f"folder:{tree}", "test")
    assert (len(train), len(test), train.classes, train.shape, train.input) == (6, 2, 2, (3, 224, 224), "imagenet")
    images, labels = next(test.batches([torch.tensor([1, 0])], seed=0, epoch=0, augment=False))
    assert images.shape == (2, 3, 224, 224)
    assert labels.tolist() == [1, 0]
    assert data.load(f"folder:{tree}", limit=4).labels.tolist() == [0, 0, 1, 1]


def test_a_fingerprint_is_of_names_labels_and_bytes_wherever_the_folder_is(tree, tmp_path_factory):
    before = data.load(f"folder:{tree}").fingerprint()
    moved = tmp_path_factory.mktemp("elsewhere") / "copy"
    shutil.copytree(tree, moved)
    assert data.load(f"folder:{moved}").fingerprint() == before
    assert data.load(f"folder:{moved}", limit=4).fingerprint() != before
    image = moved / "train" / "bee" / "1.JPEG"
    Image.new("RGB", (30, 30)).save(image)  # another picture under the same name
    assert data.load(f"folder:{moved}").fingerprint() != before
    shutil.copy(tree / "train" / "bee" / "1.JPEG", image)
    assert data.load(f"folder:{moved}").fingerprint() == before
    image.rename(moved / "train" / "bee" / "1.jpg")
    assert data.load(f"folder:{moved}").fingerprint() != before


def test_paths_are_one_array_which_workers_share(tree):
    for name in ("ä ö.png", "\udcff.png", "x" * 200 + ".png"):
        Image.new("RGB", (30, 30)).save(tree / "val" / "bee" / name)
    source = data.load(f"folder:{tree}", "test")
    assert source.names.dtype.kind == "S"
    assert len(batch(source, [torch.arange(5)], workers=1)) == 5


def test_images_depend_on_seed_epoch_and_index_alone(tree):
    source = data.load(f"folder:{tree}")
    whole, other = batch(source, [torch.arange(6)]), batch(source, [torch.arange(6)], epoch=1)
    assert not torch.equal(whole, other)
    state = torch.get_rng_state()
    indices = [torch.tensor([4, 1]), torch.tensor([5])]
    workers = []
    for epoch, expected in enumerate((whole, other)):
        assert torch.equal(batch(source, indices, workers=2, epoch=epoch), expected[[4, 1, 5]])
        workers.append({child.pid for child in multiprocessing.active_children()})
    assert len(workers[0]) == 2
    assert workers[0] == workers[1]  # they were not started again
    first, second = (source.batches(indices, seed=3, epoch=0, augment=True) for _ in range(2))
    for (a, _), (b, _) in zip(first, second, strict=True):  # two at the same time do not disturb each other
        assert torch.equal(a, b)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True), ("cuda:1", True)])
def test_batches_for_a_gpu_are_pinned(tree, monkeypatch, device, pinned):
    settings = []

    def loader(*_, **given):
        settings.append(given)
        return torch.utils.data.DataLoader([], batch_size=None, sampler=given["sampler"])

    monkeypatch.setattr(folder, "DataLoader", loader)
    assert list(data.load(f"folder:{tree}").batches([], seed=0, epoch=0, augment=True, device=device)) == []
    assert settings[0]["pin_memory"] is pinned


def test_a_killed_worker_is_an_error_with_a_remedy(tree, monkeypatch):
    def killed(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(folder._Decoder, "__getitem__", killed)
    handler = signal.getsignal(signal.SIGCHLD)
    with pytest.raises(DataError, match=r"decodes images was killed \(DataLoader worker .*\), usually .*free memory"):
        batch(data.load(f"folder:{tree}"), [torch.arange(2)], workers=1)
    assert signal.getsignal(signal.SIGCHLD) is handler  # torch's raises anywhere in the program


def test_validation_is_resize_and_centre_crop(tree):
    transforms = zoo.torchvision().transforms
    theirs = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.PILToTensor()])
    source = data.load(f"folder:{tree}", "test")
    images = batch(source, [torch.arange(2)], augment=False)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (source.mean, source.std))
    for index, image in enumerate(images):
        expected = theirs(Image.open(source.root / source.names[index].decode())).float()
        assert ((image * std + mean) * 255 - expected).abs().mean() < 1.0  # of 255: one resampling, not two roundings


def test_crops_are_distributed_as_torchvisions():
    g = torch.Generator().manual_seed(0)
    areas = []
    for drawn in torch.rand(3000, 41, generator=g, dtype=torch.float64).tolist():
        left, top, right, bottom = folder.random_box((500, 375), 0.08, drawn)
        assert 0 <= left < right <= 500
        assert 0 <= top < bottom <= 375
        assert 0.74 < (right - left) / (bottom - top) < 1.35
        areas.append((right - left) * (bottom - top) / (500 * 375))
    assert 0.075 < min(areas) < 0.1
    crop, image = zoo.torchvision().transforms.RandomResizedCrop, torch.empty(3, 375, 500)
    theirs = [crop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])[2:] for _ in range(3000)]
    expected = torch.tensor([h * w / (500 * 375) for h, w in theirs])
    got = torch.tensor(areas)
    for level in (0.1, 0.5, 0.9):
        assert got.quantile(level).item() == pytest.approx(expected.quantile(level).item(), abs=0.03)
    assert folder.random_box((1000, 10), 0.9, [0.5] * 41) == pytest.approx((493.33, 0, 506.67, 10), abs=0.01)
    assert folder.centre((256, 512)) == (16, 144, 240, 368)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_does_not_decode_is_named(tree, workers):
    broken = tree / "train" / "bee" / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:300])
    with pytest.raises(DataError, match=f"image 4, {broken}: it does not decode") as caught:
        batch(data.load(f"folder:{tree}"), [torch.tensor([0]), torch.tensor([4])], workers=workers)
    assert "\n" not in str(caught.value)


def test_pixels_become_rgb_or_are_refused_instead_of_turning_white(tree):
    Image.new("L", (30, 30), 128).save(tree / "val" / "ant" / "0.png")
    Image.new("RGBA", (30, 30), (255, 0, 0, 128)).save(tree / "val" / "bee" / "1.png")
    assert batch(data.load(f"folder:{tree}", "test"), [torch.arange(4)], augment=False).shape[1] == 3
    Image.fromarray(np.full((30, 30), 30000, np.uint16)).save(tree / "val" / "ant" / "0.png")
    with pytest.raises(DataError, match=r"val/ant/0.png: it has more than 8 bits per pixel \(mode I"):
        batch(data.load(f"folder:{tree}", "test"), [torch.arange(3)], augment=False)


@pytest.mark.parametrize(
    ("make", "path", "says"),
    [
        ("write_bytes", "train/notes.txt", "outside the class folders"),
        ("write_bytes", "train/ant/labels.csv", "is not an image by its ending"),
        ("fifo", "train/ant/x.png", "is not a regular file"),
        ("link", "train/ant/x.png", "is not a regular file"),
        ("mkdir", "train/ant/x.png", "is not a regular file"),
        ("mkdir", "train/cow", "is empty"),
        ("mkdir", "val/cow", "is a class that the training folder does not have"),
    ],
)
def test_what_is_out_of_place_is_named(tree, make, path, says):
    (tree / "train" / ".hidden").write_text("x")  # what systems and editors leave
    (tree / "train" / ".checkpoints").mkdir()
    source = data.load(f"folder:{tree}")
    assert (len(source), source.classes, source.labels.tolist()) == (6, 2, [0, 0, 0, 1, 1, 1])
    actions = {
        "write_bytes": lambda p: p.write_bytes(b"x"),
        "fifo": os.mkfifo,
        "link": lambda p: p.symlink_to("nowhere"),
        "mkdir": lambda p: p.mkdir(),
    }
    actions[make](tree / path)
    with pytest.raises(DataError, match=f"{path}.*{says}"):
        data.load(f"folder:{tree}", "test" if path.startswith("val") else "train")


def test_a_folder_without_splits(tree):
    with pytest.raises(DataError, match="has no folder train of class folders"):
        data.load(f"folder:{tree / 'train'}")
