from __future__ import annotations

import pytest
import torch
from converted_networks import NETWORKS, batch, gradients, network
from torch import nn
from torch.nn import functional as F

import mimicnorm as mn
from mimicnorm.errors import IntegerError
from mimicnorm.integer import Trainer
from mimicnorm.layers import LastNorm


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_is_trained_and_the_model_left_alone(name):
    model = network(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trainer = Trainer(model, lr=0.1)
    assert {p.name for p in trainer.network.parameters} == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_running_statistics_of_the_model_are_continued():
    model = nn.Sequential(nn.Linear(8, 3), LastNorm(3))
    model[1].running_mean.fill_(2.0)
    model[1].running_var.fill_(9.0)
    mean, var = Trainer(model, lr=0.1).network.head.statistics()
    assert (mean.tolist(), var.tolist()) == ([2.0] * 3, [9.0] * 3)


# -- refused before anything starts ------------------------------------------------------------------------------


def test_all_that_has_no_integer_form_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU())
            self.deep, self.other = nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(3, 8, 3, dilation=2)

        def forward(self, x):
            return torch.relu(self.deep(self.stem(x)) * 2 + self.other(x))

    with pytest.raises(IntegerError, match="no integer form") as caught:
        Trainer(Odd(), lr=0.1)
    assert [name for name, _ in caught.value.refusals] == ["stem.1", "other"]  # what reads them cannot be judged


def hooked() -> nn.Module:
    layer = nn.Conv2d(8, 8, 3)
    layer.register_forward_hook(lambda *_: None)
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.BatchNorm2d(8), "BatchNorm2d .convert the network first"),
        (nn.Dropout(0.3), "0.5 and 0.75"),
        (nn.AvgPool2d(2), "AvgPool2d"),
        (nn.AdaptiveAvgPool2d((1, None)), "AdaptiveAvgPool2d"),
        (nn.Sigmoid(), "Sigmoid"),
        (nn.Conv2d(8, 8, 3, groups=8), "8 groups"),
        (nn.Conv2d(8, 8, 3, dilation=2), "dilation"),
        (nn.Conv2d(8, 8, 3, padding="same"), "padding by name"),
        (nn.Conv2d(8, 8, 1, padding=1), "as much padding"),
        (nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 8, 3)), "class of its own"),
        (mn.convert(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)), mn.ScaledWS(), example=(2, 8, 6, 6)),
         "floating point"),
        (nn.Linear(140_000, 2, bias=False), "sums of 140000 products; 131072 fit"),
        (nn.Linear(70_000, 2), "sums of 70000 products; 65536 fit"),
        (hooked(), "a module with hooks"),
    ],
)  # fmt: skip
def test_a_refusal_says_why(layer, reason):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), layer, nn.Flatten(), nn.Linear(8, 3))
    with pytest.raises(IntegerError, match=rf"form of 2(\.0)?: .*{reason}"):
        Trainer(model, lr=0.1)


def test_parameters_elsewhere_frozen_or_shared_are_named():
    with pytest.raises(IntegerError, match=r"0\.weight: a parameter on meta"):
        Trainer(nn.Sequential(nn.Linear(8, 3, device="meta")), lr=0.1)
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 3))
    model[4].weight.requires_grad = False
    with pytest.raises(IntegerError, match="share") as caught:
        Trainer(model, lr=0.1)
    assert {name for name, _ in caught.value.refusals} == {"0.weight", "0.bias", "4.weight"}


@pytest.mark.parametrize("momentum", [None, 0.0, 0.3])
def test_a_last_norm_that_averages_in_another_way_is_refused(momentum):
    model = nn.Sequential(nn.Linear(8, 3), LastNorm(3, momentum=momentum))
    with pytest.raises(IntegerError, match=f"0: a last BN with momentum={momentum}"):
        Trainer(model, lr=0.1)


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


@pytest.mark.parametrize(
    ("message", "forward"),
    [
        ("must be the logits", lambda m, x: m.first(m.flat(x)) + m.second(m.flat(x))),
        ("must be the logits", lambda m, x: m.flat((a := m.pool(m.conv(x))) + a)),
        ("must be the logits", lambda m, x: torch.relu(m.conv(x))),
        ("must be the logits", lambda m, x: x),
        ("must be the logits", lambda m, x: m.norm((a := m.conv(x)) + a)),
        ("not a dict", lambda m, x: {"logits": m.first(m.flat(x))}),
        ("conv: a layer whose output nobody reads", lambda m, x: (m.conv(x), m.first(m.flat(x)))[1]),
        ("first: an input that is given by keyword", lambda m, x: m.first(input=m.flat(x))),
        ("conv: a last BN that is not between", lambda m, x: torch.relu(m.pool(m.norm(m.conv(x))))),
        ("conv: a last BN that is not between", lambda m, x: m.pool(m.flat(m.norm(m.conv(x))))),
        ("norm: a last BN that is not between", lambda m, x: m.deep(m.norm(m.conv(x)))),
    ],
)
def test_networks_that_would_be_read_in_another_way_are_refused(message, forward):
    with pytest.raises(IntegerError, match=message):
        Trainer(Layers(forward), lr=0.1)


def test_a_second_input_is_refused():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 3)

        def forward(self, x, z, unused=None):
            return self.fc(z)

    with pytest.raises(IntegerError, match="z: a second input"):
        Trainer(Pair(), lr=0.1)


# -- refused in the first step -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "forward"),
    [
        ("Layers: a sum of different shapes", lambda m, x: m.fc(m.flat((a := torch.relu(m.conv(x))) + m.pool(a)))),
        ("fc: a linear layer on images", lambda m, x: m.fc(torch.relu(m.conv(x)))),
        ("conv: a convolution of vectors", lambda m, x: m.conv(m.flat(x))),
        ("conv: logits at 36 positions", lambda m, x: m.flat(m.norm(m.conv(x)))),
        ("conv: logits at 36 positions", lambda m, x: m.conv(x)),
        ("deep: Product in integers failed", lambda m, x: m.flat(m.pool(m.deep(x)))),
    ],
)
def test_what_only_a_batch_can_show_is_refused_by_name_before_a_weight_changes(message, forward):
    trainer = Trainer(Layers(forward), lr=0.1)
    before = {name: value.clone() for name, value in trainer.state_dict().items() if "master" in name}
    with pytest.raises(IntegerError, match=message):
        trainer.step(torch.randn(6, 3, 6, 6), torch.arange(6) % 3)
    assert all(torch.equal(before[name], trainer.state_dict()[name]) for name in before)


# -- how values are connected ------------------------------------------------------------------------------------


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


def relu_of_the_input(m, x):
    return m.first(m.flat(torch.relu(x)))


@pytest.mark.parametrize(
    "forward", [two_readers, twice, relu_and_itself, view_before_relu, two_readers_of_a_view, relu_of_the_input]
)
def test_values_with_several_readers_have_the_gradients_of_floating_point(forward):
    model, images, labels = Layers(forward), torch.randn(24, 3, 6, 6), torch.arange(24) % 3
    trainer = Trainer(model, lr=0.0)
    for _ in range(3):
        loss, _ = trainer.step(images, labels)
    right = F.cross_entropy(model(images), labels)
    right.backward()
    assert loss == pytest.approx(right.item(), abs=0.02)
    for name, value in gradients(trainer, 24).items():
        want = model.get_parameter(name).grad
        if want.dim() > 1:  # the terms of a bias cancel
            assert (value - want).norm() < 0.2 * want.norm(), name


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
