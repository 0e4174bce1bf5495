"""The kernels against a reference that shares nothing with the library: numpy, one pair at a time.

Analytic activations by the trapezoidal rule in whitened coordinates, which converges geometrically (the step shrinks
with the distance of tanh's poles); ReLU and its leaky kin by E|u||v| and E[sign sign].
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.special import erf

from mimicnorm.theory import Transition, kernels, residual_kernels


def sigmoid(x):
    return 0.5 * (1 + np.tanh(x / 2))


def density(x):
    return np.exp(-x * x / 2) / math.sqrt(2 * math.pi)


ANALYTIC = {
    "gelu": (lambda x: x * (1 + erf(x / math.sqrt(2))) / 2, lambda x: (1 + erf(x / math.sqrt(2))) / 2 + x * density(x)),
    "silu": (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
    "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
    "erf": (erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x)),
}
SLOPES = {"relu": 0.0, "leaky_relu": 0.01}


def trapezoid(f, a, b, c):
    step = 0.18 / math.sqrt(1 + max(a, b))
    z = np.arange(-math.ceil(9.6 / step), math.ceil(9.6 / step) + 1) * step
    w = density(z) * step
    rest = math.sqrt(max(0.0, b - c * c / a))
    return float(w * f(math.sqrt(a) * z) @ (f(c / math.sqrt(a) * z[:, None] + rest * z) @ w))


def pair(name, a, b, c):
    """Return E[phi(u) phi(v)] and E[phi'(u) phi'(v)] for variances a, b and covariance c."""
    if name in ANALYTIC:
        return tuple(trapezoid(f, a, b, c) for f in ANALYTIC[name])
    half, bend = (1 + SLOPES[name]) / 2, (1 - SLOPES[name]) / 2
    rho = max(-1.0, min(1.0, c / math.sqrt(a * b)))
    angle = math.asin(rho)
    both = math.sqrt(a * b) * (math.sqrt(1 - rho**2) + rho * angle) * 2 / math.pi
    return half**2 * c + bend**2 * both, half**2 + bend**2 * angle * 2 / math.pi


def mean(name, a):
    if name in SLOPES:
        return (1 - SLOPES[name]) * math.sqrt(a / (2 * math.pi))
    z = np.arange(-1000, 1001) * 0.01
    return float(np.sum(density(z) * 0.01 * ANALYTIC[name][0](math.sqrt(a) * z)))


def layer(name, kind, w2, b2, state, data):
    """Map (a, b, c, theta) of every pair, and the variances of the data whose statistics BatchNorm takes."""
    centre, scale = 0.0, w2
    if kind == "batch_norm":
        centre = np.mean([mean(name, q) for q in data])
        scale, b2 = 1 / (np.mean([pair(name, q, q, q)[0] for q in data]) - centre**2), 0.0

    def mapped(value, a, b):
        left, right = mean(name, a), mean(name, b)
        taken = {"straight": 0.0, "weight_mean": left * right}.get(kind, centre * (left + right - centre))
        return scale * (value - taken) + b2

    def own(q):
        return mapped(pair(name, q, q, q)[0], q, q)

    result = []
    for a, b, c, theta in state:
        value, slope = pair(name, a, b, c)
        new = mapped(value, a, b)
        result.append((own(a), own(b), new, new + scale * slope * theta))
    return result, [own(q) for q in data]


def start(x, y, w2, b2):
    def k(u, v):
        return w2 * float(u @ v) / len(u) + b2

    return [(k(u, u), k(v, v), k(u, v), k(u, v)) for u in x for v in y], [k(u, u) for u in x]


def points(*norms, seed):
    x = np.random.default_rng(seed).normal(size=(len(norms), 7))
    return x / np.linalg.norm(x, axis=1, keepdims=True) * np.array(norms)[:, None]


X, Y = points(0.1, 10.0, seed=0), points(0.7, 3.0, seed=1)


def agree(got, state):
    for result, column in ((got.nngp, 2), (got.ntk, 3)):
        expected = np.array([pair[column] for pair in state]).reshape(2, 2)
        assert result.numpy() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["straight", "weight_mean", "batch_norm"])
@pytest.mark.parametrize("name", [*SLOPES, *ANALYTIC])
def test_cross_kernels_of_norms_from_a_tenth_to_ten_with_biases(name, kind):
    t = Transition(kind, name, 1.3, 0.2)
    state, data = start(X, Y, 1.7, 0.05)
    for depth in range(1, 5):
        got = kernels(torch.tensor(X), depth, t, torch.tensor(Y), first_w2=1.7, first_b2=0.05)
        agree(got, state)
        state, data = layer(name, kind, 1.3, 0.2, state, data)


@pytest.mark.parametrize("kind", ["straight", "weight_mean", "batch_norm"])
@pytest.mark.parametrize("name", ["relu", "gelu", "tanh"])
def test_residual_blocks_with_a_readout(name, kind):
    t = Transition(kind, name, 1.3, 0.2)
    state, data = start(X, Y, 1.0, 0.1)
    for block in (1, 2):
        branch, within = state, data
        for _ in range(2):
            branch, within = layer(name, kind, 1.3, 0.2, branch, within)
        state = [tuple(p + q / block for p, q in zip(*pairs, strict=True)) for pairs in zip(state, branch, strict=True)]
        data = [p + q / block for p, q in zip(data, within, strict=True)]
    state, _ = layer(name, kind, 1.3, 0.2, state, data)
    agree(residual_kernels(torch.tensor(X), 2, t, torch.tensor(Y), readout=True, first_b2=0.1), state)


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh"])
def test_fifty_layers(name):
    t = Transition("straight", name, 1.3, 0.2)
    state, _ = start(X, Y, 1.0, 0.0)
    for _ in range(49):
        state, _ = layer(name, "straight", 1.3, 0.2, state, [])
    agree(kernels(torch.tensor(X), 50, t, torch.tensor(Y)), state)
