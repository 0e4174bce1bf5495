import pytest
import torch
from torch.nn import functional as F

from mimicnorm.integer import convolve
from mimicnorm.integer.convolve import Geometry


def in_twos(samples, *_):
    return [slice(first, min(first + 2, samples)) for first in range(0, samples, 2)]


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry((3, 3), (1, 1), (1, 1)),
        Geometry((3, 3), (2, 2), (1, 1)),
        Geometry((1, 1), (2, 2)),
        Geometry((1, 1)),
        Geometry((7, 7), (2, 2), (3, 3)),
        Geometry((3, 2), (2, 1), (0, 1)),
    ],
)
@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
def test_all_three_products_are_those_of_conv2d(monkeypatch, geometry, size):
    monkeypatch.setattr(convolve, "_parts", in_twos)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (5, *size, 3), dtype=torch.int8, generator=g)
    w = torch.randint(-127, 128, (4, *geometry.kernel, 3), dtype=torch.int8, generator=g)
    images = x.permute(0, 3, 1, 2).double().requires_grad_()
    weight = w.permute(0, 3, 1, 2).double().requires_grad_()
    right = F.conv2d(images, weight, None, geometry.stride, geometry.padding)
    out = convolve.forward(x, w.flatten(1), geometry)
    assert torch.equal(out.permute(0, 3, 1, 2).double(), right)
    error = torch.randint(-127, 128, out.shape, dtype=torch.int8, generator=g)
    right.backward(error.permute(0, 3, 1, 2).double())
    grad = convolve.weight_gradient(x, error, geometry).view(w.shape)
    assert torch.equal(grad.permute(0, 3, 1, 2).double(), weight.grad)
    back = convolve.input_gradient(error, w.flatten(1), geometry, size)
    assert torch.equal(back.permute(0, 3, 1, 2).double(), images.grad)


def test_a_large_batch_is_worked_on_in_several_parts():
    assert len(list(convolve._parts(64, 32 * 32, 64, 576))) > 1


def test_the_gradient_of_more_pixels_than_a_sum_of_32_bits_holds():
    codes = torch.full((1, 512, 512, 2), 127, dtype=torch.int8)
    assert (convolve.weight_gradient(codes, codes, Geometry()) == 127 * 127 * 512 * 512).all()
