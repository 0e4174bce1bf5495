from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import TheoryError, Transition, condition_number, kernels, learning_curve


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


def test_learning_curve_is_gradient_descent_with_small_steps():
    k, k_test = kernel(6)[:5, :5], kernel(6)[5:, :5]
    y = torch.tensor([1.0, -1.0, 0.5, 2.0, 0.0], dtype=torch.float64)
    f0, g0 = torch.ones(5, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    f, g, steps, end = f0.clone(), g0.clone(), 20_000, 0.4
    for _ in range(steps):
        error = f - y
        f, g = f - end / steps * k @ error, g - end / steps * k_test @ error
    curve = learning_curve(k, y, torch.tensor([0.0, end]), ntk_test=k_test, start=f0, start_test=g0)
    assert torch.allclose(curve.train[0, :, 0], f0)
    assert torch.allclose(curve.train[1, :, 0], f, atol=1e-3)
    assert torch.allclose(curve.test[1, :, 0], g, atol=1e-3)
    assert float(curve.train_loss[1]) == pytest.approx(float(((f - y) ** 2).mean()), rel=1e-2)


def test_training_to_the_end_is_kernel_regression():
    k, k_test = kernel(6)[:5, :5], kernel(6)[5:, :5]
    y = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    curve = learning_curve(k, y, torch.tensor([1e6]), ntk_test=k_test)
    assert torch.allclose(curve.test[0], k_test @ torch.linalg.solve(k, y), atol=1e-9)


def test_a_singular_kernel_leaves_its_null_space_alone():
    k = torch.ones(2, 2, dtype=torch.float64)
    curve = learning_curve(k, torch.tensor([1.0, -1.0]), torch.tensor([5.0]), ntk_test=k[:1])
    assert torch.allclose(curve.train, torch.zeros(1, 2, 1, dtype=torch.float64), atol=1e-12)
    assert bool(torch.isfinite(curve.test).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_singular_kernel_may_be_trained_for_any_time(dtype):
    # duplicates: eigenvalues of -1e-16 or so, which exp(-v t) would blow up
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k = kernels(torch.cat([x, x]), 3, Transition("weight_mean")).ntk.to(dtype)
    y = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    curve = learning_curve(k, torch.cat([y, y + 1]), torch.tensor([1e6, 1e16, 1e30]), ntk_test=k[:6])
    assert torch.allclose(curve.train[:, :6, 0], (y + 0.5).expand(3, 6), atol=1e-4)  # halfway between two wishes
    assert torch.allclose(curve.test[..., 0], (y + 0.5).expand(3, 6), atol=1e-4)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: learning_curve(torch.eye(2), torch.tensor([1.0, math.nan]), torch.ones(1)), "in the targets"),
        (lambda: condition_number(torch.ones(2, 3)), "square"),
        (lambda: condition_number(torch.tensor([[1.0, math.inf], [math.inf, 1.0]])), "non-finite"),
        (lambda: condition_number(torch.tensor([[1.0, 0.5], [0.1, 1.0]])), "not symmetric"),
        (lambda: condition_number(torch.ones(1, 1), centered=True), "two points"),
        (lambda: learning_curve(torch.eye(2), torch.ones(3), torch.ones(1)), "3 targets"),
        (lambda: learning_curve(torch.eye(2), torch.ones(2), -torch.ones(1)), "at least 0"),
        (lambda: learning_curve(torch.eye(2), torch.ones(2), torch.ones(1), ntk_test=torch.ones(1, 3)), "(1, 3)"),
        (
            lambda: learning_curve(torch.diag(torch.tensor([1.0, -0.1])), torch.ones(2), torch.ones(1)),
            "eigenvalue -0.1",
        ),
        (
            lambda: learning_curve(torch.eye(2), torch.ones(2), torch.ones(1), start=torch.ones(3)),
            "start has shape (3,)",
        ),
    ],
)
def test_bad_input_is_named(call, says):
    with pytest.raises(TheoryError) as caught:
        call()
    assert says in str(caught.value)
