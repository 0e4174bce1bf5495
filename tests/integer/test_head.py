import pytest
import torch
from torch.nn import functional as F

from mimicnorm.integer.formats import Block
from mimicnorm.integer.head import Head, Q, _exp, _root
from mimicnorm.integer.parameters import Parameter
from mimicnorm.layers import LastNorm


def logits(*shape, exponent=-12, seed=0):
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(-20_000, 20_000, shape, dtype=torch.int32, generator=g)
    return Block(data, exponent), data.double() * 2.0**exponent


@pytest.mark.parametrize("scale", [None, 0.4, 3.0])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_loss_and_gradients_are_those_of_floating_point(scale, relu, positions):
    block, z = logits(24, *positions, 10)
    labels = torch.arange(24) % 10
    norm = LastNorm(10, dim=-1, logit_scale=scale is not None).double()
    if scale is not None:
        norm.logit_scale.data.fill_(scale)
    z.requires_grad_()
    y = norm(z)
    y = y.relu() if relu else y
    y = y.flatten(1, -2).mean(1) if positions else y
    right = F.cross_entropy(y, labels)
    (right * 24).backward()
    own = None if scale is None else Parameter("s", torch.tensor([scale]), decayed=False)
    head = Head(10, True, own, relu)
    outcome = head.loss(block, labels)
    assert outcome.loss == pytest.approx(right.item(), abs=1e-3)
    assert outcome.correct == (y.argmax(1) == labels).sum()
    error = outcome.error.data.view(z.shape).double() * 2.0**outcome.error.exponent
    assert (error - z.grad).norm() < 2e-3 * z.grad.norm()
    if scale is not None:
        got = head.scale_grad.data.double() * 2.0**head.scale_grad.exponent
        assert got.item() == pytest.approx(norm.logit_scale.grad.item(), rel=5e-3)
    mean, var = head.statistics()
    assert torch.allclose(mean.double(), norm.running_mean, atol=1e-4)
    assert torch.allclose(var.double(), norm.running_var, rtol=1e-3)


def test_without_a_last_norm_it_is_cross_entropy():
    block, z = logits(16, 7)
    labels = torch.arange(16) % 7
    z.requires_grad_()
    right = F.cross_entropy(z, labels)
    (right * 16).backward()
    outcome = Head(7, False, None, False).loss(block, labels)
    assert outcome.loss == pytest.approx(right.item(), abs=1e-3)
    error = outcome.error.data.view(z.shape) * 2.0**outcome.error.exponent
    assert (error - z.grad).norm() < 2e-3 * z.grad.norm()


def test_evaluation_uses_the_running_statistics():
    head, norm = Head(5, True, None, False), LastNorm(5).double()
    for seed in range(3):
        block, z = logits(32, 5, seed=seed)
        head.loss(block, torch.zeros(32, dtype=torch.int64))
        norm(z)
    block, z = logits(4, 5, seed=9)
    assert torch.allclose(head.logits(block) * 2.0**-Q, norm.eval()(z).float(), atol=1e-3)


def test_constant_logits_do_not_divide_by_zero():
    outcome = Head(3, True, None, False).loss(
        Block(torch.full((4, 3), 5, dtype=torch.int32), -3), torch.zeros(4).long()
    )
    assert outcome.loss == pytest.approx(1.0986, abs=1e-3)


def test_roots_and_exponentials():
    squares = torch.tensor([0, 1, 2, 24, 25, 2**60 - 1])
    assert _root(squares).tolist() == [1, 1, 1, 4, 5, 2**30 - 1]  # at least 1: it divides
    x = torch.linspace(-12, 0, 200, dtype=torch.float64)
    error = _exp((x * 2**Q).round().long()).double() / 2**30 / x.exp() - 1
    assert error.abs().max() < 1e-3
