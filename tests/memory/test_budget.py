import pytest
import torch
from torch import nn

from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory import largest_batch, measure, parse_bytes


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


@pytest.mark.parametrize("budget", ["1 MiB", "2 GB", 200_000])
def test_the_answer_fits_and_the_next_batch_does_not(budget):
    batch = largest_batch(small(), (1, 3, 12, 12), budget)
    assert measure(small(), (batch, 3, 12, 12)).peak_bytes <= parse_bytes(budget)
    assert measure(small(), (batch + 1, 3, 12, 12)).peak_bytes > parse_bytes(budget)


def test_a_peak_that_moves_between_operations_does_not_mislead():
    """With much optimizer work the peak is in the optimizer first, and in the backward pass at larger batches."""
    model = nn.Sequential(nn.Linear(16, 2000), nn.ReLU(), nn.Linear(2000, 4))
    batch = largest_batch(model, (2, 16), "1600 KiB", optimizer="adamw")
    assert measure(model, (2, 16), optimizer="adamw").peak.phase == "optimizer"
    assert measure(model, (batch, 16), optimizer="adamw").peak_bytes <= 1600 * 1024
    assert measure(model, (batch + 1, 16), optimizer="adamw").peak_bytes > 1600 * 1024


def test_few_predictions_are_enough(monkeypatch):
    from mimicnorm.memory import budget

    tried = []
    monkeypatch.setattr(budget, "measure", lambda *args, batch: tried.append(batch) or measure(*args, batch=batch))
    batch = largest_batch(small(), (1, 3, 32, 32), "16 GiB")
    assert batch > 10_000
    assert len(tried) <= 6
    assert {batch, batch + 1} <= set(tried)


def test_one_sample_is_an_answer():
    peak = measure(small(norm=False), (1, 3, 12, 12)).peak_bytes
    assert largest_batch(small(norm=False), (5, 3, 12, 12), peak) == 1


def test_a_budget_below_the_network_itself_says_so():
    with pytest.raises(MemoryPredictionError, match=r"below what the network needs.*parameters and buffers 4\.\d+ KiB"):
        largest_batch(small(), (2, 3, 12, 12), "6 KiB")


def test_a_budget_below_the_smallest_batch_says_so():
    peak = measure(small(), (2, 3, 12, 12)).peak_bytes
    with pytest.raises(MemoryPredictionError, match="a batch of two needs"):
        largest_batch(small(), (2, 3, 12, 12), peak - 1)  # one sample is too few for its BatchNorm1d


def test_tensors_are_resized():
    images = torch.zeros(2, 3, 12, 12)
    assert largest_batch(small(), images, "5 MiB") == largest_batch(small(), (9, 3, 12, 12), "5 MiB")
