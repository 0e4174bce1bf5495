"""Kernels against numbers that an independent library computed: unnormalised inputs, biases, residual blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mimicnorm.theory import Transition, kernels, residual_kernels

NUMBERS = json.loads((Path(__file__).parent / "neural_tangents.json").read_text())
X, X2 = (torch.tensor(NUMBERS[k], dtype=torch.float64) for k in ("x", "x2"))
ACTIVATIONS: dict[str, Any] = {"leaky": nn.LeakyReLU(0.1)}


def arguments(row: dict) -> tuple[Transition, dict[str, float]]:
    w2, b2 = row["w_std"] ** 2, row["b_std"] ** 2
    activation = ACTIVATIONS.get(row["activation"], row["activation"])
    return Transition("straight", activation, sigma_w2=w2, sigma_b2=b2), {"first_w2": w2, "first_b2": b2}


def assert_equal(result: Tensor, wanted: list) -> None:
    torch.testing.assert_close(result, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=0)


@pytest.mark.parametrize("row", NUMBERS["plain"], ids=lambda r: f"{r['activation']}-{r['activations']}-{r['b_std']}")
def test_plain_networks(row):
    transition, first = arguments(row)
    own, cross = (kernels(X, row["activations"] + 1, transition, x2, **first) for x2 in (None, X2))
    assert_equal(own.nngp, row["nngp"])
    assert_equal(own.ntk, row["ntk"])
    assert_equal(cross.nngp, row["cross_nngp"])
    assert_equal(cross.ntk, row["cross_ntk"])


@pytest.mark.parametrize("row", NUMBERS["residual"], ids=lambda r: f"{r['activation']}-{r['blocks']}x{r['layers']}")
def test_residual_networks(row):
    transition, first = arguments(row)
    result = residual_kernels(
        X, row["blocks"], transition, layers_per_block=row["layers"], scale=1.0, readout=True, **first
    )
    assert_equal(result.nngp, row["nngp"])
    assert_equal(result.ntk, row["ntk"])
