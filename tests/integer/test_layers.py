from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mimicnorm.errors import IntegerError
from mimicnorm.integer import layers
from mimicnorm.integer.convolve import Geometry
from mimicnorm.integer.counter import key
from mimicnorm.integer.formats import Block
from mimicnorm.integer.operation import Pass


def at(first: int = 0, **options) -> Pass:
    return Pass(first, lambda place: key(0, place), **options)


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
