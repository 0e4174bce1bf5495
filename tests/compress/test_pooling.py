from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gradients import counted, saved_in
from torch import nn

from mimicnorm.compress import saved_activations

WINDOWS = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0)},
    {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True},
    {"kernel_size": 5, "stride": 1, "padding": 2},
    {"kernel_size": (2, 3), "dilation": (3, 2), "stride": 1},
    {"kernel_size": 17, "stride": 1, "padding": 8},
]
SAME = {"kernel_size": 3, "stride": 1, "padding": 1}
CASES = [*((window, (13, 11)) for window in WINDOWS), *((SAME, narrow) for narrow in ((1, 1), (1, 7), (7, 1)))]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize(("window", "size"), CASES, ids=str)
def test_max_pooling_has_the_gradient_of_pytorch(window, size, bits, last):
    x = torch.randn(3, 6, *size).round(decimals=1)  # ties: the first maximum counts
    x = x.to(memory_format=torch.channels_last) if last else x
    pool, found = nn.MaxPool2d(**window), []
    for compression in (None, bits):
        x = x.detach().requires_grad_()
        with saved_in(compression):
            y = pool(x * 1)
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        y.backward(grad)
        found += [(y.detach(), x.grad)]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.AvgPool2d(2, divisor_override=3),
    ],
    ids=str,
)
def test_average_pooling_saves_nothing(pool):
    x = torch.randn(2, 3, 9, 9, requires_grad=True)
    pool(x * 1).square().sum().backward()
    right, x.grad = x.grad, None
    with counted() as found, saved_activations(32):
        y = pool(x * 1)
    assert not found
    y.square().sum().backward()
    assert torch.equal(x.grad, right)


@pytest.mark.parametrize(("kernel", "bits"), [(2, 2), (3, 4), (5, 8)])
def test_max_pooling_saves_places_only(kernel, bits):
    x = torch.randn(2, 8, 60, 60, requires_grad=True)
    with counted() as found, saved_activations(32):
        y = F.max_pool2d(x * 1, kernel)
    assert sum(found.values()) == -(-y.numel() * bits // 8)


def test_unbatched_one_dimensional_and_with_indices():
    x = torch.randn(3, 12, 12, requires_grad=True)
    with saved_activations(8):
        y = F.max_pool2d(x * 1, 2)
        _, indices = F.max_pool2d(x * 1, 2, return_indices=True)
        line = F.max_pool1d(x[0] * 1, 2)
    assert indices.dtype == torch.int64
    (y.sum() + line.sum()).backward()
    right = torch.autograd.grad(F.max_pool2d(x, 2).sum() + F.max_pool1d(x[0], 2).sum(), x)[0]
    assert torch.equal(x.grad, right)


def test_maxima_of_relu_outputs_use_all_codes():
    """They have no sign, so no bit is spent on one."""
    x = torch.randn(4, 16, 32, 32, requires_grad=True)
    conv = nn.Conv2d(16, 4, 1)
    right = torch.autograd.grad(conv(F.max_pool2d(F.relu(x), 2)).square().sum(), conv.weight)[0]
    errors = []
    for pool in (lambda t: F.max_pool2d(t, 2), lambda t: F.max_pool2d(t, 2) + 0):
        with saved_activations(4):
            loss = conv(pool(F.relu(x))).square().sum()
        errors.append((torch.autograd.grad(loss, conv.weight)[0] - right).norm())
    assert errors[0] < 0.7 * errors[1]
