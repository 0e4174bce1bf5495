"""How confident a network can be whose logits have mean 0 and variance 1: the last BN without a logit scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mimicnorm.arguments import finite
from mimicnorm.errors import TheoryError
from mimicnorm.theory.arguments import reals

_STEPS = 100_000


def last_norm_floor(frequencies: Sequence[float] | Tensor, scale: float = 1.0) -> float:
    """Return the lowest cross entropy (in nats) that logits of mean 0 and variance ``scale`` squared allow.

    Cross entropy is convex in the logits. So it falls if all samples of a class get their mean, and what remains is a
    convex problem: one logit z[y, j] per class y and output j, with sum_y p_y z[y, j] = 0 and sum_y p_y z[y, j]² at
    most scale². It is solved by projected gradients until the Frank-Wolfe gap, a bound on the error, is below 1e-9. For
    C balanced classes it is log(1 + (C - 1) exp(-scale C / sqrt(C - 1))).

    Args:
        frequencies: Of the classes, in any unit: shares or counts.
        scale: What the normalised logits are multiplied with.

    Example:
        >>> round(last_norm_floor([1] * 10), 3), round(last_norm_floor([276, 8, 8, 8]), 3)
        (0.278, 0.923)
    """
    p = reals("frequencies", frequencies, dims=1)
    scale = finite(scale, "scale", above=0, error=TheoryError)
    if len(p) < 2 or bool((p <= 0).any()):
        raise TheoryError(f"frequencies={p.tolist()}: give a positive number for each of two classes or more.")
    p = (p / p.sum())[:, None]
    right = torch.eye(len(p), dtype=p.dtype)

    def fitted(z: Tensor) -> Tensor:
        """Project onto mean 0 and variance of at most scale squared, per output."""
        z = z - (p * z).sum(0)
        return z * (scale / (p * z.square()).sum(0).sqrt().clamp_min(scale))

    def loss(z: Tensor) -> float:
        return float((p[:, 0] * (z.logsumexp(1) - z.diagonal())).sum())

    z = fitted(right * 1e9)
    value, step = loss(z), 2.0  # 1 / the largest curvature of logsumexp: such a step never raises the loss
    for _ in range(_STEPS):
        residual = right - z.softmax(1)  # minus the gradient, in the metric weighted by p
        centred = residual - (p * residual).sum(0)
        best = scale * (p * centred.square()).sum(0).sqrt().sum()
        if float(best - (p * centred * z).sum()) < 1e-9:
            return value
        while (lower := loss(moved := fitted(z + step * residual))) > value and step > 2:
            step = max(step / 4, 2.0)
        z, value, step = moved, lower, step * 2
    raise TheoryError(f"no optimum within {_STEPS} steps for frequencies={frequencies}.")
