"""Inputs that are equal, opposite, or nearly so: where a rounding error of 1 - rho would show."""

from __future__ import annotations

import mpmath
import pytest
import torch

from mimicnorm.theory import Transition, kernels, residual_kernels

from . import exact
from .exact import gaussian


def correlations(result):
    return result.nngp.diagonal() / torch.sqrt(result.rows * result.columns)


@pytest.mark.parametrize("kind", ["straight", "batch_norm"])
@pytest.mark.parametrize("name", ["erf", torch.sin])
def test_an_odd_activation_keeps_opposite_inputs_opposite(kind, name):
    x, t = gaussian(20, 784), Transition(kind, name, sigma_w2=6.0)
    for result in (kernels(x, 50, t, -x), residual_kernels(x, 4, t, -x)):
        assert float((correlations(result) + 1).abs().max()) < 1e-12
    assert float(correlations(kernels(x, 2, t, -x, first_b2=1.0)).min()) > -0.999


def test_relu_and_even_activations_see_exactly_minus_one():
    x, t = gaussian(20, 784), Transition("straight", "leaky_relu")
    assert float(kernels(x, 2, Transition(), -x).ntk.abs().diagonal().max()) == 0
    # E[phi phi] = -0.01 q and E[phi' phi'] = 0.01
    result = kernels(x, 2, t, -x)
    assert torch.allclose(result.ntk.diagonal(), -0.02 * t.effective_w2 * x.square().mean(1), rtol=1e-13)
    even = kernels(x, 60, Transition("weight_mean", torch.nn.LeakyReLU(-1.0)), -x)
    assert torch.allclose(even.nngp.diagonal(), even.rows, rtol=1e-10)


@pytest.mark.parametrize("name", ["relu", "gelu", "tanh"])
def test_duplicates_are_known_at_any_length(name):
    x = gaussian(8, 150_528)
    twice = kernels(torch.cat([x, x]), 40, Transition("weight_mean", name)).ntk
    assert torch.allclose(twice[:8, 8:].diagonal(), twice[:8, :8].diagonal(), rtol=1e-12)
    tripled = kernels(x, 3, Transition("weight_mean"), 3 * x).ntk
    assert torch.allclose(tripled.diagonal(), 3 * kernels(x, 3, Transition("weight_mean")).ntk.diagonal(), rtol=1e-12)


def test_zero_vectors_with_a_bias_are_equal_inputs():
    x = torch.cat([torch.zeros(2, 5, dtype=torch.float64), gaussian(1, 5)])
    result = kernels(x, 60, Transition("weight_mean"), first_b2=0.5)
    assert float(result.ntk[0, 1]) == pytest.approx(float(result.ntk[0, 0]), rel=1e-12)


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
@pytest.mark.parametrize("bias", [0.0, 0.1])
@pytest.mark.parametrize("apart", [1e-2, 1e-5, 1e-9])
def test_nearly_equal_inputs_keep_their_distance(kind, bias, apart):
    x, t = gaussian(1, 20), Transition(kind, sigma_b2=bias)
    y = x + apart * gaussian(1, 20, seed=1)
    with mpmath.workdps(50):
        for depth in (2, 10, 50):
            state = exact.start(x[0], y[0], bias)
            for _ in range(depth - 1):
                state = exact.layer("relu", state, t)
            assert exact.error(kernels(x, depth, t, y, first_b2=bias), state) < 3e-11
            assert exact.error(kernels(y, depth, t, x, first_b2=bias), state) < 3e-11


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
def test_nearly_equal_inputs_of_residual_networks(kind):
    x, t = gaussian(1, 20), Transition(kind)
    y = x + 1e-6 * gaussian(1, 20, seed=1)
    with mpmath.workdps(50):
        state = exact.start(x[0], y[0])
        for block in range(16):
            branch = state
            for _ in range(2):
                branch = exact.layer("relu", branch, t)
            state = tuple(a + b / (block + 1) for a, b in zip(state, branch, strict=True))
        assert exact.error(residual_kernels(x, 16, t, y, scale=[(n + 1) ** -0.5 for n in range(16)]), state) < 1e-12


def test_batch_norm_takes_the_norms_of_nearly_equal_inputs_along():
    # two inputs and their mean: shifts of either sign, and by hand what the recursion makes of them
    x = gaussian(1, 20) * torch.tensor([[1.0], [1 + 1e-6], [0.5]], dtype=torch.float64)
    x[1] += 1e-7 * gaussian(20, seed=1)
    result = kernels(x, 2, Transition("batch_norm"))
    with mpmath.workdps(50):
        rows = [[mpmath.mpf(v) for v in row.tolist()] for row in x]
        power = [mpmath.fdot(r, r) / 20 for r in rows]
        mean = [mpmath.sqrt(q / (2 * mpmath.pi)) for q in power]
        shift = [m - sum(mean) / 3 for m in mean]
        whole = sum(q / 2 - m**2 + s**2 for q, m, s in zip(power, mean, shift, strict=True)) / 3
        for i, j in ((0, 1), (0, 2), (1, 2)):
            k = mpmath.fdot(rows[i], rows[j]) / 20
            value, slope = exact.pair("relu", power[i], power[j], k, True)
            new = (value + shift[i] * shift[j]) / whole
            assert float(result.nngp[i, j]) == pytest.approx(float(new), rel=1e-13)
            assert float(result.ntk[i, j]) == pytest.approx(float(new + slope * k / whole), rel=1e-13)
