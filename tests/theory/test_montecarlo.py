from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import TheoryError, Transition, montecarlo


def agrees(estimate, relative):
    """Within four standard errors, and the error small enough for that to mean something."""
    assert estimate.sigmas < 4, str(estimate)
    assert estimate.standard_error < relative * max(abs(estimate.predicted), 0.1), str(estimate)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "silu", "tanh", "erf"])
@pytest.mark.parametrize("rho", [-0.9, 0.5, 0.99])
def test_dual_activations(activation, rho):
    agrees(montecarlo.dual_activation(activation, rho, count=30), 0.05)


@pytest.mark.parametrize("n", [8, 64])
def test_lemma_1_has_the_fan_in(n):
    estimate = montecarlo.lemma1(n, 0.5, count=300)
    agrees(estimate, 0.05)
    # with n_out = 32 in the appendix's place the prediction would be this, and is refuted at n = 8
    printed = estimate.predicted * (31 / 32) * n / (n - 1)
    assert n != 8 or abs(estimate.value - printed) > 4 * estimate.standard_error


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
def test_theorem_1(kind):
    agrees(montecarlo.theorem1(kind, depth=4, width=256, points=6, count=8), 0.1)


@pytest.mark.parametrize("n", [4, 32])
def test_theorem_2_holds_at_any_width(n):
    agrees(montecarlo.theorem2(n, 0.5, count=20), 0.05)


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
@pytest.mark.parametrize(("rho", "depth"), [(1.0, 1), (-0.9, 2), (0.9, 5)])
def test_theorem_3(kind, rho, depth):
    agrees(montecarlo.theorem3(kind, rho, depth, width=256, count=30), 0.35)


@pytest.mark.parametrize("activation", ["relu", "silu", "erf"])
def test_tangent_kernels(activation):
    agrees(montecarlo.tangent_kernel(Transition("weight_mean", activation), count=12), 0.1)


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "silu", "tanh", "erf"])
def test_fifty_layers_of_every_activation(kind, activation):
    # with a bias of 0.4 every variance map attracts from anywhere and gradients shrink: narrow networks will do
    t = Transition(kind, activation, sigma_b2=0.4)
    agrees(montecarlo.theorem3(t, 0.5, 49, width=96, count=12), 0.1)
    agrees(montecarlo.tangent_kernel(t, 0.5, 50, width=96, outputs=1, count=8), 0.25)


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
def test_gradients_grow_by_chi1(kind):
    agrees(montecarlo.gradient_growth(kind, width=400, batch=16, count=10), 0.02)


def test_small_batches_make_batch_norm_explode():
    small = montecarlo.gradient_growth("batch_norm", width=128, batch=4, count=6)
    large = montecarlo.gradient_growth("batch_norm", width=128, batch=256, count=3)
    assert small.value - 3 * small.standard_error > 2
    assert large.value == pytest.approx(large.predicted, rel=0.05)


def test_correlation_band():
    agrees(montecarlo.correlation_spread(width=200, depth=20, pairs=100, count=6), 0.1)
    assert 1.96 * montecarlo.correlation_band(300) == pytest.approx(0.201, abs=5e-4)
    assert montecarlo.correlation_band(300) * math.sqrt(300) == pytest.approx(1.779, abs=5e-4)


@pytest.mark.parametrize(("kind", "scale"), [("weight_mean", "sqrt"), ("weight_mean", "none"), ("batch_norm", 1.0)])
def test_residual_variances(kind, scale):
    agrees(montecarlo.residual_variance(kind, scale, 4, width=128, batch=64, count=10), 0.15)


def test_an_estimate_prints_what_was_compared():
    estimate = montecarlo.dual_activation("relu", 0.0, count=4, seed=5)
    assert "predicted 0.15915" in str(estimate)
    assert (estimate.count, estimate.seed) == (4, 5)
    assert montecarlo.dual_activation("relu", 0.0, count=4, seed=5) == estimate


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: montecarlo.dual_activation(count=1), "count=1: use a whole number of at least 2"),
        (lambda: montecarlo.theorem1(count=1), "count=1"),
        (lambda: montecarlo.lemma1(seed="a"), "seed='a'"),
        (lambda: montecarlo.lemma1(1), "n=1: use a whole number of at least 2"),
        (lambda: montecarlo.theorem1(points=1), "points=1"),
        (lambda: montecarlo.theorem2(rho=1.5), "outside [-1, 1]"),
        (lambda: montecarlo.theorem3(rho=1.5), "outside [-1, 1]"),
        (lambda: montecarlo.gradient_growth(depth=2), "at least 3"),
        (lambda: montecarlo.correlation_band(0), "width=0"),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(TheoryError) as caught:
        call()
    assert says in str(caught.value)


def test_pairs_have_their_correlation():
    u, v = montecarlo.correlated_pair(200_000, -0.7, seed=1)
    assert float((u * v).mean()) == pytest.approx(-0.7, abs=0.01)
    assert float(torch.var(v)) == pytest.approx(1, abs=0.02)
