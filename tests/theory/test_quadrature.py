from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import activation_stats, resolve
from mimicnorm.theory.dual import pair_moments
from mimicnorm.theory.quadrature import following_kinks, hermite, normal_nodes, pair_integrals


def test_even_moments_are_double_factorials():
    z, w = normal_nodes()
    for power in (0, 2, 4, 8, 12):
        assert float((w * z**power).sum()) == pytest.approx(math.prod(range(1, power, 2)), rel=1e-13)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 7.0, 100.0, 1e4])
def test_a_kink_off_the_origin_is_exact_at_every_scale(scale):
    kink = 0.37
    z, w = normal_nodes((kink,), scale)
    got = float((w * (scale * z - kink).clamp(min=0)).sum())
    d = kink / scale
    density, above = math.exp(-(d**2) / 2) / math.sqrt(2 * math.pi), math.erfc(d / math.sqrt(2)) / 2
    assert got == pytest.approx(scale * density - kink * above, rel=1e-12, abs=1e-300)


ONE = torch.ones(1, dtype=torch.float64)


def test_hermite_coefficients_of_erf_and_relu_are_known():
    # erf(z) = sum of odd terms, the first being E[z erf(z)] = 2 / sqrt(3 pi)
    erf, relu = (hermite(resolve(name), ONE)[0] for name in ("erf", "relu"))
    assert float(erf[1]) == pytest.approx(2 / math.sqrt(3 * math.pi), rel=1e-14)
    assert float(erf[::2].abs().max()) < 1e-14
    assert float((erf**2).sum()) == pytest.approx(activation_stats("erf").second_moment, rel=3e-4)
    expected = torch.tensor([1 / math.sqrt(2 * math.pi), 0.5, 1 / (2 * math.sqrt(math.pi)), 0.0], dtype=torch.float64)
    assert torch.allclose(relu[:4], expected, atol=1e-14)


@pytest.mark.parametrize("name", ["silu", "tanh", "mish", "softplus", "gelu_tanh", "elu", "softsign", "squared_relu"])
@pytest.mark.parametrize(("q1", "q2"), [(1.0, 1.0), (0.3, 2.5), (49.0, 49.0), (49.0, 0.01)])
def test_sectors_agree_with_kink_following_panels(name, q1, q2):
    phi = resolve(name)
    for angle in (0.0, 1e-9, 0.01, 1.0, 1.55, math.pi):
        over_rho, slope = pair_integrals(phi, q1 * ONE, q2 * ONE, angle)
        covariance = over_rho * math.cos(angle)
        means = [float(hermite(phi, q * ONE)[0, 0]) for q in (q1, q2)]
        expected = following_kinks(phi, q1, q2, angle)
        assert float(covariance) == pytest.approx(expected[0] - math.prod(means), abs=1e-12 * math.sqrt(q1 * q2))
        assert float(slope) == pytest.approx(expected[1], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["silu", "hardtanh"])
def test_small_correlations_keep_their_digits(name):
    # the covariance is E[phi']^2 rho + O(rho^2): as a difference from the means it would be off by 1e-16 / rho
    over_rho, slope = pair_integrals(resolve(name), ONE, ONE, math.pi / 2 - 1e-12)
    assert float(over_rho) == pytest.approx(float(slope), rel=1e-11)
    rho = torch.tensor(1e-9, dtype=torch.float64)
    value, _ = pair_moments(resolve(name), 1.0, 1.0, rho, centred=True, expected=1)
    assert float(value / rho) == pytest.approx(float(slope), rel=1e-8)
