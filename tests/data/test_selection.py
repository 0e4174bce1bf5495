"""Which samples are used: classes first, then the part held out, then the limit."""

from __future__ import annotations

import pytest
import torch

from mimicnorm import data
from mimicnorm.data.selection import Selection, held_out
from mimicnorm.errors import DataError

LABELS = torch.tensor([c for c in range(5) for _ in range(20 + 10 * c)])[
    torch.randperm(200, generator=torch.manual_seed(0))
]


def chosen(**changes) -> set[int]:
    indices, labels, classes = Selection(**changes).choose(LABELS, 5, "five")
    assert torch.equal(indices, indices.sort().values)
    assert len(labels) == len(indices)
    assert classes == len(changes.get("classes", range(5)))
    return set(indices.tolist())


def test_validation_is_a_fraction_of_each_class_and_never_trained_on():
    assert chosen(split="test", validation=0.1) == set(range(200))
    train, validation = chosen(validation=0.1), chosen(split="validation", validation=0.1)
    assert train | validation == set(range(200))
    assert not train & validation
    assert LABELS[sorted(validation)].bincount().tolist() == [2, 3, 4, 5, 6]


def test_the_limit_is_taken_from_what_validation_leaves():
    validation = chosen(split="validation", validation=0.2)
    for limit in (1, 30, 160, 500):
        some = chosen(validation=0.2, limit=limit)
        assert len(some) == min(limit, 160)
        assert not some & validation
    assert chosen(split="validation", validation=0.2, limit=10) < validation
    assert chosen(validation=0.2, limit=30) < chosen(validation=0.2, limit=60)


def test_classes_are_renumbered_in_their_order():
    indices, labels, classes = Selection(classes=(4, 1)).choose(LABELS, 5, "five")
    assert classes == 2
    assert torch.equal(LABELS[indices], torch.tensor([4, 1])[labels])
    assert labels.bincount().tolist() == [60, 30]
    of_two = chosen(classes=(4, 1), split="validation", validation=0.1)
    assert LABELS[sorted(of_two)].bincount().tolist() == [0, 3, 0, 0, 6]


def test_a_class_is_never_held_out_whole():
    labels = torch.tensor([0, 1, 1, 2, 2, 2])
    assert labels[~held_out(labels, 0.99)].tolist() == [0, 1, 2]
    assert not held_out(labels, 0.0).any()


@pytest.mark.parametrize("name", ["digits", "folder"])
def test_training_and_validation_images_are_different_ones(name, tmp_path):
    if name == "folder":
        image = pytest.importorskip("PIL.Image")
        for c in "abc":
            folder = tmp_path / "train" / c
            folder.mkdir(parents=True)
            for i in range(6):
                image.new("RGB", (8, 8), (ord(c), 40 * i, 0)).save(folder / f"{i}.png")
        name = f"folder:{tmp_path}"
    options = {"classes": (2, 0), "validation": 1 / 3}
    train, validation = (data.load(name, split, **options) for split in ("train", "validation"))
    everything = data.load(name, classes=(2, 0))
    assert len(train) + len(validation) == len(everything)
    assert len(validation) == pytest.approx(len(everything) / 3, abs=1)
    assert train.classes == validation.classes == everything.classes == 2
    both = []
    for source in (train, validation):
        images, labels = next(source.batches([torch.arange(len(source))], seed=0, epoch=0, augment=False))
        assert set(labels.tolist()) == {0, 1}
        both.append({tuple(x) for x in images.flatten(1).tolist()})
    assert not both[0] & both[1]
    assert len({s.fingerprint() for s in (train, validation, everything, data.load(name, classes=(0, 2)))}) == 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split": "validation"}, "validation=0.1"),
        ({"validation": 1.0}, "from 0 to below 1"),
        ({"classes": (0, 10)}, "digits has classes 0 to 9"),
        ({"classes": (1, 1)}, "each once"),
        ({"split": "validation", "validation": 1e-4}, "no sample of digits is left in split 'validation'"),
    ],
)
def test_mistakes_are_named(changes, says):
    with pytest.raises(DataError, match=says):
        data.load("digits", **changes)
