from __future__ import annotations

import math

import pytest
import torch

from mimicnorm.theory import TheoryError, Transition

S = 1 - 1 / math.pi


def test_straight_relu_is_critical_and_freezes():
    t = Transition("straight")
    assert t.weight_variance == pytest.approx(2, rel=1e-14)
    assert t.chi1 == pytest.approx(1, abs=1e-14)
    assert t.phase == "critical"
    assert [(p.rho, p.stability) for p in t.fixed_points] == [(1.0, "marginal")]
    # algebraic approach, with the exact constant
    depth = 4_000
    assert float(1 - t.iterate(0.0, depth)[-1]) * depth**2 == pytest.approx(9 * math.pi**2 / 2, rel=2e-2)


@pytest.mark.parametrize("kind", ["weight_mean", "batch_norm"])
def test_weight_mean_and_batch_norm_share_their_transition(kind):
    t = Transition(kind)
    assert t.chi1 == pytest.approx(1 / S, rel=1e-13)
    assert t.phase == "chaotic"
    assert [(p.rho, p.stability) for p in t.fixed_points] == [(0.0, "stable"), (1.0, "unstable")]
    assert float(t(-1.0)) == pytest.approx(-1 / (math.pi - 1), rel=1e-13)
    assert float(t.derivative(0.0)) == pytest.approx(1 / (2 * S), rel=1e-13)
    assert t.depth_scales.ntk_off_diagonal == pytest.approx(1 / math.log(2), rel=1e-12)
    assert t.depth_scales.correlation == pytest.approx(-1 / math.log(1 / (2 * S)), rel=1e-12)


def test_weight_variance_is_exact_in_the_fan_in():
    assert Transition("weight_mean", fan_in=16).weight_variance == pytest.approx(2 * 16 / (15 * S), rel=1e-13)
    assert Transition("weight_mean", sigma_w2=3.0, fan_in=16).effective_w2 == pytest.approx(3 * 15 / 16)
    assert Transition("straight", sigma_w2=3.0, fan_in=16).effective_w2 == 3.0


@pytest.mark.parametrize("activation", ["relu", "gelu", "erf", "silu"])
def test_one_is_always_fixed_and_unstable_after_centring(activation):
    t = Transition("weight_mean", activation)
    assert float(t(1.0)) == 1.0
    assert t.fixed_points[-1].rho == 1.0
    assert t.fixed_points[-1].stability == "unstable"
    assert float(t.derivative(1.0)) == pytest.approx(t.chi1, rel=1e-10)
    assert float(t.iterate(1.0, 100)[-1]) == 1.0
    assert abs(float(t.iterate(0.9, 250)[-1])) < 1e-6


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_derivative_matches_differences(kind, activation):
    t = Transition(kind, activation, 1.4, 0.2)
    rho = torch.tensor([-0.8, 0.0, 0.5, 0.9], dtype=torch.float64)
    difference = (t(rho + 1e-6) - t(rho - 1e-6)) / 2e-6
    assert torch.allclose(t.derivative(rho), difference, atol=1e-7, rtol=0)


def test_fixed_points_are_not_rounding():
    expected = [(-1.0, "unstable"), (0.0, "stable"), (1.0, "unstable")]
    for t in (Transition("weight_mean", "erf"), Transition("straight", "tanh", 1.0001)):
        assert t.phase == "chaotic"
        assert [(p.rho, p.stability) for p in t.fixed_points] == expected
    with pytest.raises(TheoryError, match="dies out"):
        _ = Transition("straight", "gelu", 1.5).fixed_points


def test_variance_fixed_points():
    assert Transition("weight_mean", "gelu", sigma_b2=0.3).variance_map(1.0) == pytest.approx(1.0, rel=1e-13)
    t = Transition("straight", "relu", 1.5, 0.1)
    assert t.q_star == pytest.approx(0.1 / (1 - 0.75), rel=1e-13)
    assert t.phase == "ordered"
    t = Transition("straight", "tanh", 1.5, 0.1)
    assert t.variance_map(t.q_star) == pytest.approx(t.q_star, rel=1e-12)
    assert t.depth_scales.correlation == pytest.approx(-1 / math.log(t.chi1), rel=1e-9)
    assert Transition("straight", "tanh", 0.5).q_star == 0.0
    assert Transition("straight", "tanh", 0.5).phase == "ordered"
    assert Transition("straight", "relu", 2.5, 0.1).phase == "unbounded"
    # centring opens a chaotic phase of bounded variance, which ReLU has not by itself
    t = Transition("weight_mean", "relu", 2.5, 0.1)
    assert t.phase == "chaotic"
    stable = [p for p in t.fixed_points if p.stability == "stable"]
    assert len(stable) == 1
    assert 0 < stable[0].rho < 1
    assert float(t.iterate(-0.5, 300)[-1]) == pytest.approx(stable[0].rho, abs=1e-10)


@pytest.mark.parametrize(("name", "w2"), [("tanh", 1.0), ("erf", math.pi / 4), ("softsign", 1.0)])
def test_the_classic_edge_of_chaos_is_critical(name, w2):
    t = Transition("straight", name, w2)
    assert t.q_star == 0
    assert t.chi1 == pytest.approx(1, abs=1e-12)
    assert t.phase == "critical"
    with pytest.raises(TheoryError, match="dies out"):
        _ = t.fixed_points
    assert Transition("straight", name, 1.05 * w2).phase == "chaotic"
    assert Transition("straight", name, 0.95 * w2).phase == "ordered"
