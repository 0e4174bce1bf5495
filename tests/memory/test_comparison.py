import json

import pytest
import torch
import zoo
from torch import nn

import mimicnorm as mn
from mimicnorm.errors import MemoryPredictionError, NameNotFoundError, RefusedError
from mimicnorm.memory import compare, largest_batch, measure
from mimicnorm.methods import METHODS, BatchNorm, MimicNorm, NoNorm

BOTH = (BatchNorm(), MimicNorm())


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


def test_without_names_every_method_is_shown_or_refused_with_its_reason():
    result = compare(small(), (4, 3, 32, 32))
    assert list(result.analyses)[:3] == ["batchnorm", "mimicnorm", "nonorm"]
    assert result.refused.keys() == {"fixup", "skipinit"}
    assert result.analyses.keys() | result.refused.keys() == METHODS.keys()
    assert "fixup: Fixup is made for residual branches, and this network has none" in " ".join(str(result).split())
    assert json.loads(json.dumps(result.as_dict()))["refused"] == result.refused


def test_a_method_asked_for_by_name_is_an_error_where_it_cannot_be_applied():
    with pytest.raises(RefusedError, match="residual branches"):
        compare(small(), (4, 3, 32, 32), ["batchnorm", "fixup"])
    with pytest.raises(RefusedError, match="no BatchNorm"):
        compare(nn.Sequential(nn.Linear(3, 4)), (4, 3))


def test_a_budget_may_be_enough_for_one_method_only():
    needed = measure(mn.convert(small(), NoNorm(), example=(2, 3, 64, 64), init=None), (1, 3, 64, 64)).peak_bytes
    result = compare(small(), (8, 3, 64, 64), ["batchnorm", "nonorm"], budget=needed)
    assert result.largest_batches == {"batchnorm": 0, "nonorm": 1}
    result = compare(small(), (8, 3, 64, 64), ["mimicnorm", "nonorm"], budget=needed)  # a LastNorm takes two samples
    assert result.largest_batches == {"mimicnorm": 0, "nonorm": 1}
    with pytest.raises(MemoryPredictionError, match="Raise the budget"):
        compare(small(), (8, 3, 64, 64), BOTH, budget=100_000)


def test_the_table_and_the_dictionary_show_every_method():
    result = compare(small(), (8, 3, 32, 32), budget="256 MiB")
    assert result.largest_batches["mimicnorm"] > 1.15 * result.largest_batches["batchnorm"]
    assert result.largest_batches["batchnorm"] == largest_batch(small(), (8, 3, 32, 32), "256 MiB")
    text = str(result)
    assert "largest batch in 256.00 MiB" in text
    for name in result.analyses:
        assert f"{result.saved_ratio(name):.3f}" in text
        assert str(result.largest_batches[name]) in text
    loaded = json.loads(json.dumps(result.as_dict()))
    assert loaded["methods"]["mimicnorm"]["peak_ratio"] == result.peak_ratio("mimicnorm")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_conversion_keeps_its_saving_under_autocast_and_compile():
    methods = [BatchNorm(), MimicNorm(), NoNorm()]
    for model, autocast in [(small(), torch.bfloat16), (torch.compile(small()), None)]:
        result = compare(model, (64, 3, 32, 32), methods, autocast=autocast)
        saved = {name: analysis.saved_bytes for name, analysis in result.analyses.items()}
        assert saved["mimicnorm"] < 0.75 * saved["batchnorm"]
        assert saved["mimicnorm"] < 1.01 * saved["nonorm"]


def test_names_are_methods_and_the_model_is_left_alone():
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = compare(model, torch.zeros(16, 3, 32, 32), ["nonorm", "batchnorm"])
    assert result.saved_ratio("batchnorm") > 1.4
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    with pytest.raises(NameNotFoundError, match="groupnrm"):
        compare(model, (16, 3, 32, 32), ["groupnrm"])


class NeedsValues(nn.Module):
    """Looks at the numbers in its forward pass."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.net = how, small()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "numpy":
            return self.net(x * float(x.detach().numpy().ndim))
        return self.net(x if x.sum() < 1e9 else -x)


@pytest.mark.parametrize("how", ["numpy", "branch"])
@pytest.mark.parametrize("example", [(4, 3, 9, 9), torch.randn(4, 3, 9, 9)], ids=["shape", "data"])
def test_models_that_need_values_are_pointed_to_real_tensors_and_compared_there(how, example):
    with pytest.raises(MemoryPredictionError, match=r"needs values, not only shapes .*fake=False"):
        compare(NeedsValues(how), example)
    result = compare(NeedsValues(how), example, BOTH, fake=False, budget="4 MiB")
    assert result.saved_ratio("mimicnorm") < 0.7
    assert result.largest_batches["mimicnorm"] > result.largest_batches["batchnorm"]
