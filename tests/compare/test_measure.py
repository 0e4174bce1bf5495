"""The memory that a comparison predicts is that of the step it trains."""

from __future__ import annotations

import functools

import pytest
import small
import torch
from torch._dynamo.eval_frame import OptimizedModule

from mimicnorm import memory, report
from mimicnorm.compare import measure
from mimicnorm.compare.measure import applied, memory_by_method, memory_of, times
from mimicnorm.errors import MemoryPredictionError, RecipeError
from mimicnorm.training import build, network
from mimicnorm.training.loop import load
from mimicnorm.training.processes import Processes

CPU = Processes(torch.device("cpu"))
SIZES = {"width": 0.25, "batch": 256, "limit": 256}  # the activations outweigh the weights, as they do in earnest


def predicted(method: str = "mimicnorm", processes: Processes = CPU, **changes) -> dict:
    job = small.job(method, **SIZES, **changes)
    source = load(job.recipe)[0]
    (trainer,) = applied(job, source, processes)[0].values()
    return memory_of(trainer, source)


@functools.cache
def usual() -> dict:
    """What is predicted without any changes."""
    return predicted()


def by_hand(example: torch.Tensor, **how) -> memory.Analysis:
    job = small.job("mimicnorm", **SIZES)
    net = network(job.run_recipe(job.entries[0]), load(job.recipe)[0])
    net = net.to(memory_format=torch.channels_last if example is LAST else torch.contiguous_format)

    def decaying(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)

    return memory.measure(net, example, optimizer=decaying, **how)


IMAGES = torch.zeros(256, 1, 8, 8)
LAST = torch.empty(IMAGES.shape, memory_format=torch.channels_last)


def test_the_memory_format_is_that_of_training():
    plain = predicted(channels_last=False)
    assert usual()["peak_bytes"] == by_hand(LAST).peak_bytes
    assert plain["peak_bytes"] == by_hand(IMAGES).peak_bytes
    assert usual()["peak_bytes"] != plain["peak_bytes"]


def test_micro_batches_are_predicted_as_such():
    whole, parts = usual(), predicted(micro_batch=32)
    assert parts["peak_bytes"] < 0.7 * whole["peak_bytes"]
    assert parts["peak_bytes"] == by_hand(LAST, micro_batch=32).peak_bytes
    assert parts["saved_bytes_per_image"] == pytest.approx(whole["saved_bytes_per_image"], rel=0.02)


def test_activation_bits_are_predicted_as_such():
    few = predicted(activation_bits=8)
    assert few["saved_bytes_per_image"] < 0.3 * usual()["saved_bytes_per_image"]
    assert few["peak_bytes"] == by_hand(LAST, activation_bits=8).peak_bytes


def test_the_device_is_that_of_training():
    elsewhere = predicted(processes=Processes(torch.device("meta")))
    assert (elsewhere["device"], usual()["device"]) == ("meta", "cpu")
    assert elsewhere["peak_bytes"] < usual()["peak_bytes"]  # no copies inside the CPU's convolutions


def test_a_compiled_network_is_predicted_compiled():
    compiled = predicted(compile=True)
    assert compiled["saved_bytes_per_image"] < usual()["saved_bytes_per_image"]
    assert "note" not in compiled


def test_where_the_compiled_network_cannot_be_predicted_the_plain_one_is_and_it_is_said(monkeypatch):
    plain, expected = memory.measure, usual()

    def refusing(model, *args, **how):
        if isinstance(model, OptimizedModule):
            raise MemoryPredictionError("no graph")
        return plain(model, *args, **how)

    monkeypatch.setattr(memory, "measure", refusing)
    found = predicted(compile=True)
    assert found == {**expected, "note": "predicted without torch.compile: no graph"}
    methods = [{"memory": found, "label": "mimicnorm"}]
    data = {"settings": {"compile": True, "batch": 16}, "methods": methods}
    assert report.summary.about_memory(data).endswith("for cpu. Predicted without torch.compile: no graph.")
    assert report.summary._bytes(methods[0], "peak_bytes", "peak_ratio").endswith("\n(not compiled)")


def test_compiled_and_plain_predictions_are_not_set_against_each_other(monkeypatch):
    plain = {"saved_bytes_per_image": 2.0, "peak_bytes": 2, "device": "cpu"}
    found = iter([plain, {**plain, "note": "predicted without torch.compile"}, {**plain, "peak_bytes": 1}])
    monkeypatch.setattr(measure, "memory_of", lambda *_: next(found))
    amounts = memory_by_method(dict.fromkeys(("batchnorm", "mimicnorm", "nonorm")), None)
    assert [entry.get("peak_ratio") for entry in amounts.values()] == [1.0, None, 0.5]


def test_what_cannot_be_trained_has_no_prediction():
    assert "BatchNorm in training mode" in predicted("batchnorm", micro_batch=4)["why_not"]


def test_each_network_is_converted_once(monkeypatch):
    converted, conversions = build.convert_, []
    monkeypatch.setattr(build, "convert_", lambda *args, **how: conversions.append(args) or converted(*args, **how))
    job = small.job("batchnorm,mimicnorm")
    source = load(job.recipe)[0]
    trainers, plans = applied(job, source, CPU)
    assert memory_by_method(trainers, source).keys() == times(trainers, source, 5).keys() == plans.keys()
    assert len(conversions) == 2


def test_integers_are_not_measured_as_floating_point():
    with pytest.raises(RecipeError, match="no other measurement"):
        predicted(precision="int8")
