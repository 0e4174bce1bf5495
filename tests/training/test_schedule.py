"""Order and learning rate, as functions of the recipe and the step alone."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch

from mimicnorm.training import recipe
from mimicnorm.training.schedule import batches_of, learning_rate, mixed_seed


def test_the_papers_schedule():
    r = recipe("cifar100-resnet18")
    rates = [learning_rate(r, epoch * 195, 195) for epoch in (2, 79, 80, 109, 110, 134, 135, 149)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001, 0.0001, 0.0001])
    warm = [learning_rate(r, step, 195) for step in range(390)]
    assert warm == pytest.approx([0.1 * (step + 1) / 390 for step in range(390)])


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert learning_rate(dataclasses.replace(tiny.recipe(), warmup_epochs=0.0), 0, 5) == 0.05


def test_an_epoch_sees_each_image_once_and_epochs_differ():
    r = tiny.recipe()
    first, again, second = (batches_of(r, 56, epoch) for epoch in (0, 0, 1))
    assert [len(b) for b in first] == [8] * 7
    assert sorted(torch.cat(first).tolist()) == list(range(56))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(second))
    assert not torch.equal(torch.cat(first), torch.cat(batches_of(dataclasses.replace(r, seed=1), 56, 0)))


def test_what_fills_no_batch_is_left_out():
    assert [len(b) for b in batches_of(tiny.recipe(), 23, 0)] == [8, 8]


def test_the_callers_random_state_plays_no_part():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    batches_of(tiny.recipe(), 56, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_seeds_of_neighbours_are_unrelated_and_fit():
    seeds = {mixed_seed(a, "step", b, c) for a in range(4) for b in range(50) for c in range(4)}
    assert len(seeds) == 800
    assert all(0 <= s < 2**63 for s in seeds)
