"""A step in micro-batches: predicted against what the profiler sees ``microbatch.backward`` allocate."""

import pytest
import torch
from profiled_step import profiled_peak
from torch import nn
from torch.nn import functional as F

import mimicnorm as mn
from mimicnorm import microbatch
from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory import measure

SHAPE = (24, 3, 32, 32)


def network(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def converted(method: str = "mimicnorm", classes: int = 10) -> nn.Module:
    return mn.convert(network(classes), mn.methods.method(method), example=(2, 3, 32, 32), init=None)


@pytest.mark.parametrize("method", ["mimicnorm", "nonorm"])  # two passes, one pass
@pytest.mark.parametrize(("size", "classes"), [(4, 10), (7, 10), (24, 10), (4, 1000)])
def test_the_peak_is_that_of_microbatch_backward(method, size, classes):
    def passes(model, images, targets):
        return microbatch.backward(model, F.cross_entropy, images, targets, micro_batch=size, return_outputs=True)

    measured = profiled_peak(lambda: converted(method, classes), SHAPE, "sgd-momentum", passes)
    predicted = measure(converted(method, classes), SHAPE, micro_batch=size)
    assert predicted.peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("method", ["mimicnorm", "nonorm"])
def test_what_is_saved_is_that_of_one_micro_batch(method):
    whole, piece, parts = (measure(converted(method), SHAPE, **how) for how in ({}, {"batch": 6}, {"micro_batch": 6}))
    assert parts.saved_bytes == pytest.approx(piece.saved_bytes, rel=0.01)
    assert (parts.batch, parts.micro_batch) == (24, 6)
    assert parts.saved_bytes_per_sample == pytest.approx(whole.saved_bytes_per_sample, rel=0.01)
    assert parts.peak_bytes < 0.5 * whole.peak_bytes
    assert "batch 24 in micro-batches of 6, on cpu" in " ".join(str(parts).split())
    assert measure(converted(method), SHAPE, micro_batch=99).micro_batch == 24


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_and_real_ones_too():
    shape = (12, 3, 16, 16)
    eager, compiled, real = (
        measure(model, shape, micro_batch=6, fake=fake)
        for model, fake in ((converted(), True), (torch.compile(converted()), True), (converted(), False))
    )
    assert real.saved_bytes == eager.saved_bytes
    assert real.peak_bytes == pytest.approx(eager.peak_bytes, rel=0.01)
    assert 0 < compiled.saved_bytes < eager.saved_bytes
    assert compiled.peak_bytes < measure(converted(), shape).peak_bytes


def test_outputs_of_any_structure_are_put_together():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = converted()

        def forward(self, x, scale):
            return {"logits": scale * self.inner(x), "name": "two"}

    example = (torch.zeros(SHAPE), torch.ones(()))
    parts = measure(Two(), example, micro_batch=6, loss=lambda output: output["logits"].square().mean())
    assert parts.peak_bytes == pytest.approx(measure(converted(), SHAPE, micro_batch=6).peak_bytes, rel=0.01)


def test_what_microbatch_backward_refuses_is_not_predicted():
    with pytest.raises(MemoryPredictionError, match=r"micro_batch=6: 1 \(BatchNorm2d\).*: a BatchNorm in training"):
        measure(network(), SHAPE, micro_batch=6)
