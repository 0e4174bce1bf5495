"""bf16 on processors with instructions for it and without: the same rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.training import precision
from mimicnorm.training.precision import autocast

CPU = torch.device("cpu")
ONE_ULP = {"rtol": 2**-7, "atol": 2**-7}


def results(layer: nn.Module, x: Tensor, has_bf16: bool, monkeypatch) -> list[Tensor]:
    monkeypatch.setattr(precision, "_has_bf16", lambda: has_bf16)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with autocast(CPU, "bf16"):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            y.backward(torch.ones_like(y) / 16)
    return [y.float(), x.grad, layer.weight.grad]


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(4, 6, 3, padding=1, stride=2), (2, 4, 8, 8)),
        (nn.Conv2d(4, 8, 3, groups=2, bias=False), (2, 4, 8, 8)),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 4, 4)),
        (nn.Linear(16, 6), (4, 16)),
        (nn.Linear(16, 6, bias=False), (2, 3, 16)),
        (mn.layers.WeightMeanConv2d(4, 6, 3), (2, 4, 8, 8)),
    ],
)
def test_products_round_as_bf16_instructions_do(layer, shape, monkeypatch):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    torchs, ours = (results(layer, x, has, monkeypatch) for has in (True, False))
    for a, b in zip(torchs, ours, strict=True):
        torch.testing.assert_close(a, b, **ONE_ULP)


def test_without_instructions_products_run_in_fp32(monkeypatch):
    seen = []
    monkeypatch.setattr(precision, "_has_bf16", lambda: False)
    monkeypatch.setattr(precision, "_widened", lambda t: seen.append(t) or t)
    with autocast(CPU, "bf16"):
        F.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert [t.dtype for t in seen] == [torch.bfloat16, torch.bfloat16]


def test_other_precisions_are_left_alone(monkeypatch):
    monkeypatch.setattr(precision, "_has_bf16", lambda: False)
    monkeypatch.setattr(precision, "_widened", lambda _: pytest.fail("no product is to be computed in fp32"))
    with autocast(CPU, "fp32"):
        assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.float32
    with autocast(CPU, "bf16", compiled=True):
        assert F.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype is torch.bfloat16
