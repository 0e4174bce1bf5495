from __future__ import annotations

import math
import sys

import mpmath
import numpy as np
import pytest
import torch

from mimicnorm.theory import Gram, TheoryError, Transition, condition_number, kernels, layerwise, residual_kernels
from mimicnorm.theory.kernels import block_scales


def arc_cosine(k, q, p, a=0.0):
    """Leaky ReLU of slope a by the textbook kernels of degree 1 and 0, in numpy, one pair at a time."""
    c = max(-1.0, min(1.0, k / math.sqrt(q * p)))
    # arccos turns the rounding of a diagonal entry into 1e-8
    theta = math.acos(c) if c < 1 - 1e-14 else 0.0
    relu = math.sqrt(q * p) * (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / (2 * math.pi)
    step = (math.pi - theta) / (2 * math.pi)
    # leaky = (1 - a) relu + a x, and E[relu(u) v] = k / 2
    return (1 - a) ** 2 * relu + a * (1 - a) * k + a**2 * k, (1 - a) ** 2 * step + a * (1 - a) + a**2


def arc_sine(k, q, p):
    inner = 2 * k / math.sqrt((1 + 2 * q) * (1 + 2 * p))
    return 2 / math.pi * math.asin(inner), 4 / math.pi / math.sqrt((1 + 2 * q) * (1 + 2 * p) - 4 * k**2)


def by_grid(name):
    # the trapezoidal rule converges geometrically for analytic integrands that vanish at both ends
    z = np.arange(-9, 9.01, 0.05)
    w = np.exp(-(z**2) / 2)
    w = w / w.sum()
    phi = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}[name]

    def pair(k, q, p):
        c = max(-1.0, min(1.0, k / math.sqrt(q * p)))
        u = torch.tensor(math.sqrt(q) * z[:, None] + 0 * z, requires_grad=True)
        v = torch.tensor(math.sqrt(p) * (c * z[:, None] + math.sqrt(1 - c**2) * z[None, :]), requires_grad=True)
        fu, fv = phi(u), phi(v)
        gu, gv = torch.autograd.grad(fu.sum() + fv.sum(), (u, v))
        value = w @ (fu * fv).detach().numpy() @ w
        return float(value), float(w @ (gu * gv).numpy() @ w)

    return pair


DUALS = {
    "relu": arc_cosine,
    "leaky_relu": lambda k, q, p: arc_cosine(k, q, p, 0.01),
    "erf": arc_sine,
    "gelu": by_grid("gelu"),
    "silu": by_grid("silu"),
}


def reference(x, y, depth, dual, w2, b2, first_w2, first_b2, centred=False, blocks=None):
    """NNGP and NTK of one pair by the scalar recursion written out: three NNGP values and one NTK."""
    n = len(x)
    q, p, k = (first_w2 * float(a @ b) / n + first_b2 for a, b in ((x, x), (y, y), (x, y)))

    def layer(q, p, k, theta):
        mean = math.sqrt(q / (2 * math.pi)) * math.sqrt(p / (2 * math.pi)) if centred else 0.0
        own = [q / (2 * math.pi) if centred else 0.0, p / (2 * math.pi) if centred else 0.0]
        value, slope = dual(k, q, p)
        new_k = w2 * (value - mean) + b2
        return (
            w2 * (dual(q, q, q)[0] - own[0]) + b2,
            w2 * (dual(p, p, p)[0] - own[1]) + b2,
            new_k,
            new_k + w2 * slope * theta,
        )

    theta = k
    if blocks is None:
        for _ in range(depth - 1):
            q, p, k, theta = layer(q, p, k, theta)
        return k, theta
    for s in blocks:
        state = (q, p, k, theta)
        for _ in range(depth):
            state = layer(*state)
        q, p, k, theta = (a + s**2 * b for a, b in zip((q, p, k, theta), state, strict=True))
    _, _, k, theta = layer(q, p, k, theta)
    return k, theta


@pytest.mark.parametrize("name", DUALS)
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_unnormalised_inputs_with_biases(name, depth, inputs):
    t = Transition("straight", name, 1.3, 0.2)
    got = kernels(inputs, depth, t, first_w2=1.7, first_b2=0.05)
    for i, j in ((0, 0), (0, 5), (1, 4), (2, 3)):
        k, theta = reference(inputs[i], inputs[j], depth, DUALS[name], 1.3, 0.2, 1.7, 0.05)
        assert float(got.nngp[i, j]) == pytest.approx(k, rel=1e-10)
        assert float(got.ntk[i, j]) == pytest.approx(theta, rel=1e-10)


@pytest.mark.parametrize("depth", [2, 20, 50])
def test_weight_mean_relu_of_any_norms(depth, inputs):
    w2 = 2 / (1 - 1 / math.pi)
    got = kernels(inputs, depth, Transition("weight_mean"))
    for i, j in ((0, 5), (1, 4)):
        k, theta = reference(inputs[i], inputs[j], depth, arc_cosine, w2, 0.0, 1.0, 0.0, centred=True)
        assert float(got.nngp[i, j]) == pytest.approx(k, rel=1e-10, abs=1e-13)
        assert float(got.ntk[i, j]) == pytest.approx(theta, rel=1e-10, abs=1e-13)


def precise(name, q, p, k):
    """Return the covariance of phi(u), phi(v) and E[phi' phi'] with 40 digits."""
    root, scale = mpmath.sqrt, mpmath.sqrt(q * p)
    if name == "relu":
        angle = mpmath.acos(max(-1, min(1, k / scale)))
        value = scale * (mpmath.sin(angle) + (mpmath.pi - angle) * mpmath.cos(angle) - 1) / (2 * mpmath.pi)
        return value, (mpmath.pi - angle) / (2 * mpmath.pi)
    product, sides = (1 + q) * (1 + p), 1 / (1 + q) + 1 / (1 + p)
    det = product - k**2
    density = 1 / (2 * mpmath.pi * root(det))
    positive = mpmath.mpf(1) / 4 + mpmath.asin(k / root(product)) / (2 * mpmath.pi)
    value = k * positive + density * (q * p + k**2 * (sides - 1)) - q * p / (2 * mpmath.pi * root(product))
    return value, positive + density * k * (sides + 1 / det)


@pytest.mark.parametrize("name", ["relu", "gelu"])
@pytest.mark.parametrize("bias", [0.0, 0.1])
def test_fifty_centred_layers_are_right_to_ten_digits(name, bias, inputs):
    t = Transition("weight_mean", name, 2.2, bias)
    got = kernels(inputs, 50, t)
    with mpmath.workdps(40):
        for i, j in ((0, 5), (1, 4), (2, 3)):
            x, y = ([mpmath.mpf(v) for v in inputs[n].tolist()] for n in (i, j))
            q, p, k = (mpmath.fdot(a, b) / len(x) for a, b in ((x, x), (y, y), (x, y)))
            theta, w2 = k, mpmath.mpf(t.effective_w2)
            for _ in range(49):
                value, slope = precise(name, q, p, k)
                q, p = (w2 * precise(name, own, own, own)[0] + bias for own in (q, p))
                k = w2 * value + bias
                theta = k + w2 * slope * theta
            assert abs(mpmath.mpf(float(got.nngp[i, j])) / k - 1) < 1e-10
            assert abs(mpmath.mpf(float(got.ntk[i, j])) / theta - 1) < 1e-10


@pytest.mark.parametrize("size", [300.0, 1e5, 1e8])
def test_inputs_of_any_size_pass_through_gelu(size, inputs):
    # far out GELU is ReLU, whose kernels are homogeneous; E[gelu gelu] differs by O(1 / sqrt(q))
    got, relu = (kernels(inputs * size, 10, Transition("weight_mean", name, 2.2)) for name in ("gelu", "relu"))
    assert torch.allclose(got.ntk, relu.ntk, rtol=1e3 / size)
    with mpmath.workdps(60):
        x, y = ([mpmath.mpf(v) for v in (inputs[n] * size).tolist()] for n in (0, 5))
        q, p, k = (mpmath.fdot(a, b) / len(x) for a, b in ((x, x), (y, y), (x, y)))
        theta = k
        for _ in range(9):
            value, slope = precise("gelu", q, p, k)
            q, p, k = (mpmath.mpf(2.2) * v for v in (*(precise("gelu", o, o, o)[0] for o in (q, p)), value))
            theta = k + mpmath.mpf(2.2) * slope * theta
        assert abs(mpmath.mpf(float(got.ntk[0, 5])) / theta - 1) < 1e-13


@pytest.mark.parametrize("name", ["silu", "elu"])
def test_small_correlations_keep_their_digits(name):
    # T(rho) = T'(0) rho + O(rho^2): by a difference of numbers near 1 it would be off by 1e-16 / rho
    t, rho = Transition("weight_mean", name), 1e-9
    assert float(t(rho)) / rho == pytest.approx(float(t.derivative(0.0)), rel=1e-8)
    assert float(t(rho) / t(rho / 2)) == pytest.approx(2, rel=1e-8)


@pytest.mark.parametrize(("kind", "depth"), [("straight", 3), ("weight_mean", 50)])
def test_collinear_inputs_of_other_norm(kind, depth):
    x = torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    c = torch.linspace(0.1, 3.3, 40, dtype=torch.float64)
    got = kernels(torch.cat([x, c[:, None] * x]), depth, Transition(kind))
    assert torch.allclose(got.ntk[:40, 40:].diagonal(), c * got.ntk[:40, :40].diagonal(), rtol=1e-12)


def test_opposite_inputs_share_no_relu():
    x = torch.randn(40, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(kernels(x, 2, Transition(), -3 * x).ntk.diagonal().abs().max()) < 1e-14


def test_collinear_inputs_part_after_a_bounded_activation(inputs):
    both = kernels(inputs[:1], 3, Transition("straight", "tanh", 1.5), 2 * inputs[:1])
    assert float(both.nngp[0, 0]) < math.sqrt(float(both.rows[0] * both.columns[0])) * (1 - 1e-9)


def test_depth_may_be_any_integer(inputs):
    assert kernels(inputs, np.int64(2), Transition()).ntk.shape == (6, 6)


def test_finite_fan_in_enters_an_explicit_sigma_w2(inputs):
    got = kernels(inputs, 3, Transition("weight_mean", "relu", 3.0, 0.1, fan_in=16))
    k, theta = reference(inputs[0], inputs[3], 3, arc_cosine, 3.0 * 15 / 16, 0.1, 1.0, 0.0, centred=True)
    assert float(got.nngp[0, 3]) == pytest.approx(k, rel=1e-11)
    assert float(got.ntk[0, 3]) == pytest.approx(theta, rel=1e-11)


@pytest.mark.parametrize("centred", [False, True])
def test_residual_blocks(centred, inputs):
    t = Transition("weight_mean" if centred else "straight", "relu", 1.6, 0.1)
    got = residual_kernels(inputs, 3, t, layers_per_block=2, scale="sqrt", readout=True, first_b2=0.3)
    scales = [1, 2**-0.5, 3**-0.5]
    for i, j in ((0, 5), (2, 2), (1, 3)):
        k, theta = reference(inputs[i], inputs[j], 2, arc_cosine, 1.6, 0.1, 1.0, 0.3, centred=centred, blocks=scales)
        assert float(got.nngp[i, j]) == pytest.approx(k, rel=1e-11)
        assert float(got.ntk[i, j]) == pytest.approx(theta, rel=1e-11)


@pytest.mark.parametrize("kind", ["straight", "weight_mean"])
@pytest.mark.parametrize("name", ["relu", "silu", "elu"])
def test_cross_kernels_are_blocks_of_the_whole(kind, name, inputs):
    t = Transition(kind, name, 1.3, 0.1)
    whole, cross = kernels(inputs[:4], 3, t), kernels(inputs[:2], 3, t, inputs[2:4])
    assert torch.allclose(cross.nngp, whole.nngp[:2, 2:], rtol=1e-11, atol=1e-13)
    assert torch.allclose(cross.ntk, whole.ntk[:2, 2:], rtol=1e-11, atol=1e-13)
    assert torch.allclose(cross.columns, whole.rows[2:], rtol=1e-12)
    shared = kernels(inputs[:3], 3, t, inputs[1:4])
    assert torch.allclose(shared.ntk, whole.ntk[:3, 1:], rtol=1e-11, atol=1e-13)


def test_blocks_of_rows_do_not_show():
    # 300 points take several cache blocks; 3 take one
    x = torch.randn(300, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = Transition("weight_mean", "gelu", 1.8, 0.1)
    some = [0, 140, 299]
    few, many = kernels(x[some], 4, t), kernels(x, 4, t)
    assert torch.allclose(many.ntk[some][:, some], few.ntk, rtol=1e-12)
    assert torch.equal(many.ntk, many.ntk.T)


@pytest.mark.parametrize("kind", ["straight", "weight_mean", "batch_norm"])
@pytest.mark.parametrize("name", ["silu", "elu"])
def test_many_pairs_of_unequal_norms_take_an_interpolant(kind, name, monkeypatch):
    x = torch.randn(3, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = Transition(kind, name, sigma_b2=0.1)
    few = kernels(x, 3, t)
    monkeypatch.setattr(sys.modules["mimicnorm.theory.kernels"], "MANY", 0)
    many, cross = kernels(x, 3, t), kernels(x, 3, t, x[1:])
    assert torch.allclose(many.nngp, few.nngp, rtol=1e-11, atol=1e-13)
    assert torch.allclose(many.ntk, few.ntk, rtol=1e-11, atol=1e-13)
    assert torch.allclose(cross.ntk, few.ntk[:, 1:], rtol=1e-11, atol=1e-13)


def test_equal_inputs_stay_equal_fifty_layers_deep(inputs):
    # rounding at rho = 1 would grow by 1.467 per layer: 2e-16 to 4e-8
    t = Transition("weight_mean")
    both = kernels(inputs, 50, t, inputs.clone())
    assert torch.allclose(both.nngp.diagonal(), both.rows, rtol=1e-12)
    twice = kernels(torch.cat([inputs, inputs]), 50, t)
    assert torch.allclose(twice.ntk[:6, 6:].diagonal(), twice.ntk[:6, :6].diagonal(), rtol=1e-12)


def test_the_ntk_sum_runs_to_the_last_transition_but_one():
    # with normalised inputs the recursion is the paper's sum with its product over r = l .. L-1
    t, depth = Transition("weight_mean"), 6
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64) * math.sqrt(2)
    path = t.iterate(0.6, depth - 1)
    slopes = t.derivative(path)
    right = sum(float(path[i]) * math.prod(slopes[i : depth - 1].tolist()) for i in range(depth))
    printed = sum(float(path[i]) * math.prod(slopes[i + 1 : depth].tolist()) for i in range(depth))
    got = float(kernels(x, depth, t).ntk[0, 1])
    assert got == pytest.approx(right, rel=1e-12)
    assert abs(printed / right - 1) > 0.05


def test_gram_and_inputs_agree(inputs):
    t = Transition("weight_mean", "erf")
    gram = inputs @ inputs.T / inputs.shape[1]
    assert torch.allclose(kernels(Gram(gram), 4, t).ntk, kernels(inputs, 4, t).ntk, rtol=1e-12)
    cross = kernels(Gram(gram[:2, 2:], gram.diagonal()[:2].tolist(), gram.diagonal()[2:]), 4, t)
    assert torch.allclose(cross.ntk, kernels(inputs, 4, t).ntk[:2, 2:], rtol=1e-12)


def test_batch_norm_on_normalised_data_is_the_papers_form():
    x = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = x / x.norm(dim=1, keepdim=True) * 3
    bn, wm = (kernels(x, 6, Transition(kind)) for kind in ("batch_norm", "weight_mean"))
    assert torch.allclose(bn.ntk, wm.ntk, rtol=1e-11, atol=1e-13)


def test_residual_profiles():
    x = torch.eye(3, dtype=torch.float64) * math.sqrt(3)

    def variance(kind, scale, blocks=8):
        return float(residual_kernels(x, blocks, Transition(kind), scale=scale).rows[0])

    assert variance("weight_mean", "sqrt") == pytest.approx(9, rel=1e-12)
    assert variance("batch_norm", 1.0) == pytest.approx(9, rel=1e-12)
    assert variance("weight_mean", "none") == pytest.approx(256, rel=1e-12)
    code = [1.44 * (1 - 1 / math.pi) / (i + 1) for i in range(8)]
    assert variance("weight_mean", code) == pytest.approx(3.157, abs=1e-3)
    assert block_scales("linear", 3) == [1, 1 / 2, 1 / 3]


def test_condition_numbers_of_the_three_phases():
    m = 10
    x = torch.eye(m, dtype=torch.float64) * math.sqrt(m)
    *_, critical = layerwise(x, 400, Transition("straight"))
    assert condition_number(critical.ntk) == pytest.approx((m + 3) / 3, rel=0.04)
    assert condition_number(critical.nngp) > 1000
    assert condition_number(kernels(x, 20, Transition("weight_mean")).ntk) == pytest.approx(1, abs=1e-9)
    ordered = Transition("straight", "relu", 1.5, 0.25)
    shallow, deep = (condition_number(kernels(x, depth, ordered).ntk) for depth in (40, 60))
    assert deep > 10 * shallow


def test_off_diagonal_ntk_halves_per_layer():
    x = torch.tensor([[1.0, 0.0], [0.2, math.sqrt(0.96)]], dtype=torch.float64) * math.sqrt(2)
    ratio = [float(k.ntk[0, 1] / k.ntk[0, 0]) for k in layerwise(x, 41, Transition("weight_mean"))]
    assert ratio[40] / ratio[39] == pytest.approx(0.5, rel=0.03)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x, t: kernels(x, 0, t), "at least 1, not 0"),
        (lambda x, t: kernels(x, 2.0, t), "integer"),
        (lambda x, t: kernels(x[0], 2, t), "tensor of samples"),
        (lambda x, t: kernels(x[:0], 2, t), "(0, 5)"),
        (lambda x, t: kernels(x, 2, "relu"), "not 'relu'"),
        (lambda x, t: kernels(x, 2, t, first_w2=-1.0), "finite number above 0"),
        (lambda x, t: kernels([[1.0]], 2, t), "list"),
        (lambda x, t: kernels(x * math.nan, 2, t), "non-finite"),
        (lambda x, t: kernels(x * torch.tensor([1, 0, 1, 1, 1, 1.0])[:, None], 2, t), "sample 1 of x"),
        (lambda x, t: kernels(x, 2, t, x[:, :3]), "5 features and x2 has 3"),
        (lambda x, t: kernels(Gram(torch.ones(2, 3)), 2, t), "not symmetric"),
        (lambda x, t: kernels(Gram(torch.tensor([[1.0, 2.0], [2.0, 1.0]])), 2, t), "correlation of 2"),
        (lambda x, t: kernels(Gram(torch.ones(2, 3), torch.ones(2), torch.ones(2)), 2, t), "2 columns"),
        (lambda x, t: kernels(Gram(torch.eye(2)), 2, t, x), "leave x2 out"),
        (lambda x, t: kernels(Gram(torch.full((2, 2), math.nan)), 2, t), "non-finite"),
        (lambda x, t: kernels(Gram(torch.eye(2), torch.ones(2)), 2, t), "both rows and columns"),
        (lambda x, t: kernels(x, 3000, Transition(sigma_w2=1.0)), "dies out: below 1e-150 at layer"),
        (lambda x, t: kernels(x, 1900, t), "tangent kernel became non-finite at layer 18"),
        (
            lambda x, t: kernels(x.repeat(10, 1) * torch.rand(60, 1).double(), 2, Transition(activation="hardtanh")),
            "1830",
        ),
        (lambda x, t: kernels(x, 100, Transition("straight", "hardtanh", 1.3)), "21 pairs"),
        (lambda x, t: layerwise(x, 0, t), "at least 1, not 0"),  # at once, not at the first next()
        (lambda x, t: layerwise(x * math.nan, 2, t), "non-finite"),
        (lambda x, t: layerwise(x, 2, "relu"), "not 'relu'"),
        (lambda x, t: residual_kernels(x, 0, t), "at least 1"),
        (lambda x, t: residual_kernels(x, 2, t, scale="cube"), "'sqrt'"),
        (lambda x, t: residual_kernels(x, 2, t, scale=[1.0]), "1 scales were given for 2"),
        (lambda x, t: residual_kernels(x, 2, t, scale=math.nan), "branch scalars"),
        (lambda x, t: kernels(x, 2, Transition(activation=torch.sign)), "has a step"),
        (lambda x, t: kernels(x, 2000, Transition(sigma_w2=9.0)), "explodes: above 1e150 at layer"),
    ],
)
def test_bad_input_is_named(call, says, inputs):
    with pytest.raises(TheoryError) as caught:
        call(inputs, Transition("weight_mean"))
    assert says in str(caught.value)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_threads_share_the_pairs_and_change_nothing(activation):
    x = torch.randn(730, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(kernels(x, 3, Transition("weight_mean", activation, sigma_b2=0.1)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found[1].nngp, found[0].nngp, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(found[1].ntk, found[0].ntk, rtol=1e-13, atol=1e-14)
