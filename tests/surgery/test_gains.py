"""Gains from recorded activations: settings read right, by an independent Monte Carlo."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.surgery.gains import activation, feed
from mimicnorm.surgery.record import record

ACTIVATIONS = {
    "relu": F.relu,
    "relu as clamp": lambda x: x.clamp(min=0),
    "relu6": F.relu6,
    "clamp": lambda x: torch.clamp(x, -0.5, 2.0),
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "leaky": lambda x: F.leaky_relu(x, 0.3),
    "leaky default": F.leaky_relu,
    "elu": lambda x: F.elu(x, alpha=0.5),
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(inplace=True),
    "tanh": torch.tanh,
    "mish": F.mish,
}


class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act, self.conv = act, nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.conv(self.act(x * 1.0))


def fed_to_conv(net):
    graph = record(net, (2, 3, 4, 4))
    return feed(next(n for n in graph.nodes if n.layer == "conv"), dict(net.named_modules()))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gain_equals_monte_carlo(name):
    act = ACTIVATIONS[name]
    fed = fed_to_conv(Net(act))
    z = act(torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    assert fed.gain(centred=False, fan_in=100) == pytest.approx(z.square().mean().item() ** -0.5, rel=5e-3)
    assert fed.gain(centred=True, fan_in=100) == pytest.approx((100 / 99) ** 0.5 / z.std().item(), rel=5e-3)


def test_unknown_activations_have_no_formula():
    graph = record(Net(lambda x: torch.exp(x)), (2, 3, 4, 4))
    assert activation(next(n for n in graph.nodes if n.op == "exp"), {}) is None


SLOPES = [-1.0, 0.2, 0.9]


def per_channel(slopes):
    act = nn.PReLU(len(slopes))
    with torch.no_grad():
        act.weight.copy_(torch.tensor(slopes))
    return act


def test_gain_behind_a_prelu_is_that_of_its_own_slopes():
    fed = fed_to_conv(Net(per_channel(SLOPES)))
    z = torch.randn(3, 1_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.where(z > 0, z, torch.tensor(SLOPES, dtype=torch.float64)[:, None] * z)
    assert fed.gain(centred=False, fan_in=100) == pytest.approx(y.square().mean().item() ** -0.5, rel=5e-3)
    assert fed.gain(centred=True, fan_in=100) == pytest.approx((100 / 99) ** 0.5 / y.std().item(), rel=5e-3)
    assert fed.name == "prelu"


def test_a_prelu_that_goes_by_two_names_is_found():
    net = Net(per_channel(SLOPES))
    net.a_second_name = net.act
    assert fed_to_conv(net) == fed_to_conv(Net(per_channel(SLOPES)))


def test_a_prelu_whose_slopes_are_not_known_has_no_formula():
    net = Net(per_channel(SLOPES))
    net.act.forward = lambda x: F.prelu(x, net.act.weight.abs())
    graph = record(net, (2, 3, 4, 4))
    assert activation(next(n for n in graph.nodes if n.op == "prelu"), dict(net.named_modules())) is None


def test_two_slopes_side_by_side_are_both_counted():
    fed = fed_to_conv(Net(lambda x: torch.cat([F.leaky_relu(x[:, :1], 0.5), F.leaky_relu(x[:, 1:], -0.5)], 1)))
    z = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.cat([F.leaky_relu(z, 0.5), F.leaky_relu(z, -0.5), F.leaky_relu(z, -0.5)])
    assert fed.name == "leaky_relu"
    assert fed.gain(centred=True, fan_in=100) == pytest.approx((100 / 99) ** 0.5 / z.std().item(), rel=5e-3)
