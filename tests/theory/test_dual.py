from __future__ import annotations

import importlib
import math

import mpmath
import pytest
import torch
from torch.nn import functional as F

from mimicnorm.theory import TheoryError, Transition, dual, dual_slope, resolve
from mimicnorm.theory.activations import activation_stats, names
from mimicnorm.theory.dual import moments
from mimicnorm.theory.quadrature import following_kinks

from . import exact

module = importlib.import_module("mimicnorm.theory.dual")  # the package exports the function under the same name
RHOS = [-1.0, -0.9999, -0.9, -0.3, 0.0, 0.2, 0.7, 0.99, 0.9999, 1 - 1e-9, 1.0]


def test_relu_is_the_arc_cosine_kernel():
    rho = torch.linspace(-1, 1, 101, dtype=torch.float64)
    theta = torch.arccos(rho)
    expected = (torch.sin(theta) + (math.pi - theta) * torch.cos(theta)) / (2 * math.pi)
    assert torch.allclose(dual("relu", rho), expected, atol=1e-15, rtol=0)
    assert torch.allclose(dual_slope("relu", rho), (math.pi - theta) / (2 * math.pi), atol=1e-15, rtol=0)
    assert float(dual("relu", 1.0)) == 0.5


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu", "erf", "tanh", "silu", "elu", "sigmoid"])
@pytest.mark.parametrize(("q1", "q2"), [(1.0, 1.0), (0.3, 2.5)])
def test_closed_forms_and_sectors_agree_with_kink_following_quadrature(name, q1, q2):
    phi = resolve(name)
    quadrature = [following_kinks(phi, q1, q2, math.acos(rho)) for rho in RHOS]
    expected = torch.tensor(quadrature, dtype=torch.float64)
    rho = torch.tensor(RHOS, dtype=torch.float64)
    assert torch.allclose(dual(phi, rho, q1, q2), expected[:, 0], rtol=1e-12, atol=1e-13)
    assert torch.allclose(dual_slope(phi, rho, q1, q2), expected[:, 1], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", names())
def test_equal_inputs_have_the_moments_of_one(name):
    assert float(dual(name, 1 - 1e-15)) == pytest.approx(activation_stats(name).second_moment, rel=1e-12)


OTHERS = {
    "erf": lambda x: torch.erf(x / 2**0.5),
    "relu": lambda x: torch.relu(x) ** 3,
    "identity": lambda x: torch.sin(x),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_name_of_a_callable_selects_no_formula(name):
    function = OTHERS[name]
    value, slope = following_kinks(resolve(function), 1.0, 1.0, math.acos(0.5))
    function.__name__ = name
    assert float(dual(function, 0.5)) == pytest.approx(value, abs=1e-11)
    assert float(dual_slope(function, 0.5)) == pytest.approx(slope, abs=1e-11)


def test_a_forgotten_kink_is_refused_and_a_given_one_is_exact():
    def clipped(x):
        return x.clamp(-1, 1)

    with pytest.raises(TheoryError, match=r"pass resolve\(function, kinks=\[\.\.\.\]\)"):
        dual(clipped, 0.5)
    assert float(dual(resolve(clipped, kinks=[-1, 1]), 0.5)) == pytest.approx(float(dual("hardtanh", 0.5)), abs=1e-13)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "gelu", "silu", "softplus", "hardtanh", "erf"])
def test_torchs_own_functions_are_the_registered_ones(name):
    function = getattr(F, name, None) or getattr(torch, name)
    assert resolve(function) == resolve(name)
    assert torch.equal(dual(function, 0.5), dual(name, 0.5))


@pytest.mark.parametrize("name", ["gelu", "erf"])
@pytest.mark.parametrize("centred", [False, True])
def test_closed_forms_keep_their_digits_at_any_variance(name, centred):
    for q, p in ((1e-6, 1e-6), (0.1, 9e4), (1e8, 1e8), (1e10, 1.0), (1e16, 1e16), (1e120, 1e120)):
        for rho in (-0.9, -1e-6, 1e-9, 0.3, 1 - 2.0**-30, 1.0):
            rho_ = torch.tensor(rho, dtype=torch.float64)
            value, slope = module.pair_moments(resolve(name), q, p, rho_, centred=centred)
            with mpmath.workdps(300):
                numbers = [mpmath.mpf(a) for a in (q, p, rho)]
                covariance = numbers[2] * mpmath.sqrt(numbers[0] * numbers[1])
                expected = [float(e) for e in exact.pair(name, *numbers[:2], covariance, centred)]
            assert [float(value), float(slope)] == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("q", [1.0, 20.0, 49.0, 60.0])
def test_a_callable_is_as_exact_as_it_says(q):
    for rho in (0.3, 1.0):
        exact = (math.exp(-q * (1 - rho)) - math.exp(-q * (1 + rho))) / 2
        assert float(dual(torch.sin, rho, q)) == pytest.approx(exact, abs=1e-11)
    for large in (200.0, 400.0, 1e4):
        with pytest.raises(TheoryError, match="do not settle"):
            dual(torch.sin, 1.0, large)


class Unhashable:
    """A callable that compares by value, and so has no hash."""

    def __eq__(self, other):
        return True

    def __call__(self, x):
        return torch.tanh(x)


def test_callables_need_no_hash():
    t = Transition("weight_mean", Unhashable())
    assert t.chi1 == pytest.approx(Transition("weight_mean", "tanh").chi1, rel=1e-12)
    assert len(t.fixed_points) == 3


@pytest.mark.parametrize("name", ["tanh", "hardtanh"])
def test_many_correlations_take_an_interpolant_and_few_an_integral_each(name):
    rho = torch.linspace(-1, 1, 81, dtype=torch.float64)
    few = torch.cat([dual(name, part) for part in rho.chunk(4)])
    assert torch.allclose(dual(name, rho), few, atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", ["silu", "elu", "hardtanh"])
def test_moments_of_many_variances_are_those_of_each(name):
    phi, q = resolve(name), torch.logspace(-2, 1, 150, dtype=torch.float64)
    for many, few in zip(moments(phi, q), zip(*(moments(phi, v) for v in q), strict=True), strict=True):
        assert torch.allclose(many, torch.stack(few), rtol=1e-12, atol=1e-15)


def test_unequal_variances_without_a_formula_are_limited(monkeypatch):
    monkeypatch.setattr(module, "MAX_PAIRS", 3)
    with pytest.raises(TheoryError, match="4 pairs, over all layers"):
        dual("elu", torch.zeros(4), 1.0, 2.0)
