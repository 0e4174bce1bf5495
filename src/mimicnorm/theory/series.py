"""Hermite series of phi(sqrt(q) z): the dual is sum_k a_k(q1) a_k(q2) rho^k, a_k the coefficients.

They fall geometrically for analytic activations; kinked ones have only their first few terms from here.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from .activations import Activation
from .quadrature import CPU, normal_nodes

LARGEST = 50.0  # of variances: beyond it, the features of phi are too narrow for these terms
SMALL = 0.03  # below this correlation the terms of `low_order` are exact to rounding, kinks or not
_TERMS = 400


def hermite(activation: Activation, q: Tensor) -> Tensor | None:
    """Return coefficients of phi(sqrt(q) z) in normalised Hermite polynomials, shape (*q.shape, terms).

    None when the series of the dual's derivative is not exact to 1e-12 at rho = 1 (kinks, large variances).
    """
    if activation.kinks or float(q.max()) > LARGEST:
        return None
    # what Transition asks for again and again is kept, the thousands of variances of a layer are not
    find = _hermite_of if q.numel() <= 64 else _hermite_of.__wrapped__
    found = find(activation, tuple(q.flatten().tolist()))
    return None if found is None else found.reshape(*q.shape, -1).to(q.device)


@lru_cache(maxsize=256)
def _hermite_of(activation: Activation, variances: tuple[float, ...]) -> Tensor | None:
    q = torch.tensor(variances, dtype=torch.float64, device=CPU)
    z, w = normal_nodes((), math.sqrt(max(variances)))
    x = torch.sqrt(q)[:, None] * z
    a = activation(x).detach() * w @ _polynomials(z, _TERMS).T
    slope = activation.derivative(x) ** 2 @ w
    order = torch.arange(_TERMS, dtype=torch.float64, device=CPU)
    exact = ((order * a**2).sum(1) / q - slope).abs().max() <= 1e-12 * slope.max()
    return a if bool(exact) else None


def _polynomials(z: Tensor, terms: int) -> Tensor:
    found = [torch.ones_like(z), z]
    for k in range(1, terms - 1):
        found.append((z * found[k] - math.sqrt(k) * found[k - 1]) / math.sqrt(k + 1))
    return torch.stack(found)


def low_order(activation: Activation, q: Tensor) -> Tensor:
    """Return the Hermite coefficients 1 to 11 of phi(sqrt(q) z), also of kinked functions."""
    scale = torch.sqrt(q)
    z, w = normal_nodes(activation.kinks, scale.cpu().numpy())
    values = w * activation(scale[..., None].to(CPU) * z).detach()
    return (_polynomials(z, 12)[1:] * values).sum(-1).movedim(0, -1).to(q.device)


def sum_series(products: Tensor, rho: Tensor, scale: Tensor, centred: bool = False) -> tuple[Tensor, Tensor]:
    """Return sum_k products_k rho^k, from k = 1 if centred, and its derivative by the covariance scale * rho."""
    order = torch.arange(products.shape[-1], dtype=torch.float64, device=rho.device)
    # drop the terms that cannot matter at the largest |rho| present
    size = order * products.abs().reshape(-1, len(order)).amax(0) * rho.abs().max() ** order
    terms = max(2, int((size.flip(0).cumsum(0).flip(0) > 1e-17 * size.sum()).sum()) + 1)
    products, order = products[..., :terms], order[:terms]
    powers = rho[..., None] ** order
    value = (products * powers)[..., int(centred) :].sum(-1)
    return value, (products[..., 1:] * order[1:] * powers[..., :-1]).sum(-1) / scale
