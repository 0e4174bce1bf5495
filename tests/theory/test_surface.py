from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch

from mimicnorm.theory import resolve
from mimicnorm.theory.surface import surface

dual = importlib.import_module("mimicnorm.theory.dual")  # the package exports the function under the same name


@pytest.mark.parametrize("name", ["elu", "gelu_tanh", "mish"])
def test_interpolants_are_exact_between_their_nodes(name):
    phi = resolve(name)
    q = torch.tensor([0.26, 0.97, 3.0], dtype=torch.float64)
    table = surface(phi, q, q)
    rho = torch.tensor([[-0.99, 1e-3, 0.5], [0.3, 0.999, 1.0], [-0.2, 0.9, -1.0]], dtype=torch.float64)
    covariance, slope = table(slice(None), slice(None), rho)
    mean = dual.mean_at(phi, q)
    for i, j in ((0, 0), (0, 2), (1, 1), (1, 2), (2, 2)):
        exact = dual._double_quadrature(phi, float(q[i]), float(q[j]), float(rho[i, j]))
        got = float(covariance[i, j] * (q[i] * q[j]).sqrt() + mean[i] * mean[j])
        assert got == pytest.approx(exact[0], rel=1e-12, abs=1e-13)
        assert float(slope[i, j]) == pytest.approx(exact[1], rel=1e-12, abs=1e-13)


def test_layers_of_like_variances_share_one():
    one, two = (surface(resolve("silu"), q, q + 0.01) for q in (torch.tensor([0.5, 0.9]), torch.tensor([0.3, 0.8])))
    assert one.fit is two.fit


@pytest.mark.parametrize(("name", "largest"), [("hardtanh", 1.0), ("relu6", 1.0), ("elu", 60.0)])
def test_there_is_none_where_it_would_not_converge(name, largest):
    q = torch.tensor([0.5, largest], dtype=torch.float64)
    assert surface(resolve(name), q, q) is None


def test_a_kink_off_zero_makes_a_cone_that_no_polynomial_follows():
    phi, chebyshev = resolve("hardtanh"), np.polynomial.chebyshev

    def slope(log_q):
        return dual._double_quadrature(phi, 1.0, math.exp(log_q), 1.0)[1]

    errors = []
    for count in (16, 32, 64):
        nodes = chebyshev.chebpts1(count)
        fit = chebyshev.chebfit(nodes, [slope(math.log(4) * t) for t in nodes], count - 1)
        errors.append(abs(chebyshev.chebval(0.0, fit) - slope(0.0)))
    assert errors == pytest.approx([0.0106, 0.0052, 0.0026], rel=0.02)
