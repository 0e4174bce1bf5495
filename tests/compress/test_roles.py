from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gradients import counted, gradients
from torch import nn

import mimicnorm as mn
from mimicnorm.compress import saved_activations
from mimicnorm.compress.roles import CURVED

SIZE = 64 * 64


def held(call, bits: int = 8) -> int:
    """Bytes that the graph of a function of 64 x 64 numbers holds."""
    x = torch.randn(64, 64, requires_grad=True)
    with counted() as found, saved_activations(bits):
        y = call(x * 1)
    own = {p.untyped_storage()._cdata for p in getattr(call, "parameters", tuple)()}
    total = sum(size for address, size in found.items() if address not in own)
    y.sum().backward()
    return total


def payload(bits: int) -> int:
    return SIZE * bits // 8 + 2 * SIZE // 256


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("function", CURVED)
def test_inputs_of_curved_activations_take_8_bits(function, bits):
    assert held(function, bits) == payload(8)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_inputs_of_weight_layers(bits):
    assert held(nn.Linear(64, 8), bits) == payload(bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("norm", [nn.BatchNorm1d(64), nn.LayerNorm(64), nn.GroupNorm(4, 64)])
def test_inputs_of_norms_and_not_their_statistics(norm, bits):
    statistics = held(norm, bits) - payload(bits)
    assert 0 < statistics <= 2 * 4 * 64 * 4


@pytest.mark.parametrize(
    "function",
    [
        *(torch.sigmoid, lambda x: torch.softmax(x, 1), torch.exp),
        *(mn.layers.LastNorm(64), mn.layers.LastNorm(64, logit_scale=True)),
    ],
    ids=["gate", "softmax", "exp", "last BN", "last BN with a scale"],
)
def test_what_has_no_role_is_left_alone(function):
    assert held(function) >= 4 * SIZE


def test_row_sums_and_weights_of_centred_layers_are_left_alone():
    layer = mn.layers.weight_mean_class(nn.Linear)(64, 300)
    x = torch.randn(64, 64)
    right, found = gradients(layer, x, None), gradients(layer, x, 4)
    assert torch.equal(found["input"], right["input"])  # rounded sums or weights would show
    assert torch.equal(found["bias"], right["bias"])
    assert not torch.equal(found["weight"], right["weight"])


def test_the_networks_input_is_left_alone():
    conv, x = nn.Conv2d(3, 8, 3), torch.randn(4, 3, 16, 16)
    with counted() as found, saved_activations(4):
        loss = conv(x).sum()
    assert x.untyped_storage()._cdata in found
    loss.backward()


def test_the_relu_and_all_its_readers_share_one_payload():
    convs = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in range(3))
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    with counted() as found, saved_activations(8):
        y = F.relu(x * 1)
        out = sum(conv(y).sum() for conv in convs) + nn.Linear(16, 2)(y).sum() + (y * 2).sum()
    numbers = y.numel()
    own = {p.untyped_storage()._cdata for p in convs.parameters()}
    assert sum(s for a, s in found.items() if a not in own) <= numbers + 2 * numbers // 256 + 16 * 2 * 4
    out.backward()


def test_a_gate_shares_what_the_relu_saved():
    """Squeeze and excite: the product saves the activation, too."""
    x, gate = torch.randn(4, 8, 16, 16, requires_grad=True), torch.rand(4, 8, 1, 1, requires_grad=True)
    with counted() as found, saved_activations(8):
        y = F.relu(x * 1)
        z = y * torch.sigmoid(gate)
    assert max(found.values()) == y.numel()
    z.sum().backward()
    right = torch.autograd.grad((F.relu(x) * torch.sigmoid(gate)).sum(), gate)[0]
    assert torch.allclose(gate.grad, right, rtol=0.01)


class Cube(torch.autograd.Function):
    """Somebody's function; what it saves enters its gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def test_what_an_unknown_function_saves_is_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = mn.layers.weight_mean_class(nn.Conv2d)(8, 4, 3)

        def forward(self, x):
            y = F.relu(x)
            return self.conv(y).mean() + Cube.apply(y).mean()

    x = torch.randn(4, 8, 12, 12)
    net = Net()
    right, found = (gradients(net, x, bits, loss=torch.sum) for bits in (None, 4))
    assert torch.equal(found["input"], right["input"])
    assert not torch.equal(found["conv.weight"], right["conv.weight"])


def test_without_gradients_nothing_happens():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.MaxPool2d(2)), torch.randn(2, 3, 12, 12)
    with torch.no_grad(), counted() as found, saved_activations(4):
        y = model(x)
    assert not found
    assert torch.equal(y, model(x))
