from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from mimicnorm.methods.mimicnorm import CONFIDENT, most_confident
from mimicnorm.theory import last_norm_floor


def by_single_samples(counts: list[int], scale: float = 1.0, starts: int = 6) -> float:
    """The lowest cross entropy that a search over every sample's logits finds, normalised as BatchNorm does it."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    best = math.inf
    for seed in range(starts):
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randn(len(labels), len(counts), dtype=torch.float64, generator=generator)
        raw += 2 * F.one_hot(labels, len(counts))
        raw.requires_grad_()
        search = torch.optim.LBFGS([raw], max_iter=500, line_search_fn="strong_wolfe", tolerance_change=1e-12)

        def loss(raw=raw):
            return F.cross_entropy(scale * F.batch_norm(raw, None, None, training=True, eps=1e-15), labels)

        def closure(search=search, loss=loss):
            search.zero_grad()
            value = loss()
            value.backward()
            return value

        search.step(closure)
        best = min(best, float(loss().detach()))
    return best


@pytest.mark.parametrize("counts", [[4, 4], [3] * 3, [2] * 10, [23, 1, 1], [46, 2, 1, 1], [1, 5, 3, 2, 9]])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_no_samples_do_better_and_some_do_as_well(counts, scale):
    floor, result = last_norm_floor(counts, scale), by_single_samples(counts, scale)
    assert floor - 1e-8 <= result <= floor + 1e-5


@pytest.mark.parametrize("classes", [2, 3, 10, 79, 100, 1000])
def test_balanced_classes_have_a_closed_form(classes):
    assert math.exp(-last_norm_floor([1] * classes)) == pytest.approx(most_confident(classes), abs=1e-9)


def test_the_numbers_of_the_pages():
    assert [round(most_confident(c), 3) for c in (2, 10, 100)] == [0.881, 0.757, 0.996]
    assert most_confident(139) < CONFIDENT < most_confident(140)
    assert last_norm_floor([276, 8, 8, 8]) == pytest.approx(0.923, abs=5e-4)
    assert last_norm_floor([276, 8, 8, 8], 10) == pytest.approx(0.0077, abs=1e-4)
    assert last_norm_floor([276, 8, 8, 8], 15) == pytest.approx(0.0004, abs=5e-5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-3, 1), min_size=2, max_size=12), st.floats(0.1, 20))
def test_it_ends_falls_with_the_scale_and_does_not_see_units(frequencies, scale):
    floor = last_norm_floor(frequencies, scale)
    assert 0 <= floor < math.log(len(frequencies))
    assert last_norm_floor(frequencies, 1.5 * scale) <= floor + 2e-9
    assert last_norm_floor([7 * p for p in reversed(frequencies)], scale) == pytest.approx(floor, rel=0, abs=2e-9)
