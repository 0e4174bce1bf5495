"""One step: exact in parts, in every precision, with the decay, rate and order that the recipe gives."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.errors import NonFiniteError
from mimicnorm.training import network, recipe
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import Trainer, epoch_batches, learning_rate, mixed_seed

ALONE = Processes(torch.device("cpu"))


def trainer(**changes) -> Trainer:
    return tiny.trainer(**{"model": "tiny:dry", "warmup": 0.0, **changes})


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return next(tiny.SOURCES[0].batches([torch.arange(8)], seed=0, epoch=0, augment=True))


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in t.bare.parameters()])


@pytest.mark.parametrize(
    ("changes", "make"),
    [
        ({}, functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=5e-4)),
        ({"optimizer": "adamw"}, functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=5e-4)),
        (
            {"optimizer": "adamw", "momentum": 0.8, "weight_decay": 0.1},
            functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, betas=(0.8, 0.999)),
        ),
    ],
)
def test_a_step_is_that_of_the_plain_optimizer(changes, make):
    ours = trainer(**changes)
    model = copy.deepcopy(ours.bare)
    images, labels = batch()
    scale = model[-1].last_norm.logit_scale
    decayed = [p for p in model.parameters() if p is not scale]
    plain = make([{"params": decayed}, {"params": [scale], "weight_decay": 0.0}])
    for step in range(3):
        loss, correct = ours.step(images, labels, step)
        plain.zero_grad()
        logits = model(images.to(memory_format=torch.channels_last))
        expected = F.cross_entropy(logits, labels)
        expected.backward()
        plain.step()
        torch.testing.assert_close(loss, expected.detach())
        assert int(correct) == int((logits.argmax(1) == labels).sum())
    torch.testing.assert_close(weights(ours), torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_micro_batches_change_nothing(micro_batch):
    whole, parts = trainer(), trainer(micro_batch=micro_batch)
    for step in range(3):
        (a, right), (b, as_right) = (t.step(*batch(), step) for t in (whole, parts))
        torch.testing.assert_close(a, b)
        assert int(right) == int(as_right)
    torch.testing.assert_close(weights(whole), weights(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "last"), [(0.125, False), (0.25, True)])
def test_channels_last_except_where_the_backward_pass_would_crash(width, last):
    r = recipe("digits-resnet10", width=width, method="batchnorm")
    ours = Trainer(r, network(r, tiny.SOURCES[0]), ALONE, 7)
    assert (ours.format is torch.channels_last) == last
    assert ours.bare.layer1[0].conv1.weight.is_contiguous() != last


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_activations_are_rounded_by_seed_and_step_alone(micro_batch):
    images, labels = batch()

    def after(step: int, **changes) -> torch.Tensor:
        ours = trainer(model="tiny:wide", micro_batch=micro_batch, **changes)
        ours.step(images, labels, step)
        return ours.bare[3].weight.detach()

    plain, first = after(5), after(5, activation_bits=4)
    assert torch.equal(first, after(5, activation_bits=4))
    assert not torch.equal(first, after(6, activation_bits=4))
    assert not torch.equal(first, plain)
    torch.testing.assert_close(after(5, activation_bits=8), plain, rtol=0, atol=1e-3)
    assert torch.equal(after(5, activation_bits=32), plain)


def test_dropout_depends_on_seed_and_step_alone():
    one, two = trainer(model="tiny:net"), trainer(model="tiny:net")
    torch.manual_seed(1)
    first = one.step(*batch(), 5)[0]
    torch.manual_seed(2)
    assert torch.equal(first, two.step(*batch(), 5)[0])


def test_scalars_and_biases_are_decayed_only_if_asked():
    for ours, decayed_dimensions in ((trainer(), {1, 2, 4}), (trainer(decay_scalars=False), {2, 4})):
        decayed, free = ours.optimizer.param_groups
        assert (decayed["weight_decay"], free["weight_decay"]) == (5e-4, 0.0)
        assert {p.dim() for p in decayed["params"]} == decayed_dimensions
        assert any(p is ours.bare[-1].last_norm.logit_scale for p in free["params"])
        assert len(decayed["params"]) + len(free["params"]) == len(list(ours.bare.parameters()))


def test_scalars_have_the_rate_of_the_methods_authors():
    def rates(**changes) -> dict[float, set[int]]:
        r = recipe("digits-resnet10", width=0.0625, warmup=0.0, lr=0.05, **changes)
        t = Trainer(r, network(r, tiny.SOURCES[0]), ALONE, 7)
        t.step(*batch(), 0)
        return {g["lr"]: {p.numel() == 1 for p in g["params"]} for g in t.optimizer.param_groups}

    assert rates(method="fixup") == {0.05: {False}, 0.05 * 0.1: {True}}
    assert rates(method="fixup", scalar_rate=1.0) == {0.05: {False, True}}
    assert rates(method="mimicnorm", scalar_rate=0.5) == {0.05: {False}, 0.025: {True}}


@pytest.mark.parametrize(("precision", "micro_batch"), [("fp16", 0), ("fp16", 4), ("bf16", 4)])
def test_half_precision_follows_full_precision(precision, micro_batch):
    half = trainer(precision=precision, micro_batch=micro_batch)
    assert half.scaler.is_enabled() == (precision == "fp16")
    half.scaler.load_state_dict({**half.scaler.state_dict(), "scale": 256.0})  # its first scale overflows: a step lost
    full = trainer()
    for step in range(3):
        a, b = half.step(*batch(), step)[0], full.step(*batch(), step)[0]
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    torch.testing.assert_close(weights(half), weights(full), rtol=0.1, atol=0.03)


def test_a_loss_that_is_not_finite_in_micro_batches():
    broken = trainer(micro_batch=2)
    nn.init.constant_(broken.bare[9].weight, float("nan"))
    with pytest.raises(NonFiniteError, match="NaN logits"):
        broken.step(*batch(), 0)


def test_the_papers_schedule():
    r, steps = recipe("cifar100-resnet18"), 150 * 195
    rates = [learning_rate(r, epoch * 195 + last, steps) for epoch in (79, 80, 109, 110, 134, 135) for last in (0, 194)]
    assert rates == pytest.approx([0.1] * 2 + [0.01] * 4 + [0.001] * 4 + [0.0001] * 2)
    warm = [learning_rate(r, step, steps) for step in range(391)]
    assert warm == pytest.approx([0.1 * min(step + 1, 390) / 390 for step in range(391)])
    assert learning_rate(tiny.recipe(warmup=0.0), 0, 21) == 0.05  # no warm-up: the first step has the full rate


@pytest.mark.parametrize("warmup", [0.0, 0.2])
@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_annealing_falls_from_the_end_of_the_rise_to_exactly_zero(name, warmup):
    steps, rise = 1000, round(1000 * warmup)
    r = tiny.recipe(schedule=name, warmup=warmup, milestones=(0.5,), lr=0.4)
    rates = [learning_rate(r, step, steps) for step in range(steps)]
    assert rates[-1] == 0.0
    assert rates[:rise] == pytest.approx([0.4 * (step + 1) / rise for step in range(rise)])
    assert all(a > b for a, b in zip(rates[max(rise - 1, 0) :], rates[max(rise, 1) :], strict=False))
    middle, quarter = (rates[rise + (steps - rise) // part - 1] for part in (2, 4))
    assert middle == pytest.approx(0.2)
    assert quarter == pytest.approx(0.3 if name == "linear" else 0.2 * (1 + math.cos(math.pi / 4)))


def test_an_epoch_sees_each_image_once_and_epochs_differ():
    r = tiny.recipe()
    before = torch.get_rng_state()
    first, again, second = (epoch_batches(r, 58, epoch) for epoch in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert [len(b) for b in first] == [8] * 7  # two images fill no batch
    assert len(set(torch.cat(first).tolist())) == 56
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert not torch.equal(torch.cat(first), torch.cat(epoch_batches(dataclasses.replace(r, seed=1), 58, 0)))


def test_seeds_of_neighbours_are_unrelated_and_fit():
    seeds = {mixed_seed(a, "step", b, c) for a in range(4) for b in range(50) for c in range(4)}
    assert len(seeds) == 800
    assert all(0 <= s < 2**63 for s in seeds)
