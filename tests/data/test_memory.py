"""Augmentation in memory: the same for any split of the work, and what the plain loop would do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from mimicnorm.data import Memory, Source
from mimicnorm.data.memory import crop_and_flip


def source(augment="standard", count=40, side=9, pad=3, flip=True) -> Memory:
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 2, side, side + 2), dtype=torch.uint8, generator=g)
    numbers = (0.4, 0.5), (0.2, 0.3)
    return Memory(
        *("x", 10, (2, side, side + 2), "cifar", augment, *numbers, images, torch.arange(count) % 10, pad, flip)
    )


def images_of(s, indices, seed=1, epoch=2, augment=True):
    return torch.cat([x for x, _ in s.batches(indices, seed=seed, epoch=epoch, augment=augment)])


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(40)), size=st.integers(1, 40), ranks=st.integers(1, 4))
def test_an_image_depends_on_seed_epoch_and_index_alone(order, size, ranks):
    s = source()
    whole = images_of(s, [torch.arange(40)])
    order = torch.tensor(order)
    for rank in range(ranks):
        mine = order[rank::ranks]
        assert torch.equal(images_of(s, mine.split(size)), whole[mine])


def test_seed_and_epoch_change_the_images():
    s, everything = source(), [torch.arange(40)]
    drawn = [images_of(s, everything, seed, epoch) for seed, epoch in ((1, 2), (2, 1), (1, 3), (-1, 2))]
    for i, one in enumerate(drawn):
        assert all((one != other).flatten(1).any(1).sum() > 30 for other in drawn[:i])


def test_labels_belong_to_their_images():
    (_, labels), (_, more) = source().batches(
        [torch.tensor([3, 12]), torch.tensor([39])], seed=0, epoch=0, augment=True
    )
    assert labels.tolist() == [3, 2]
    assert more.tolist() == [9]


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 4])
def test_it_is_what_a_plain_loop_does(pad, flip):
    images = torch.randint(0, 256, (50, 3, 8, 6), dtype=torch.uint8)
    draws = torch.rand(50, 3, dtype=torch.float64)
    got = crop_and_flip(images, draws, pad=pad, flip=flip)
    for image, (a, b, c), result in zip(images, draws.tolist(), got, strict=True):
        padded = F.pad(image, (pad,) * 4)
        if flip and c < 0.5:
            padded = padded.flip(2)
        y, x = int(a * (2 * pad + 1)), int(b * (2 * pad + 1))
        assert torch.equal(result, padded[:, y : y + 8, x : x + 6])


def test_every_shift_and_both_directions_come_up_equally_often():
    count, pad = 40_000, 4
    marked = torch.zeros(count, 1, 2 * pad + 1, 2 * pad + 1, dtype=torch.uint8)
    marked[:, :, pad, pad] = 1
    s = Memory(
        "x", 1, (1, 9, 9), "cifar", "standard", (0.0,), (1 / 255,), marked, torch.zeros(count).long(), pad, False
    )
    where = images_of(s, [torch.arange(count)]).sum(0)[0]
    expected = count / 81
    assert ((where - expected) ** 2 / expected).sum() < 140  # chi-squared with 80 degrees of freedom: p = 4e-5


@pytest.mark.parametrize(("augment", "asked"), [("none", True), ("standard", False)])
def test_nothing_is_random_where_not_asked_for(augment, asked):
    s = source(augment)
    got = images_of(s, [torch.arange(40)], augment=asked)
    mean, std = (torch.tensor(v).view(2, 1, 1) for v in (s.mean, s.std))
    torch.testing.assert_close(got, (s.images / 255 - mean) / std, rtol=1e-5, atol=1e-5)


def test_light_only_mirrors():
    s = source("light")
    plain, light = images_of(s, [torch.arange(40)], augment=False), images_of(s, [torch.arange(40)])
    same = (plain == light).flatten(1).all(1)
    mirrored = (plain.flip(3) == light).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 5 < same.sum() < 35


def test_a_fingerprint_is_of_every_image_and_label():
    before = source().fingerprint()
    assert source().fingerprint() == before
    pixel, label, scale = source(), source(), source()
    pixel.images[17, 1, 4, 4] ^= 1
    label.labels[17] ^= 1
    scale.std = (0.2, 0.31)
    assert len({before, *(s.fingerprint() for s in (pixel, label, scale))}) == 4


def test_the_data_is_copied_to_a_device_once():
    s = source()
    images = s.images
    for device in ("meta", "cpu", "meta"):  # training, a look at some images, training
        (x, y), *_ = s.batches([torch.arange(4)], seed=0, epoch=0, augment=True, device=device)
        assert (x.device.type, y.device.type) == (device, device)
        copy = s._on(torch.device("meta"))
        assert s._on(torch.device("meta")) is copy
        assert s.images is images


class Own(Source):
    """A data set of a user's, which says nothing about itself but its batches."""

    inner = source()

    def __len__(self):
        return len(self.inner)

    def batches(self, indices, **how):
        return self.inner.batches(indices, **how)


def test_data_sets_of_ones_own_have_a_fingerprint(monkeypatch):
    own = Own("own", 10, (2, 9, 11), "cifar", "none", (0.4, 0.5), (0.2, 0.3))
    before = own.fingerprint()
    assert own.fingerprint() == before
    other = source()
    other.images ^= 1
    monkeypatch.setattr(Own, "inner", other)
    assert own.fingerprint() != before
