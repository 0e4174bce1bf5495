from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import activation_stats, resolve
from mimicnorm.theory.series import hermite, low_order, sum_series


def test_coefficients_of_erf_are_known():
    # erf(z) = sum of odd terms, the first being E[z erf(z)] = 2 / sqrt(3 pi)
    a = hermite(resolve("erf"), torch.tensor(1.0, dtype=torch.float64))
    assert float(a[1]) == pytest.approx(2 / math.sqrt(3 * math.pi), rel=1e-14)
    assert float(a[::2].abs().max()) < 1e-14
    assert float((a**2).sum()) == pytest.approx(activation_stats("erf").second_moment, rel=1e-14)


def test_kinks_have_their_first_terms_only():
    one = torch.tensor(1.0, dtype=torch.float64)
    assert hermite(resolve("relu"), one) is None
    expected = torch.tensor([0.5, 1 / (2 * math.sqrt(math.pi)), 0.0], dtype=torch.float64)
    assert torch.allclose(low_order(resolve("relu"), one)[:3], expected, atol=1e-14)


@pytest.mark.parametrize("centred", [False, True])
def test_a_series_is_summed_with_its_derivative(centred):
    products, rho = torch.tensor([3.0, 2.0, 5.0], dtype=torch.float64), torch.tensor([0.0, -0.5, 1.0]).double()
    value, slope = sum_series(products, rho, torch.tensor(2.0).double(), centred)
    assert torch.allclose(value, (0.0 if centred else 3.0) + 2 * rho + 5 * rho**2)
    assert torch.allclose(slope, (2 + 10 * rho) / 2)
