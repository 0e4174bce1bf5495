import pytest
import torch
from torch.nn import functional as F

from mimicnorm.errors import IntegerError
from mimicnorm.integer.formats import Block
from mimicnorm.integer.head import Head, Q, _exp, _root
from mimicnorm.integer.parameters import Parameter
from mimicnorm.layers import LastNorm


def logits(*shape, exponent=-12, seed=0):
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(-20_000, 20_000, shape, dtype=torch.int32, generator=g)
    return Block(data, exponent), data.double() * 2.0**exponent


@pytest.mark.parametrize("scale", ["no last BN", None, 0.4, 3.0])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_loss_and_gradients_are_those_of_floating_point(scale, relu, positions):
    block, z = logits(24, *positions, 10)
    labels = torch.arange(24) % 10
    norm = None if scale == "no last BN" else LastNorm(10, dim=-1, logit_scale=scale is not None).double()
    scale = None if norm is None else scale
    if scale is not None:
        norm.logit_scale.data.fill_(scale)
    head = Head(norm, None if scale is None else Parameter("s", torch.tensor([scale]), decayed=False), relu=relu)
    z.requires_grad_()
    y = z if norm is None else norm(z)
    y = y.relu() if relu else y
    y = y.flatten(1, -2).mean(1) if positions else y
    right = F.cross_entropy(y, labels)
    (right * 24).backward()
    loss, correct, (error, exponent) = head.loss(block, labels)
    assert loss == pytest.approx(right.item(), abs=1e-3)
    assert correct == (y.argmax(1) == labels).sum()
    assert (error * 2.0**exponent - z.grad).norm() < 2e-3 * z.grad.norm()
    if scale is not None:
        got = head.scale_grad.data.double() * 2.0**head.scale_grad.exponent
        assert got.item() == pytest.approx(norm.logit_scale.grad.item(), rel=5e-3)
    if norm is not None:
        mean, var = head.statistics()
        assert torch.allclose(mean.double(), norm.running_mean, atol=1e-4)
        assert torch.allclose(var.double(), norm.running_var, rtol=1e-3)


def test_evaluation_uses_the_running_statistics():
    norm = LastNorm(5).double()
    head = Head(norm)
    for seed in range(3):
        block, z = logits(32, 5, seed=seed)
        head.loss(block, torch.zeros(32, dtype=torch.int64))
        norm(z)
    block, z = logits(4, 5, seed=9)
    assert torch.allclose(head.logits(block) * 2.0**-Q, norm.eval()(z).float(), atol=1e-3)


def test_constant_logits_do_not_divide_by_zero():
    block = Block(torch.full((4, 3), 5, dtype=torch.int32), -3)
    assert Head(LastNorm(3)).loss(block, torch.zeros(4).long())[0] == pytest.approx(1.0986, abs=1e-3)


def test_roots_and_exponentials():
    squares = torch.tensor([0, 1, 2, 24, 25, 2**60 - 1])
    assert _root(squares).tolist() == [1, 1, 1, 4, 5, 2**30 - 1]  # at least 1: it divides
    x = torch.linspace(-12, 0, 200, dtype=torch.float64)
    error = _exp((x * 2**Q).round().long()).double() / 2**30 / x.exp() - 1
    assert error.abs().max() < 1e-3


@pytest.mark.parametrize("norm", [LastNorm(3), None], ids=["last BN", "none"])
def test_evaluation_of_a_sample_does_not_depend_on_the_others(norm):
    head = Head(norm)
    data = torch.tensor([[1001, 5007, -3001], [2**24, 0, 0]], dtype=torch.int32)
    assert torch.equal(head.logits(Block(data, -10))[:1], head.logits(Block(data[:1], -10)))


@pytest.mark.parametrize("exponent", [-45, -28, 0, 12, 20])
def test_evaluation_is_right_for_every_unit(exponent):
    block, z = logits(4, 5, exponent=exponent)
    norm = LastNorm(5).double().eval()
    norm.running_mean.copy_(z.mean(0))
    norm.running_var.copy_(z.var(0))
    got = Head(norm).logits(block) * 2.0**-Q
    assert torch.allclose(got.double(), norm(z), atol=0.01)


def test_the_variance_of_many_large_logits_does_not_wrap():
    data = torch.full((2**16, 1, 2), 2**20 - 1, dtype=torch.int32)
    data[::2] *= -1
    head = Head(LastNorm(2))
    loss, _, _ = head.loss(Block(data, -20), torch.zeros(2**16, dtype=torch.int64))
    assert loss == pytest.approx(0.6931, abs=1e-3)
    assert head.statistics()[1].tolist() == pytest.approx([1.0, 1.0], rel=1e-3)


@pytest.mark.parametrize("exponent", [-60, 15, 30, 60])
def test_units_far_from_one_do_not_wrap(exponent):
    labels = torch.arange(16) % 7
    block, z = logits(16, 7, exponent=exponent)
    head = Head(LastNorm(7))
    loss, _, _ = head.loss(block, labels)
    usual, _, _ = Head(LastNorm(7)).loss(logits(16, 7, exponent=0)[0], labels)
    assert loss == pytest.approx(usual if exponent > 0 else 1.9459, abs=1e-3)  # below, all is less than eps
    if exponent > 0:
        right = torch.stack([torch.ones(7), z.var(0).float()]).T @ torch.tensor([0.9, 0.1])
        assert torch.allclose(head.statistics()[1], right, rtol=1e-3)
    plain, correct, _ = Head(None).loss(block, labels)
    assert plain >= 0
    if exponent == 15:
        assert correct == (z.argmax(1) == labels).sum()


def test_positions_without_a_mean_and_labels_out_of_range_are_refused():
    block, _ = logits(4, 2, 2, 5)
    with pytest.raises(IntegerError, match="fc: logits at 4 positions"):
        Head(LastNorm(5), pooled=False, name="fc").loss(block, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(IntegerError, match="labels 0 to 5: there are 5 classes"):
        Head(LastNorm(5)).loss(block, torch.tensor([0, 1, 2, 5]))
