import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mimicnorm.errors import ExampleError, MemoryPredictionError
from mimicnorm.memory import Analysis, Moment, budget, largest_batch, measure, parse_bytes


def small(norm=True):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8) if norm else nn.Identity(),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(8) if norm else nn.Identity(),
        nn.Linear(8, 100),
    )


@pytest.mark.parametrize("amount", ["1 MiB", "2 GB", 200_000, "1e18"])
def test_the_answer_fits_and_the_next_batch_does_not(amount, monkeypatch):
    tried = []
    monkeypatch.setattr(budget, "measure", lambda *args, batch: tried.append(batch) or measure(*args, batch=batch))
    batch = largest_batch(small(), (1, 3, 12, 12), amount)
    assert measure(small(), (batch, 3, 12, 12)).peak_bytes <= parse_bytes(amount)
    assert measure(small(), (batch + 1, 3, 12, 12)).peak_bytes > parse_bytes(amount)
    assert len(tried) <= 5


def test_a_peak_that_moves_between_operations_does_not_mislead():
    """With much optimizer work the peak is in the optimizer first, and in the backward pass at larger batches."""
    model = nn.Sequential(nn.Linear(16, 2000), nn.ReLU(), nn.Linear(2000, 4))
    batch = largest_batch(model, (2, 16), "1600 KiB", optimizer="adamw")
    assert measure(model, (2, 16), optimizer="adamw").peak.phase == "optimizer"
    assert measure(model, (batch, 16), optimizer="adamw").peak_bytes <= 1600 * 1024
    assert measure(model, (batch + 1, 16), optimizer="adamw").peak_bytes > 1600 * 1024


def prediction(batch: int, totals: list[int]) -> Analysis:
    timeline = tuple(Moment("forward", 10, 0, 0, 0, 0, total - 10) for total in totals)
    return Analysis(batch, 0, 10, 0, 0, 0, 0, timeline, {})


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1000), st.integers(1, 64)), min_size=1, max_size=5),
    st.integers(1, 500),
    st.integers(100, 10**8),
)
def test_any_growth_is_searched_to_the_end(moments, start, budget_bytes):
    """Moments that grow in steps, as where kernels fill up blocks, are not on a line."""
    tried = []

    def predict(batch: int) -> Analysis:
        tried.append(batch)
        totals = [10 + fixed + slope * -(-batch // block) * block for fixed, slope, block in moments]
        return prediction(batch, [10 + batch, *totals])

    if predict(1).peak_bytes > budget_bytes:
        with pytest.raises(MemoryPredictionError, match="a batch of 1 needs"):
            budget.search(predict, budget_bytes, predict(start))
        return
    tried.clear()
    batch = budget.search(predict, budget_bytes, predict(start))
    assert predict(batch).peak_bytes <= budget_bytes < predict(batch + 1).peak_bytes
    assert len(tried) < 60


def test_one_sample_is_an_answer():
    peak = measure(small(norm=False), (1, 3, 12, 12)).peak_bytes
    assert largest_batch(small(norm=False), (5, 3, 12, 12), peak) == 1


def test_a_budget_below_the_smallest_batch_says_what_it_needs():
    peak = measure(small(), (2, 3, 12, 12)).peak_bytes
    with pytest.raises(MemoryPredictionError, match=r"a batch of 2 needs .*optimizer state take 13\.\d+ KiB with any"):
        largest_batch(small(), (2, 3, 12, 12), peak - 1)  # one sample is too few for its BatchNorm1d
    with pytest.raises(MemoryPredictionError, match=r"the budget is 6\.00 KiB"):
        largest_batch(small(), (2, 3, 12, 12), "6 KiB")
    with pytest.raises(ExampleError, match="module '6' does not run"):
        largest_batch(nn.Sequential(*small()[:6], nn.Linear(7, 3)), (2, 3, 12, 12), "6 KiB")
