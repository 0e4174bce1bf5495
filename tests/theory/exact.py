"""The textbook kernels with as many digits as mpmath is told to use: cancellation costs nothing."""

from __future__ import annotations

import mpmath
import torch


def gaussian(*shape, seed=0):
    """Inputs whose correlations are of both signs."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair(name, q, p, k, centred):
    """E[phi(u) phi(v)], or the covariance, and E[phi'(u) phi'(v)] for variances q, p and covariance k."""
    two_pi = 2 * mpmath.pi
    if name == "relu":
        scale = mpmath.sqrt(q * p)
        angle = mpmath.acos(max(-1, min(1, k / scale)))
        sides = mpmath.sin(angle) + (mpmath.pi - angle) * mpmath.cos(angle) - centred
        return scale * sides / two_pi, (mpmath.pi - angle) / two_pi
    if name == "erf":
        product = (1 + 2 * q) * (1 + 2 * p)
        value = 2 / mpmath.pi * mpmath.asin(2 * k / mpmath.sqrt(product))
        return value, 4 / mpmath.pi / mpmath.sqrt(product - 4 * k**2)
    product, sides = (1 + q) * (1 + p), 1 / (1 + q) + 1 / (1 + p)
    det = product - k**2
    density = 1 / (two_pi * mpmath.sqrt(det))
    positive = mpmath.asin(k / mpmath.sqrt(product)) / two_pi + mpmath.mpf(1) / 4
    means = q * p / (two_pi * mpmath.sqrt(product)) if centred else 0
    return k * positive + density * (q * p + k**2 * (sides - 1)) - means, positive + density * k * (sides + 1 / det)


def start(x, y, bias=0):
    """Variances, covariance and tangent kernel of two inputs after the first layer."""
    a, b = ([mpmath.mpf(v) for v in side.tolist()] for side in (x, y))
    q, p, k = (mpmath.fdot(*sides) / len(a) + mpmath.mpf(bias) for sides in ((a, a), (b, b), (a, b)))
    return q, p, k, k


def layer(name, state, transition):
    """One further layer."""
    w2, bias = mpmath.mpf(transition.effective_w2), mpmath.mpf(transition.sigma_b2)
    q, p, k, theta = state
    value, slope = pair(name, q, p, k, transition.centred)
    own = [w2 * pair(name, v, v, v, transition.centred)[0] + bias for v in (q, p)]
    new = w2 * value + bias
    return *own, new, new + w2 * slope * theta


def error(kernels, state, i=0, j=0):
    """The larger relative error of the two kernels of a pair."""
    both = ((kernels.nngp, state[2]), (kernels.ntk, state[3]))
    return max(abs(float(mpmath.mpf(float(k[i, j])) / right - 1)) for k, right in both)
