"""Cutting and joining."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch import backward
from mimicnorm.microbatch.batches import collect, join, join_targets, mix, split


@dataclass
class Record:
    boxes: torch.Tensor


@given(n=st.integers(1, 40), micro_batch=st.integers(1, 50))
def test_split_and_join_are_inverse(n, micro_batch):
    x, y = torch.arange(3 * n).reshape(n, 3), torch.arange(n)
    pieces = split({"x": x, "flag": True}, {"y": (y, 0.5)}, micro_batch)
    assert all(p.size == micro_batch for p in pieces[:-1])
    assert 1 <= pieces[-1].size <= micro_batch
    assert [p.first for p in pieces] == list(range(0, n, micro_batch))
    assert all(p.kwargs["flag"] is True and p.args == () for p in pieces)
    assert torch.equal(join([p.kwargs["x"] for p in pieces], [p.size for p in pieces]), x)
    joined = join_targets(pieces)
    assert torch.equal(joined["y"][0], y)
    assert joined["y"][1] == 0.5


@pytest.mark.parametrize("micro_batch", [0, -1, 2.0, True, "4"])
def test_micro_batch_must_count(micro_batch):
    with pytest.raises(MicroBatchError, match="micro_batch="):
        split(torch.zeros(4, 2), torch.zeros(4), micro_batch)


@pytest.mark.parametrize(
    "inputs", [(torch.zeros(4, 2), torch.zeros(5, 2)), torch.zeros(0, 3), torch.tensor(1.0), {"a": 1}, ()]
)
def test_the_number_of_samples_must_be_clear(inputs):
    with pytest.raises(MicroBatchError, match="number of samples is not clear"):
        split(inputs, None, 2)


def test_collect_reads_a_loader_once():
    reads = iter([((torch.zeros(2, 3), 1), torch.zeros(2)), ([torch.zeros(3, 3), 1], torch.ones(3))])
    pieces = collect(reads)
    assert [(p.first, p.size) for p in pieces] == [(0, 2), (2, 3)]
    assert pieces[1].args[1] == 1
    assert join_targets(pieces).tolist() == [0, 0, 1, 1, 1]
    assert str(pieces[1]) == "micro-batch 1 (samples 2 to 4)"


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (torch.zeros(4, 2), "Give micro_batch="),
        ({"x": torch.zeros(4, 2)}, "Give micro_batch="),
        (3, "Give micro_batch="),
        (iter([]), "no micro-batch"),
        ([torch.zeros(2, 2)], "item 0 is a Tensor"),
        ([(torch.zeros(2, 2),) * 3], "item 0 is a tuple of 3"),
    ],
)
def test_collect_says_what_a_loader_must_yield(loader, message):
    with pytest.raises(MicroBatchError, match=message):
        collect(loader)


@pytest.mark.parametrize("through_numpy", [False, True])
def test_a_loader_that_uses_its_buffers_again(through_numpy):
    def reads():
        x, y = np.zeros((2, 3)), np.zeros(2)
        buffers = torch.from_numpy(x), torch.from_numpy(y)
        for i in range(2):
            if through_numpy:
                x += i  # unseen by torch
            else:
                buffers[0].fill_(i)
            yield tuple(b[:2] for b in buffers)

    with pytest.raises(MicroBatchError, match="uses the memory of one micro-batch again"):
        collect(reads())


def test_numpy_arrays_are_cut_and_joined():
    x, y = torch.zeros(5, 2), np.arange(5.0)
    pieces = split((x, y), {"y": y}, 2)
    assert [p.args[1].tolist() for p in pieces] == [[0, 1], [2, 3], [4]]
    assert join_targets(pieces)["y"].tolist() == y.tolist()
    with pytest.raises(MicroBatchError, match=r"5 samples.*\(4,\)"):
        split(x, y[:4], 2)


BOXES = [{"boxes": torch.zeros(n, 4), "labels": torch.zeros(n)} for n in (1, 3, 5, 5, 2)]


@pytest.mark.parametrize(
    "values", [[0, 1, 2, 3, 4], ("a",) * 5, [torch.tensor(i) for i in range(5)], [*np.arange(5)], [np.array(1.0)] * 5]
)
def test_lists_of_one_value_per_sample(values):
    for inputs, targets in ((torch.zeros(5, 2), {"y": values}), ((torch.zeros(5, 2), values), None)):
        with pytest.raises(MicroBatchError, match="tensor or a NumPy array"):
            split(inputs, targets, 2)


@pytest.mark.parametrize(
    "items",
    [
        [(0, 1)] * 5,
        tuple([i, torch.tensor(i)] for i in range(5)),
        BOXES,
        tuple(BOXES),
        BOXES[2:3] * 5,  # five boxes in each of five: they do not count the samples
        [tuple(b.values()) for b in BOXES],
        [b["boxes"] for b in BOXES],
        [object()] * 5,
    ],
)
def test_lists_of_one_item_per_sample(items):
    x = torch.zeros(5, 2)
    with pytest.raises(MicroBatchError, match=r"list of 5 items \(.*torch.arange\(5\), and look the items up"):
        split(x, {"y": items}, 2)
    with pytest.raises(MicroBatchError, match=r"list of 5 items \(.*let a loader yield the micro-batches|not clear"):
        split((x, items), None, 2)
    with pytest.raises(MicroBatchError, match=r"list of 5 items \(.*look the items up"):
        join_targets(collect([(x, items)]))


def test_lists_that_belong_to_all_samples():
    y = torch.arange(2)
    pieces = split({"x": torch.zeros(2, 2), "cache": [None, None]}, ([y, y], (y, 0.3), [0.1, 0.2, 0.7]), 1)
    assert [p.targets[0][1].tolist() for p in pieces] == [[0], [1]]
    assert pieces[0].kwargs["cache"] == [None, None]
    assert pieces[0].targets[2] == [0.1, 0.2, 0.7]


@pytest.mark.parametrize("looked_up", [False, True])
def test_items_of_any_kind_for_each_sample_have_their_ways(looked_up):
    def loss_fn(out: torch.Tensor, items: list) -> torch.Tensor:
        return torch.stack([(o * i["scale"].sum()).sum() for o, i in zip(out, items, strict=True)]).mean()

    net, x = torch.nn.Linear(3, 2), torch.randn(5, 3)
    items = [{"scale": torch.rand(n)} for n in (1, 3, 2, 2, 4)]
    loss_fn(net(x), items).backward()
    expected, net.weight.grad = net.weight.grad, None
    if looked_up:
        backward(net, lambda out, i: loss_fn(out, [items[j] for j in i]), x, torch.arange(5), micro_batch=2)
    else:
        backward(net, loss_fn, [(x[:2], items[:2]), (x[2:4], items[2:4]), (x[4:], items[4:])])
    torch.testing.assert_close(net.weight.grad, expected)


def test_a_missing_micro_batch():
    x, y = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    for inputs in (x, [(x, y)]):
        with pytest.raises(MicroBatchError, match=r"micro_batch= is missing.*micro_batch=8\)"):
            backward(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, inputs, y)


def test_a_pair_that_all_micro_batches_share_may_be_as_long_as_one_of_them():
    x, y = torch.randn(6, 3), torch.arange(6)
    pieces = collect([(x[:4], {"y": y[:4], "size": (8, 8)}), (x[4:], {"y": y[4:], "size": (8, 8)})])
    assert join_targets(pieces)["size"] == (8, 8)
    with pytest.raises(MicroBatchError, match="a list of 2 values for 2 samples"):
        join_targets(collect([(x[:2], (8, 8)), (x[2:4], (8, 8))]))


@pytest.mark.parametrize(("size", "wanted"), [(1, 3), (2, 1), (4, 7)])
def test_mixed_outputs_differ_and_stay_where_samples_may_be(size, wanted):
    whole = torch.tensor(3.0)
    outputs = {"p": torch.rand(size, 5).softmax(1), "i": torch.arange(size), "boxes": [{"n": i} for i in range(size)]}
    made = mix({**outputs, "whole": whole}, size, wanted)
    assert made["p"].shape == (wanted, 5)
    assert bool(((made["p"] > 0) & (made["p"] < 1)).all())
    assert len(set(made["p"][:, 0].tolist())) == wanted
    assert len(made["i"]) == len(made["boxes"]) == wanted
    assert made["whole"] is whole
    assert torch.equal(mix(outputs, size, wanted)["p"], made["p"]), "always the same"


def test_join_of_any_structure():
    joined = join([{"x": torch.zeros(2, 1), "l": ["a", "b"]}, {"l": ["c"], "x": torch.ones(1, 1)}], [2, 1])
    assert joined["x"].flatten().tolist() == [0, 0, 1]
    assert joined["l"] == ["a", "b", "c"]
    records = [Record(torch.zeros(3, 4)) for _ in range(3)]  # three boxes, by chance as many as samples
    assert len(join([records, records], [3, 3])) == 6
    weight = torch.ones(5)  # belongs to all samples
    assert join([(weight, 0.3), (weight.clone(), 0.3)], [2, 1])[0] is weight
    x = torch.zeros(2, 1)
    for parts, message in (
        ((x, x[:, :0]), "different shapes"),
        (((x, 0.3), (x, 0.4)), "one value per sample"),
        ((x, (x, x)), "the targets must have the same structure"),
    ):
        with pytest.raises(MicroBatchError, match=message):
            join([*parts], [2, 2])
