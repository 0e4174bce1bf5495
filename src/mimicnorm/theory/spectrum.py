"""How evenly gradient descent learns with a kernel: its condition number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mimicnorm.errors import TheoryError

from .arguments import reals


def condition_number(kernel: Tensor, centered: bool = False) -> float:
    """Return the largest over the smallest eigenvalue of a kernel matrix; infinity when singular to rounding.

    Args:
        kernel: symmetric, (m, m).
        centered: only on vectors orthogonal to the constant one. A network that ends in BatchNorm has the constant
            vector in its NTK's null space, so that only this number means something there.

    Example:
        >>> condition_number(torch.diag(torch.tensor([4.0, 2.0])))
        2.0
    """
    is_float = isinstance(kernel, Tensor) and kernel.is_floating_point()
    rounding = torch.finfo(kernel.dtype if is_float else torch.float64).eps
    k = reals("the kernel", kernel)
    if k.dim() != 2 or k.shape[0] != k.shape[1]:
        raise TheoryError(f"a kernel must be a square matrix, not of shape {tuple(k.shape)}.")
    if not torch.allclose(k, k.T, rtol=1e-6, atol=1e-9 * float(k.abs().max())):
        raise TheoryError("the kernel is not symmetric; a kernel between two sets of points has no eigenvalues.")
    if centered:
        if len(k) < 2:
            raise TheoryError("a centred condition number needs at least two points.")
        # a QR of [1, e_1, ..] gives an orthonormal basis whose first vector is constant
        basis = torch.eye(len(k), dtype=k.dtype, device=k.device)
        basis[:, 0] = 1.0
        q = torch.linalg.qr(basis).Q[:, 1:]
        k = q.T @ k @ q
    eigenvalues = torch.linalg.eigvalsh((k + k.T) / 2)
    low, high = float(eigenvalues[0]), float(eigenvalues[-1])
    return high / low if low > len(k) * rounding * abs(high) else math.inf
