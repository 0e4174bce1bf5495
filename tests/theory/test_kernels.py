from __future__ import annotations

import importlib
import math

import mpmath
import numpy as np
import pytest
import torch

from mimicnorm.theory import Transition, condition_number, kernels, layerwise, residual_kernels

from . import exact
from .exact import gaussian


@pytest.mark.parametrize("name", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_fifty_centred_layers_are_right_to_ten_digits(name, bias, inputs):
    t = Transition("weight_mean", name, 2.2, bias)
    got = kernels(inputs, 50, t)
    with mpmath.workdps(40):
        for i, j in ((0, 5), (1, 4), (2, 3)):
            state = exact.start(inputs[i], inputs[j])
            for _ in range(49):
                state = exact.layer(name, state, t)
            assert exact.error(got, state, i, j) < 1e-10


@pytest.mark.parametrize("size", [300.0, 1e5, 1e8])
def test_inputs_of_any_size_pass_through_gelu(size, inputs):
    t = Transition("weight_mean", "gelu", 2.2)
    got = kernels(inputs * size, 10, t)
    with mpmath.workdps(60):
        state = exact.start(inputs[0] * size, inputs[5] * size)
        for _ in range(9):
            state = exact.layer("gelu", state, t)
        assert exact.error(got, state, 0, 5) < 1e-13


@pytest.mark.parametrize(("kind", "depth"), [("straight", 3), ("weight_mean", 50)])
def test_collinear_inputs_of_other_norm(kind, depth):
    x = gaussian(40, 7)
    c = torch.linspace(0.1, 3.3, 40, dtype=torch.float64)
    got = kernels(torch.cat([x, c[:, None] * x]), depth, Transition(kind))
    assert torch.allclose(got.ntk[:40, 40:].diagonal(), c * got.ntk[:40, :40].diagonal(), rtol=1e-12)


def test_the_fan_in_may_be_given(inputs):
    narrow = kernels(inputs, np.int64(3), Transition("weight_mean", "relu", 3.0, 0.1, fan_in=16))
    wide = kernels(inputs, 3, Transition("weight_mean", "relu", 3.0 * 15 / 16, 0.1))
    assert torch.allclose(narrow.ntk, wide.ntk, rtol=1e-14)


@pytest.mark.parametrize("kind", ["straight", "weight_mean", "batch_norm"])
@pytest.mark.parametrize("name", ["silu", "elu"])
def test_many_pairs_of_unequal_norms_take_an_interpolant(kind, name, monkeypatch):
    x = gaussian(3, 30)
    t = Transition(kind, name, sigma_b2=0.1)
    few = kernels(x, 3, t)
    monkeypatch.setattr(importlib.import_module("mimicnorm.theory.dual"), "MANY", 0)
    many, cross = kernels(x, 3, t), kernels(x, 3, t, x[1:])
    assert torch.allclose(many.nngp, few.nngp, rtol=1e-11, atol=1e-13)
    assert torch.allclose(many.ntk, few.ntk, rtol=1e-11, atol=1e-13)
    assert torch.allclose(cross.ntk, few.ntk[:, 1:], rtol=1e-11, atol=1e-13)


def test_the_ntk_sum_runs_to_the_last_transition_but_one():
    # with normalised inputs the recursion is the paper's sum with its product over r = l .. L-1
    t, depth = Transition("weight_mean"), 6
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64) * math.sqrt(2)
    path = t.iterate(0.6, depth - 1)
    slopes = t.derivative(path).tolist()
    right, printed = (
        sum(float(path[i]) * math.prod(slopes[i + late : depth - 1 + late]) for i in range(depth)) for late in (0, 1)
    )
    assert float(kernels(x, depth, t).ntk[0, 1]) == pytest.approx(right, rel=1e-12)
    assert abs(printed / right - 1) > 0.05


def test_batch_norm_on_normalised_data_is_the_papers_form():
    x = gaussian(5, 9, seed=1)
    x = x / x.norm(dim=1, keepdim=True) * 3
    bn, wm = (kernels(x, 6, Transition(kind)) for kind in ("batch_norm", "weight_mean"))
    assert torch.allclose(bn.ntk, wm.ntk, rtol=1e-11, atol=1e-13)


def test_residual_profiles():
    x = torch.eye(3, dtype=torch.float64) * math.sqrt(3)
    code = [1.44 * (1 - 1 / math.pi) / (i + 1) for i in range(8)]
    for kind, scale, expected in (
        ("weight_mean", "sqrt", 9),
        ("batch_norm", 1.0, 9),
        ("weight_mean", "none", 256),
        ("weight_mean", "linear", math.prod(1 + (i + 1) ** -2 for i in range(8))),
        ("weight_mean", code, math.prod(1 + s**2 for s in code)),
    ):
        variance = float(residual_kernels(x, 8, Transition(kind), scale=scale).rows[0])
        assert variance == pytest.approx(expected, rel=1e-12)


def test_condition_numbers_of_the_three_phases():
    m = 10
    x = torch.eye(m, dtype=torch.float64) * math.sqrt(m)
    *_, critical = layerwise(x, 400, Transition("straight"))
    assert condition_number(critical.ntk) == pytest.approx((m + 3) / 3, rel=0.04)
    assert condition_number(critical.nngp) > 1000
    assert condition_number(kernels(x, 20, Transition("weight_mean")).ntk) == pytest.approx(1, abs=1e-9)
    *_, shallow, deep = layerwise(x, 41, Transition("straight", "relu", 1.5, 0.25))
    assert condition_number(deep.ntk) > 1.1 * condition_number(shallow.ntk)


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_blocks_and_threads_change_nothing(activation, monkeypatch):
    x, t = gaussian(100, 20), Transition("weight_mean", activation, sigma_b2=0.1)
    whole = kernels(x, 3, t)
    for size in ("BLOCK", "THREAD_BLOCK"):
        monkeypatch.setattr(importlib.import_module("mimicnorm.theory.kernels"), size, 1000)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        parts = kernels(x, 3, t)
        assert torch.get_num_threads() == threads
        assert torch.equal(parts.ntk, parts.ntk.T)
        torch.testing.assert_close(parts.nngp, whole.nngp, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(parts.ntk, whole.ntk, rtol=1e-13, atol=1e-14)
