import json

import pytest
import torch
import zoo
from torch import nn

import mimicnorm as mn
from mimicnorm.errors import ExampleError, MemoryPredictionError, MimicNormError, RefusedError
from mimicnorm.memory import compare, comparison, largest_batch, measure
from mimicnorm.methods import METHODS, BatchNorm, MimicNorm, NoNorm


def small():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@pytest.fixture(scope="module")
def resnet18():
    return compare(zoo.torchvision().models.resnet18(), (8, 3, 224, 224), ["batchnorm", "mimicnorm", "nonorm"])


def test_half_of_a_resnets_activations_go(resnet18):
    assert list(resnet18.analyses) == ["batchnorm", "mimicnorm", "nonorm"]
    assert resnet18.saved_ratio("batchnorm") == 1
    assert resnet18.saved_ratio("mimicnorm") < 0.5405
    assert resnet18.analyses["mimicnorm"].saved_bytes < 1.005 * resnet18.analyses["nonorm"].saved_bytes
    assert resnet18.peak_ratio("mimicnorm") < 0.85


def test_the_first_row_is_the_network_as_it_is(resnet18):
    network = zoo.torchvision().models.resnet18()
    assert resnet18.analyses["batchnorm"].as_dict() == measure(network, (8, 3, 224, 224)).as_dict()
    assert "largest" not in str(resnet18)


def test_a_method_that_the_network_cannot_take_is_a_line_with_its_reason():
    result = compare(small(), (4, 3, 32, 32), METHODS)
    assert result.refused.keys() == {"fixup", "skipinit"}
    assert result.analyses.keys() | result.refused.keys() == METHODS.keys()
    assert "fixup: Fixup is made for residual branches, and this network has none" in " ".join(str(result).split())
    assert json.loads(json.dumps(result.as_dict()))["refused"] == result.refused
    for network, methods, reason in (
        (small(), ["batchnorm", "fixup"], "residual branches"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3072, 4)), ["batchnorm", "mimicnorm"], "no BatchNorm"),
    ):
        with pytest.raises(RefusedError, match=reason):  # there is nothing to compare
            compare(network, (4, 3, 32, 32), methods)


def test_three_methods_are_compared_by_default_each_converted_once_and_predicted_a_few_times(monkeypatch):
    converted, lines = [], []
    monkeypatch.setattr(comparison, "convert", lambda *args, **how: converted.append(args) or mn.convert(*args, **how))
    result = compare(small(), (64, 3, 32, 32), budget="64 MiB", progress=lines.append)
    assert list(result.analyses) == list(result.largest_batches) == ["batchnorm", "mimicnorm", "nonorm"]
    assert len(converted) == 3
    assert lines[:2] == ["batchnorm: converting", "batchnorm: predicting the step"]
    for name, batch in result.largest_batches.items():
        tried = [line for line in lines if line.startswith(f"{name}: predicting")]
        assert {f"{name}: predicting batch {n}" for n in (batch, batch + 1)} <= set(tried)
        assert len(tried) <= 4
    assert result.largest_batches["mimicnorm"] > 1.15 * result.largest_batches["batchnorm"]
    assert result.largest_batches["batchnorm"] == largest_batch(small(), (8, 3, 32, 32), "64 MiB")
    text, rows = str(result), json.loads(json.dumps(result.as_dict()))["methods"]
    assert "largest batch in 64.00 MiB" in text
    for name in result.analyses:
        assert f"{result.saved_ratio(name):.3f}" in text
        assert str(result.largest_batches[name]) in text
        assert rows[name]["peak_ratio"] == result.peak_ratio(name)


def test_a_budget_may_be_enough_for_one_method_only():
    needed = measure(mn.convert(small(), NoNorm(), example=(2, 3, 64, 64), init=None), (1, 3, 64, 64)).peak_bytes
    result = compare(small(), (8, 3, 64, 64), ["batchnorm", "nonorm"], budget=needed)
    assert result.largest_batches == {"batchnorm": 0, "nonorm": 1}
    result = compare(small(), (8, 3, 64, 64), ["mimicnorm", "nonorm"], budget=needed)  # a LastNorm takes two samples
    assert result.largest_batches == {"mimicnorm": 0, "nonorm": 1}
    with pytest.raises(MemoryPredictionError, match="Raise the budget"):
        compare(small(), (8, 3, 64, 64), budget=100_000)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_conversion_keeps_its_saving_under_autocast_and_compile():
    methods = [BatchNorm(), MimicNorm(), NoNorm()]
    for model, autocast in [(small(), torch.bfloat16), (torch.compile(small()), None)]:
        result = compare(model, (64, 3, 32, 32), methods, autocast=autocast)
        saved = {name: analysis.saved_bytes for name, analysis in result.analyses.items()}
        assert saved["mimicnorm"] < 0.75 * saved["batchnorm"]
        assert saved["mimicnorm"] < 1.01 * saved["nonorm"]


def test_the_model_is_left_alone():
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = compare(model, torch.zeros(16, 3, 32, 32), ["nonorm", "batchnorm"])
    assert result.saved_ratio("batchnorm") > 1.4
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_methods_of_one_name_are_distinguished_by_their_settings():
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    result = compare(model, (4, 64), ["batchnorm", MimicNorm(), MimicNorm(last_norm=False)])
    assert list(result.analyses) == ["batchnorm", "mimicnorm(last_norm=True)", "mimicnorm(last_norm=False)"]
    assert list(compare(model, (4, 64), "mimicnorm").analyses) == ["mimicnorm"]


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([], "no method to compare"),
        (["nonorm", "batchnorm", "nonorm"], "given twice"),
        (["groupnrm"], "groupnrm"),
        (3, r"method must be one of .*got 3"),
    ],
)
def test_what_is_not_a_list_of_methods_is_refused(methods, message):
    with pytest.raises(MimicNormError, match=message):
        compare(small(), (4, 3, 32, 32), methods)


def test_what_cannot_be_measured_cannot_be_compared():
    with pytest.raises(MemoryPredictionError, match=r"the model is a int: give an nn\.Module"):
        compare(3, (4, 8))
    with pytest.raises(ExampleError, match="example must be a tensor, a shape"):
        compare(small(), ())


def test_methods_are_compared_for_a_device_and_the_table_says_for_which():
    on_cpu, on_gpu = (
        compare(small(), (4, 3, 32, 32), ["batchnorm", "nonorm"], device=device, budget="8 MiB")
        for device in ("cpu", "cuda")
    )
    assert on_gpu.peak_ratio("nonorm") != on_cpu.peak_ratio("nonorm")
    assert on_gpu.largest_batches["nonorm"] > on_cpu.largest_batches["nonorm"]
    for result, device, noted in ((on_cpu, "cpu", False), (on_gpu, "cuda", True)):
        assert result.as_dict()["device"] == result.as_dict()["methods"]["nonorm"]["device"] == device
        for text in (str(result), str(result.analyses["nonorm"])):
            assert f"batch 4, on {device}" in text
            assert ("workspaces inside the kernels of cuda (cuDNN's" in " ".join(text.split())) == noted
