from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory.quadrature import normal_nodes


@pytest.mark.parametrize("power", [0, 2, 4, 8, 12])
def test_even_moments_are_double_factorials(power):
    z, w = normal_nodes()
    expected = math.prod(range(1, power, 2))
    assert float((w * z**power).sum()) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("scale", [1e-3, 0.3, 1.0, 7.0, 100.0, 1e4])
def test_a_kink_off_the_origin_is_exact_at_every_scale(scale):
    kink = 0.37
    z, w = normal_nodes((kink,), scale)
    got = float((w * (scale * z - kink).clamp(min=0)).sum())
    d = kink / scale
    density, above = math.exp(-(d**2) / 2) / math.sqrt(2 * math.pi), math.erfc(d / math.sqrt(2)) / 2
    assert got == pytest.approx(scale * density - kink * above, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("scale", [1.0, 10.0, 300.0])
def test_a_steep_smooth_function_is_resolved(scale):
    # E[tanh(s z) z] = s E[1 - tanh(s z)^2]: two different integrands
    z, w = normal_nodes((), scale)
    t = torch.tanh(scale * z)
    assert float((w * t * z).sum()) == pytest.approx(scale * float((w * (1 - t**2)).sum()), rel=1e-12)
