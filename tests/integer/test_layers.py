from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mimicnorm.errors import IntegerError
from mimicnorm.integer import formats, layers
from mimicnorm.integer.convolve import Geometry
from mimicnorm.integer.counter import key
from mimicnorm.integer.formats import Block


def at(first: int = 0, **options) -> layers.Pass:
    return layers.Pass(first, lambda place: key(0, place), **options)


def codes(*shape: int, low: int = -127) -> torch.Tensor:
    return torch.randint(low, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("size", [(6, 6), (7, 5)])
@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize("geometry", [Geometry((2, 2), (2, 2)), Geometry((3, 3), (2, 2), (1, 1))])
def test_max_pooling_is_that_of_pytorch(size, ceil, geometry):
    x = codes(2, *size, 4)
    pool = layers.MaxPool("pool", geometry, ceil)
    ((out, unit),), saved = pool.forward(at(), [Block(x, -3)])
    images = x.permute(0, 3, 1, 2).double().requires_grad_()
    right = F.max_pool2d(images, geometry.kernel, geometry.stride, geometry.padding, ceil_mode=ceil)
    assert unit == -3
    assert torch.equal(out.permute(0, 3, 1, 2).double(), right)
    error = codes(*out.shape)
    ((back, _),) = pool.backward(at(), saved, [Block(error, 0)])[0]
    right.backward(error.permute(0, 3, 1, 2).double())
    assert torch.equal(back.permute(0, 3, 1, 2).double(), images.grad)


def test_requantising_uses_the_exponent_of_the_step_before_and_saturates():
    op = layers.Requantise("relu", relu=True)
    op.output.exponent = 0
    x = torch.tensor([[-50, 3, 1000]], dtype=torch.int32)
    ((out, unit),), _ = op.forward(at(), [Block(x, 0)])
    assert (out.tolist(), unit) == ([[0, 3, 127]], 0)
    op.output.advance()
    ((out, unit),), _ = op.forward(at(), [Block(x, 0)])
    assert (out.tolist(), unit) == ([[0, 0, 125]], 3)


def test_a_sum_of_blocks_is_requantised_as_one():
    op = layers.Requantise("sum", relu=False)
    op.output.exponent = 1
    terms = [Block(torch.tensor([[5]], dtype=torch.int8), 2), Block(torch.tensor([[-100]], dtype=torch.int32), -3)]
    ((out, unit),), _ = op.forward(at(), terms)
    assert out.item() * 2**unit == pytest.approx(20 - 12.5, abs=1)


def test_errors_are_masked_and_rounded_at_random_by_index():
    op = layers.Requantise("relu", relu=True)
    saved = torch.ones(64, 32, dtype=torch.int8)
    saved[:, 0] = 0
    op.error.exponent = 4
    error = [Block(torch.full((64, 32), 36, dtype=torch.int32), 0)]  # 2.25 codes
    ((whole, unit),) = op.backward(at(), saved, error)[0]
    assert unit == 4
    assert not whole[:, 0].any()
    assert set(whole[:, 1:].unique().tolist()) == {2, 3}
    assert whole[:, 1:].double().mean() == pytest.approx(2.25, abs=0.05)
    half = [Block(error[0].data[40:], 0)]
    assert torch.equal(op.backward(at(40), saved[40:], half)[0][0].data, whole[40:])
    ((nearest, _),) = op.backward(at(stochastic=False), saved, error)[0]
    assert nearest[:, 1:].unique().tolist() == [2]


def test_means_concats_views_and_dropout():
    x = codes(3, 4, 4, 8)
    ((mean, unit),), saved = layers.MeanPool("pool").forward(at(), [Block(x, 0)])
    assert torch.equal(mean.double() * 2.0**unit, x.double().mean((1, 2), keepdim=True))
    ((back, unit),) = layers.MeanPool("pool").backward(at(), saved, [Block(codes(3, 1, 1, 8), 0)])[0]
    assert torch.equal(back.double() * 2.0**unit, (codes(3, 1, 1, 8).double() / 16).expand(x.shape))
    cat = layers.Concat("cat")
    ((out, unit),), saved = cat.forward(at(), [Block(x, 0)], [Block(x, 2)])
    assert unit == 2
    assert torch.equal(out[..., 8:], x)
    assert (out[..., :8].double() * 4 - x.double()).abs().max() <= 2
    assert [b[0].data.shape[-1] for b in cat.backward(at(), saved, [Block(out, 0)])] == [8, 8]
    flat = layers.Flatten("flat")
    ((out, _),), saved = flat.forward(at(), [Block(x, 0)])
    assert torch.equal(out, x.permute(0, 3, 1, 2).flatten(1))
    assert torch.equal(flat.backward(at(), saved, [Block(out, 0)])[0][0].data, x)
    drop = layers.Dropout("drop", 1)
    ((out, unit),), mask = drop.forward(at(), [Block(x, 0)])
    assert unit == 1
    assert torch.equal(out, x * mask)
    assert 0.3 < mask.double().mean() < 0.7
    assert drop.forward(at(training=False), [Block(x, 0)])[0][0].data is x


def test_a_sum_too_small_for_its_exponent_is_seen_in_the_next_step():
    op = layers.Requantise("sum", relu=False)
    op.output.exponent = op.error.exponent = 0
    terms = [Block(codes(4, 3), -40), Block(codes(4, 3), -40)]
    for _ in range(2):
        ((out, _),), _ = op.forward(at(calibrating=op.output.exponent is None), terms)
        ((back, _),) = op.backward(at(calibrating=op.error.exponent is None), None, terms)[0]
        for watch in (op.output, op.error):
            watch.advance()
            watch.forget()
    assert out.any()
    assert back.any()


def test_a_step_whose_relu_is_closed_leaves_the_exponent():
    op = layers.Requantise("relu", relu=True)
    op.output.exponent, op.output.unit = -3, 5
    op.forward(at(), [Block(torch.full((1, 4), -1000, dtype=torch.int32), 0)])
    op.output.advance()
    assert op.output.exponent == -3


@pytest.mark.parametrize("pixels", [7, 14, 56, 150, 256])
def test_the_mean_over_positions_has_no_bias(pixels):
    x = torch.full((1, pixels, pixels, 2), 100, dtype=torch.int8)
    ((mean, unit),), saved = layers.MeanPool("pool").forward(at(), [Block(x, 0)])
    assert mean[0, 0, 0, 0].item() * 2.0**unit == pytest.approx(100, rel=2e-3)
    ((back, unit),) = layers.MeanPool("pool").backward(at(), saved, [Block(x[:, :1, :1], 0)])[0]
    assert back.sum(dtype=torch.int64).item() * 2.0**unit == pytest.approx(200, rel=2e-3)


def test_a_mean_over_more_positions_than_its_reciprocal_can_count_is_refused():
    with pytest.raises(IntegerError, match="pool: a mean over 66049 positions"):
        layers.MeanPool("pool").forward(at(), [Block(torch.zeros(1, 257, 257, 1, dtype=torch.int8), 0)])


def test_a_sum_of_different_shapes_is_refused():
    with pytest.raises(IntegerError, match="block: a sum of different shapes"):
        layers.Add("block").forward(at(), [Block(codes(2, 4, 4, 3), 0)], [Block(codes(2, 1, 1, 3), 0)])


def test_errors_that_overlap_in_max_pooling_do_not_wrap():
    pool = layers.MaxPool("pool", Geometry((3, 3), (1, 1), (1, 1)), False)
    x = torch.zeros(1, 3, 3, 1, dtype=torch.int8)
    x[0, 1, 1] = 9  # the largest of nine windows
    _, saved = pool.forward(at(), [Block(x, 0)])
    error = torch.full((1, 3, 3, 1), 2**28, dtype=torch.int32)
    ((back, _),) = pool.backward(at(), saved, [Block(error, 0)])[0]
    assert back[0, 1, 1, 0] > 2**28


def test_chunks_give_the_same_bits(monkeypatch):
    x, error = (torch.randint(-(2**20), 2**20, (12, 5, 5, 8), dtype=torch.int32) for _ in range(2))
    results = []
    for size in (2**18, 300):
        monkeypatch.setattr("mimicnorm.integer.formats.CHUNK", size)
        assert (len(list(formats.chunks(12, 200))) > 1) == (size == 300)
        op = layers.Requantise("relu", relu=True)
        op.output.exponent, op.error.exponent = 13, 15
        ((out, _),), saved = op.forward(at(), [Block(x, 0), Block(x.flip(0), -1)])
        ((back, _),) = op.backward(at(), saved, [Block(error, 0)])[0]
        results.append((out, back, op.output.peak, op.error.peak, op.output.saturated))
    one, other = results
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])
    assert one[2:] == other[2:]
