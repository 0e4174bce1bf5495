from __future__ import annotations

import pytest
import torch
from converted_networks import NETWORKS, batch, network
from torch import nn
from torch.nn import functional as F

import mimicnorm as mn
from mimicnorm import models
from mimicnorm.errors import IntegerError
from mimicnorm.integer import Trainer
from mimicnorm.integer.requantise import Requantise
from mimicnorm.layers import LastNorm


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
    made = [n.operation for n in trainer.network.nodes if isinstance(n.operation, Requantise)]
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
        (nn.MaxPool2d(17), "more than 256 positions"),
        (nn.AdaptiveAvgPool2d((1, None)), "AdaptiveAvgPool2d"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), "class of its own"),
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


class Layers(nn.Module):
    """A few layers, for the ways to connect them below."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.deep, self.same = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Identity()
        self.pool, self.flat, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * 36, 3)
        self.first, self.second, self.norm = nn.Linear(108, 3), nn.Linear(108, 3), LastNorm(8)
        self.call = forward

    def forward(self, x):
        return self.call(self, x)


def two_readers(m, x):
    a = m.same(m.conv(x))
    return m.fc(m.flat(torch.relu(m.deep(a) + a)))


def twice(m, x):
    a = m.conv(x)
    return m.fc(m.flat(torch.relu(a + a)))


def relu_and_itself(m, x):
    a = m.conv(x)
    return m.fc(m.flat(torch.relu(m.deep(torch.relu(a)) + a)))


def view_before_relu(m, x):
    return m.fc(torch.relu(m.flat(m.conv(x))))


def two_readers_of_a_view(m, x):
    a = m.flat(m.conv(x))
    return m.fc(torch.relu(a) + a)


@pytest.mark.parametrize("forward", [two_readers, twice, relu_and_itself, view_before_relu, two_readers_of_a_view])
def test_values_with_several_readers_have_the_gradients_of_floating_point(forward):
    model, images, labels = Layers(forward), torch.randn(24, 3, 6, 6), torch.arange(24) % 3
    trainer = Trainer(model, lr=0.0)
    for _ in range(3):
        loss, _ = trainer.step(images, labels)
    right = F.cross_entropy(model(images), labels)
    right.backward()
    assert loss == pytest.approx(right.item(), abs=0.02)
    for product in trainer.network.products:
        for parameter, (data, exponent) in product.gradients():
            value = data.double() * 2.0**exponent / 24
            value = value.permute(0, 3, 1, 2) if value.dim() == 4 else value
            want = model.get_parameter(parameter.name).grad.double()
            if want.dim() > 1:  # the terms of a bias cancel
                assert (value - want).norm() < 0.2 * want.norm(), parameter.name


def test_what_convert_leaves_of_a_linear_bottleneck_trains():
    class Bottleneck(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.conv, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

        def forward(self, x):
            x = self.norm(self.stem(x))
            return self.fc(torch.flatten(self.pool(torch.relu(self.norm1(self.conv(x)) + x)), 1))

    model = Bottleneck()
    mn.convert_(model, mn.MimicNorm(min_fan_in=12), example=(2, 3, 8, 8))
    assert Trainer(model, lr=0.1).step(*batch())[0] > 0


def test_networks_that_would_be_read_in_another_way_are_refused():
    cases = {
        "Layers: logits that are a sum": lambda m, x: m.first(m.flat(x)) + m.second(m.flat(x)),
        "conv: a layer whose output nobody reads": lambda m, x: (m.conv(x), m.first(m.flat(x)))[1],
        "not a dict": lambda m, x: {"logits": m.first(m.flat(x))},
        "must be the logits": lambda m, x: x,
        "first: an input that is given by keyword": lambda m, x: m.first(input=m.flat(x)),
        "Layers: a ReLU behind the mean": lambda m, x: torch.relu(m.pool(m.norm(m.conv(x)))),
        "pool: a mean behind a view": lambda m, x: m.pool(m.flat(m.norm(m.conv(x)))),
        "norm: a last BN behind a sum": lambda m, x: m.norm(m.conv(x) + m.conv(x)),
        "Layers: a ReLU on the network's input": lambda m, x: m.first(m.flat(torch.relu(x))),
    }
    for message, forward in cases.items():
        with pytest.raises(IntegerError, match=message):
            Trainer(Layers(forward), lr=0.1)


def test_what_only_a_batch_can_show_is_refused_by_name_before_a_weight_changes():
    cases = {
        "Layers: a sum of different shapes": lambda m, x: m.fc(m.flat((a := torch.relu(m.conv(x))) + m.pool(a))),
        "fc: a linear layer on images": lambda m, x: m.fc(torch.relu(m.conv(x))),
        "conv: a convolution of vectors": lambda m, x: m.conv(m.flat(x)),
        "conv: logits at 36 positions": lambda m, x: m.flat(m.norm(m.conv(x))),
        "fc: logits at|conv: logits at": lambda m, x: m.conv(x),
        "deep: Product in integers failed": lambda m, x: m.flat(m.pool(m.deep(x))),
    }
    for message, forward in cases.items():
        trainer = Trainer(Layers(forward), lr=0.1)
        before = {name: value.clone() for name, value in trainer.state_dict().items() if "master" in name}
        with pytest.raises(IntegerError, match=message):
            trainer.step(torch.randn(6, 3, 6, 6), torch.arange(6) % 3)
        assert all(torch.equal(before[name], trainer.state_dict()[name]) for name in before)


def test_a_second_input_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x, z, unused=None):
            return self.fc(z)

    with pytest.raises(IntegerError, match="z: a second input"):
        Trainer(Pair(), lr=0.1)


def test_hooks_devices_and_wide_layers_are_refused():
    model = nn.Sequential(nn.Linear(8, 3))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(IntegerError, match="0: a module with hooks"):
        Trainer(model, lr=0.1)
    with pytest.raises(IntegerError, match=r"0\.weight: a parameter on meta"):
        Trainer(nn.Sequential(nn.Linear(8, 3, device="meta")), lr=0.1)
    with pytest.raises(IntegerError, match="0: a layer with sums of 140000 products"):
        Trainer(nn.Sequential(nn.Linear(140_000, 2, bias=False)), lr=0.1)
    with pytest.raises(IntegerError, match="0: a layer with sums of 70000 products"):
        Trainer(nn.Sequential(nn.Linear(70_000, 2)), lr=0.1)


@pytest.mark.parametrize("momentum", [None, 0.0, 0.3])
def test_a_last_norm_that_averages_in_another_way_is_refused(momentum):
    model = nn.Sequential(nn.Linear(8, 3), LastNorm(3, momentum=momentum))
    with pytest.raises(IntegerError, match=f"0: a last BN with momentum={momentum}"):
        Trainer(model, lr=0.1)


def test_running_statistics_of_the_model_are_continued():
    model = nn.Sequential(nn.Linear(8, 3), LastNorm(3))
    model[1].running_mean.fill_(2.0)
    model[1].running_var.fill_(9.0)
    mean, var = Trainer(model, lr=0.1).network.head.statistics()
    assert mean.tolist() == [2.0] * 3
    assert var.tolist() == [9.0] * 3
