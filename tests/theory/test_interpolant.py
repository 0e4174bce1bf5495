from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import resolve
from mimicnorm.theory.dual import moments
from mimicnorm.theory.interpolant import interpolant
from mimicnorm.theory.quadrature import following_kinks


@pytest.mark.parametrize("name", ["elu", "gelu_tanh", "mish"])
def test_interpolants_are_exact_between_their_nodes(name):
    phi = resolve(name)
    q = torch.tensor([0.26, 0.97, 3.0], dtype=torch.float64)
    table = interpolant(phi, q, q)
    rho = torch.tensor([[-0.99, 1e-3, 0.5], [0.3, 0.999, 1.0], [-0.2, 0.9, -1.0]], dtype=torch.float64)
    covariance, slope = table(slice(None), slice(None), rho, torch.acos(rho))
    mean = moments(phi, q).mean
    for i, j in ((0, 0), (0, 2), (1, 1), (1, 2), (2, 2)):
        exact = following_kinks(phi, float(q[i]), float(q[j]), math.acos(float(rho[i, j])))
        got = float(covariance[i, j] * (q[i] * q[j]).sqrt() + mean[i] * mean[j])
        assert got == pytest.approx(exact[0], rel=1e-12, abs=1e-13)
        assert float(slope[i, j]) == pytest.approx(exact[1], rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("name", ["elu", "tanh", "hardtanh"])
@pytest.mark.parametrize("angles", [(0.0, math.pi), (0.3, 0.31), (1.0, 2.5)])
def test_one_variance_takes_any_kinks_and_few_angles(name, angles):
    phi, q = resolve(name), torch.tensor([0.7], dtype=torch.float64)
    theta = torch.linspace(*angles, 5, dtype=torch.float64)[None]
    covariance, slope = interpolant(phi, q, q.expand(5), angles)(slice(None), slice(None), torch.cos(theta), theta)
    exact = torch.tensor([following_kinks(phi, 0.7, 0.7, float(t)) for t in theta[0]], dtype=torch.float64)
    assert torch.allclose(covariance[0] * q + moments(phi, q).mean ** 2, exact[:, 0], rtol=1e-12, atol=1e-13)
    assert torch.allclose(slope[0], exact[:, 1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["tanh", "softsign"])
def test_steep_activations_are_resolved_up_to_the_largest_variance(name):
    phi, q = resolve(name), torch.tensor([45.0], dtype=torch.float64)
    rho = torch.tensor([[0.9998, 0.7, -0.97]], dtype=torch.float64)
    slope = interpolant(phi, q, q.expand(3))(slice(None), slice(None), rho, torch.acos(rho))[1]
    exact = [following_kinks(phi, 45.0, 45.0, math.acos(float(r)))[1] for r in rho[0]]
    assert slope[0].tolist() == pytest.approx(exact, rel=2e-12)


@pytest.mark.parametrize(("name", "largest"), [("hardtanh", 1.0), ("relu6", 1.0), ("elu", 60.0)])
def test_there_is_none_where_it_would_not_converge(name, largest):
    q = torch.tensor([0.5, largest], dtype=torch.float64)
    assert interpolant(resolve(name), q, q) is None
