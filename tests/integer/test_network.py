from __future__ import annotations

import pytest
import torch
from small import NETWORKS, network
from torch import nn

import mimicnorm as mn
from mimicnorm import models
from mimicnorm.errors import IntegerError
from mimicnorm.integer import Trainer, layers


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_is_trained_and_the_model_left_alone(name):
    model = network(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = Trainer(model, lr=0.1)
    assert {p.name for p in trainer.network.parameters} == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_sum_with_two_readers_is_requantised_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = self.first(x)
            return self.third(torch.relu(self.second(x) + x))

    trainer = Trainer(Twice(), lr=0.1)
    made = [n.operation for n in trainer.network.nodes if isinstance(n.operation, layers.Requantise)]
    assert [m.relu for m in made] == [False, True]
    assert trainer.step(torch.randn(6, 8), torch.arange(6) % 3)[0] > 0


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), nn.SiLU())
        self.deep = nn.Conv2d(8, 8, 3, groups=8)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.deep(self.stem(x))
        return self.head(x.mean((2, 3)) * 2)


def test_all_that_has_no_integer_form_is_named():
    with pytest.raises(IntegerError, match="no integer form") as caught:
        Trainer(Odd(), lr=0.1)
    assert caught.value.refusals == (("stem.1", "SiLU"),)  # what reads it cannot be judged
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Tanh())
    both = nn.Sequential(nn.Conv2d(3, 8, 3, dilation=2), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Dropout(0.3))
    for net, names in ((model, ["1"]), (both, ["0"])):
        with pytest.raises(IntegerError) as caught:
            Trainer(net, lr=0.1)
        assert [name for name, _ in caught.value.refusals] == names


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm2d(8), "convert the network first"),
        (nn.Dropout(0.3), "0.5 and 0.75"),
        (nn.AvgPool2d(2), "AvgPool2d"),
        (nn.Conv2d(8, 8, 3, groups=8), "8 groups"),
        (nn.Conv2d(8, 8, 3, padding="same"), "padding by name"),
        (nn.Conv2d(8, 8, 1, padding=1), "as much padding"),
        (nn.Sigmoid(), "Sigmoid"),
    ],
)
def test_a_refusal_says_why(layer, reason):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), layer, nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(IntegerError, match=rf"2: .*{reason}"):
        Trainer(model, lr=0.1)


def test_networks_of_other_methods_and_architectures_are_refused_by_name():
    model = models.build("shufflenetv2", input="cifar", width=0.25)
    mn.convert_(model, mn.MimicNorm(min_fan_in=12), example=(2, 3, 32, 32))
    with pytest.raises(IntegerError, match="integer"):
        Trainer(model, lr=0.1)
    model = models.build("resnet10", input="cifar", width=0.125)
    mn.convert_(model, mn.ScaledWS(), example=(2, 3, 32, 32))
    with pytest.raises(IntegerError, match=r"conv1: .*floating point"):
        Trainer(model, lr=0.1)


def test_frozen_and_shared_parameters_are_named():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 3))
    model[4].weight.requires_grad = False
    with pytest.raises(IntegerError, match="share") as caught:
        Trainer(model, lr=0.1)
    assert {name for name, _ in caught.value.refusals} == {"0.weight", "0.bias", "4.weight"}


def test_the_output_must_be_logits():
    with pytest.raises(IntegerError, match="must be the logits"):
        Trainer(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), lr=0.1)
