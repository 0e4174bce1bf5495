from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import condition_number


def kernel(m=5):
    x = torch.randn(m, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x @ x.T


def test_condition_number_of_an_equicorrelated_kernel():
    m, rho = 7, 0.4
    k = (1 - rho) * torch.eye(m, dtype=torch.float64) + rho
    assert condition_number(k) == pytest.approx((1 + (m - 1) * rho) / (1 - rho), rel=1e-12)
    assert condition_number(k, centered=True) == pytest.approx(1, rel=1e-12)


def test_a_constant_null_vector_counts_only_uncentred():
    m = 6
    centre = torch.eye(m, dtype=torch.float64) - 1 / m
    k = centre @ kernel(m) @ centre
    assert condition_number(k) == math.inf
    values = torch.linalg.eigvalsh(k)
    assert condition_number(k, centered=True) == pytest.approx(float(values[-1] / values[1]), rel=1e-9)
