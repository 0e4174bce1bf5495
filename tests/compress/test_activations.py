from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gradients import counted, gradients, saved_in
from torch import nn

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(True),
    "relu6": nn.ReLU6(),
    "relu6 in place": nn.ReLU6(True),
    "hardtanh": nn.Hardtanh(-0.7, 0.4),
    "leaky relu": nn.LeakyReLU(0.1),
    "leaky relu in place": nn.LeakyReLU(0.1, True),
    "leaky relu, slope 0": nn.LeakyReLU(0.0),
    "leaky relu, slope below 0": nn.LeakyReLU(-0.3),
    "hardsigmoid": nn.Hardsigmoid(),
    "hardsigmoid in place": nn.Hardsigmoid(True),
    "prelu": nn.PReLU(),
}


def net(activation: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), activation, nn.Conv2d(8, 8, 3, padding=1), activation, nn.Conv2d(8, 4, 3, stride=2)
    )


@pytest.mark.parametrize("bits", [32, 8, 4, 2])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_flows_back_is_bit_equal(name, bits):
    model, x = net(ACTIVATIONS[name]), 3 * torch.randn(4, 3, 14, 14)
    right, found = gradients(model, x, None), gradients(model, x, bits)
    exact = right.keys() if bits == 32 else [n for n in right if n == "input" or n.endswith("bias")]
    for key in exact:
        assert torch.equal(found[key], right[key]), key
    for key in right:
        assert (found[key] - right[key]).norm() <= right[key].norm() * {32: 0, 8: 0.05, 4: 0.5, 2: 3}[bits], key


@pytest.mark.parametrize("name", ["relu6", "hardtanh", "leaky relu", "hardsigmoid"])
def test_the_lossless_tier_saves_one_tensor_instead_of_two(name):
    model, x = net(ACTIVATIONS[name]), torch.randn(2, 3, 14, 14)
    saved = []
    for bits in (None, 32):
        with counted() as found, saved_in(bits):
            y = model(x)
        saved.append(sum(found.values()) - sum(p.untyped_storage().nbytes() for p in model.parameters()) - x.nbytes)
        del y
    activations = 2 * 8 * 12 * 12 * 4 * 2
    assert saved[1] <= activations + sum(b.nbytes for b in model.parameters())  # the parameters were counted by some
    assert saved[0] >= 2 * activations - 4096


def test_in_place_on_a_view():
    a = torch.randn(6, 400, requires_grad=True)
    grads = []
    for bits in (None, 8):
        b = a * 1
        with saved_in(bits):
            b[:, :300].relu_()
        (b * torch.arange(400)).sum().backward()
        grads.append(a.grad)
        a.grad = None
    assert torch.equal(*grads)


def test_gradients_in_another_memory_format():
    x = torch.randn(2, 8, 9, 9, requires_grad=True)
    grads = []
    for last in (False, True):
        with saved_in(4):
            y = F.relu(x * 1)
        y.backward(torch.ones(2, 8, 9, 9).to(memory_format=torch.channels_last if last else torch.contiguous_format))
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)
    assert torch.equal(grads[0], (x > 0).float())


@pytest.mark.parametrize("call", [torch.relu, torch.relu_, F.relu, torch.Tensor.relu, torch.Tensor.relu_, F.relu_])
def test_every_way_to_call_relu(call):
    x = torch.randn(64, 64, requires_grad=True)
    with counted() as found, saved_in(8):
        y = call(x * 1)
    assert sum(found.values()) == 64 * 64 + 2 * 16
    y.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())
