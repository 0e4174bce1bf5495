import pytest
import torch
from torch import nn

from mimicnorm.integer import formats
from mimicnorm.integer.formats import Block
from mimicnorm.integer.parameters import Parameter


def update(parameter, data, exponent, lr=0.1, decay=0.0, momentum=7, key=1):
    parameter.update(Block(data, exponent), lr=lr, decay=decay, momentum=momentum, key=key)


@pytest.mark.parametrize("bits", [8, 16])
def test_row_means_stay_within_half_a_unit_of_the_master(bits):
    torch.manual_seed(0)
    p = Parameter("w", torch.randn(20, 75) * 0.1 + 0.05, bits=bits, centred=True)
    for step in range(30):
        assert (2 * p.master.long().sum(1).abs() <= 75 * 2 ** (16 - bits)).all()
        update(p, torch.randint(-(2**20), 2**20, (20, 75)) + 2**18, -20, key=step)


def test_a_step_is_that_of_sgd_within_the_master():
    torch.manual_seed(0)
    start, grads = torch.randn(8, 40).double() * 0.1, torch.randn(30, 8, 40).double() * 0.01
    twin = nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([twin], lr=0.1, momentum=0.875, weight_decay=5e-4)
    p = Parameter("w", start, bits=16)
    for step, grad in enumerate(grads):
        twin.grad = grad
        optimizer.step()
        update(p, (grad * 2**30).round().long(), -30, decay=5e-4, key=step)
    moved = (twin - start).norm()
    assert (p.value() - twin).norm() < 0.01 * moved


def test_steps_below_a_unit_add_up_only_with_random_rounding():
    start = torch.full((1, 64), 0.25)
    start[0, 0] = 0.5
    for key, moves in ((1, True), (None, False)):
        p = Parameter("w", start, bits=8)
        for step in range(200):  # each a tenth of a unit
            update(p, torch.ones(1, 64, dtype=torch.int64), -10, lr=0.2, momentum=0, key=key and key + step)
        change = (p.value() - start)[0, 1:].mean().item()
        assert (change == pytest.approx(-200 * 0.2 / 1024, rel=0.2)) is moves
        assert moves or change == 0


def test_the_exponent_follows_the_weights():
    p = Parameter("w", torch.tensor([[0.1, -0.2]]), bits=16)
    update(p, torch.tensor([[-10, 0]]), 0, lr=1.0, momentum=0)
    assert p.value()[0].tolist() == pytest.approx([10.1, -0.2], rel=0.01)
    update(p, torch.tensor([[10_048, -196]]), -10, lr=1.0, momentum=0)
    assert p.value()[0].tolist() == pytest.approx([10.1 - 9.8125, -0.2 + 0.1914], abs=0.002)
    assert p.codes().data.abs().max() >= 64


def test_a_residual_scalar_multiplies_the_copy():
    p = Parameter("w", torch.tensor([[1.0, -0.5]]), bits=16)
    codes, exponent = p.codes(multiplier=2048)
    assert (codes * 2.0**exponent).tolist() == [[0.5, -0.25]]


def test_nothing_moves_without_gradient_and_decay():
    p = Parameter("b", torch.tensor([0.5]))
    before = p.master.clone()
    update(p, torch.zeros(1, dtype=torch.int64), 0)
    assert torch.equal(p.master, before)


def test_chunks_give_the_same_bits(monkeypatch):
    results = []
    for size in (2**18, 100):
        monkeypatch.setattr("mimicnorm.integer.formats.CHUNK", size)
        assert (len(list(formats.chunks(20, 75))) > 1) == (size == 100)
        torch.manual_seed(0)
        p = Parameter("w", torch.randn(20, 75), bits=16, centred=True)
        for step in range(3):
            update(p, torch.randint(-(2**20), 2**20, (20, 75)), -20, decay=5e-4, key=step)
        results.append(p.state())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_weights_that_start_at_zero_take_small_steps_exactly():
    p = Parameter("w", torch.zeros(2, 3), bits=16)
    grad = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.0, -4.0]]) * 1e-7
    update(p, (grad.double() * 2.0**50).round().long(), -50, lr=0.1, momentum=0)
    assert torch.allclose(p.value(), -0.1 * grad, rtol=0.01, atol=1e-11)


def test_a_giant_step_saturates():
    p = Parameter("w", torch.tensor([[0.5, -0.5]]), bits=16)
    update(p, torch.tensor([[-(2**40), 2**40]]), 40, lr=1.0, momentum=0)
    first, second = p.value()[0].tolist()
    assert first > 2**10
    assert second < -(2**10)
