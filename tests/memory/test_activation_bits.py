"""Predictions with activations in few bits, against steps that are really taken."""

import copy
import json

import pytest
import zoo
from profiled_step import profiled_peak
from torch import nn
from torch.nn import functional as F

import mimicnorm as mn
from mimicnorm.cli import main
from mimicnorm.compress import enable_, saved_activations
from mimicnorm.errors import CompressionError
from mimicnorm.memory import compare, largest_batch, measure


def wide() -> nn.Module:
    """Activations that outweigh everything else."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)),
        *(layer for _ in range(4) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU6())),
        *(nn.AvgPool2d(2), nn.Conv2d(32, 32, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(32, 10),
    )


def in_bits(bits: int):
    def passes(model, images, classes):
        with saved_activations(bits):
            output = model(images)
            loss = F.cross_entropy(output, classes)
        loss.backward()
        return output, loss

    return passes


@pytest.mark.parametrize("bits", [8, 4, 2, 32])
def test_the_predicted_peak_is_what_a_profiled_step_allocates(bits):
    model, shape = wide(), (7, 3, 64, 64)
    predicted = measure(model, shape, activation_bits=bits)
    assert predicted.peak.activations + predicted.peak.temporary > 5 * predicted.parameters
    profiled = profiled_peak(lambda: copy.deepcopy(model), shape, "sgd-momentum", in_bits(bits))
    assert predicted.peak_bytes == pytest.approx(profiled, rel=2e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_fake_real_and_enabled_models_give_the_same_numbers(bits):
    model, shape = wide(), (4, 3, 32, 32)
    fake, real = (measure(model, shape, activation_bits=bits, fake=fake) for fake in (True, False))
    assert fake.as_dict() == real.as_dict()
    enable_(model, bits)
    enabled = measure(model, shape).as_dict()
    assert enabled["saved_bytes"] == fake.saved_bytes
    assert enabled["peak_bytes"] == fake.peak_bytes


def test_resnet50_saves_what_was_promised():
    result = compare(
        zoo.torchvision().models.resnet50(), (4, 3, 224, 224), ["batchnorm", "mimicnorm"], activation_bits=8
    )
    assert list(result.analyses) == ["batchnorm", "batchnorm, 8 bits", "mimicnorm", "mimicnorm, 8 bits"]
    assert result.saved_ratio("mimicnorm, 8 bits") < 0.12
    assert "activation bits" in " ".join(str(result).split())
    converted = mn.convert(zoo.torchvision().models.resnet50(), mn.MimicNorm(), example=(2, 3, 64, 64), init=None)
    four = measure(converted, (4, 3, 224, 224), activation_bits=4)
    assert four.saved_bytes < 0.06 * result.analyses["batchnorm"].saved_bytes
    assert "4 bits" in four.setting


def test_larger_batches_fit():
    model, shape = wide(), (4, 3, 64, 64)
    plain, small = (largest_batch(model, shape, "64 MiB", activation_bits=bits) for bits in (None, 4))
    assert small > 1.4 * plain


def test_micro_batches():
    whole, few = (measure(wide(), (8, 3, 64, 64), micro_batch=4, activation_bits=bits) for bits in (None, 8))
    assert few.saved_bytes < 0.27 * whole.saved_bytes


def test_the_command_adds_rows(capsys):
    words = ["memory", "resnet10", "--input", "cifar", "--width", "0.25", "--batch", "4", "--methods", "mimicnorm"]
    assert main([*words, "--activation-bits", "8", "--json"]) == 0
    methods = json.loads(capsys.readouterr().out)["methods"]
    assert {name: row["activation_bits"] for name, row in methods.items()} == {
        "mimicnorm": None,
        "mimicnorm, 8 bits": 8,
    }


def test_other_widths_are_refused():
    with pytest.raises(CompressionError, match="bits=5"):
        measure(wide(), (2, 3, 32, 32), activation_bits=5)
