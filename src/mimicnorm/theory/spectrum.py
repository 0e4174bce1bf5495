"""What a kernel says of training: its condition number, and the learning curves of the linearised network."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
    k, rounding = _symmetric(kernel)
    if centered:
        # a QR of [1, e_1, ..] gives an orthonormal basis whose first vector is constant
        basis = torch.eye(len(k), dtype=k.dtype, device=k.device)
        basis[:, 0] = 1.0
        q = torch.linalg.qr(basis).Q[:, 1:]
        k = q.T @ k @ q
        k = (k + k.T) / 2
    if k.shape[0] == 0:
        raise TheoryError("a centred condition number needs at least two points.")
    eigenvalues = torch.linalg.eigvalsh(k)
    low, high = float(eigenvalues[0]), float(eigenvalues[-1])
    return high / low if low > len(k) * rounding * abs(high) else math.inf


@dataclass(frozen=True)
class LearningCurve:
    """Gradient flow on the kernel at given times.

    Attributes:
        times: as given.
        train: predictions on the training points, (times, m, outputs).
        test: predictions on the test points, or None.
        train_loss: mean squared error over points and outputs, per time.
    """

    times: Tensor
    train: Tensor
    test: Tensor | None
    train_loss: Tensor


def learning_curve(
    ntk: Tensor,
    targets: Tensor,
    times: Tensor,
    *,
    ntk_test: Tensor | None = None,
    start: Tensor | None = None,
    start_test: Tensor | None = None,
) -> LearningCurve:
    """Solve dF/dt = -Theta (F - Y), gradient flow on |F - Y|^2 / 2 of the linearised network (eq. 5).

    F(t) = Y + exp(-Theta t)(F_0 - Y), and on new data F*(t) = F*_0 + Theta* Theta^-1 (1 - exp(-Theta t))(Y
    - F_0).

    Args:
        ntk: Theta between training points, (m, m).
        targets: Y, (m,) or (m, outputs).
        times: in units of 1 / learning rate.
        ntk_test: Theta* between test and training points, (m*, m).
        start: F_0, zero when not given.
        start_test: F*_0, zero when not given.

    Example:
        >>> curve = learning_curve(torch.eye(2), torch.ones(2), torch.tensor([0.0, math.log(2)]))
        >>> [round(v, 6) for v in curve.train_loss.tolist()]
        [1.0, 0.25]
    """
    k, rounding = _symmetric(ntk)
    y, t = torch.atleast_1d(reals("the targets", targets)), reals("times", times).reshape(-1)
    y = y.reshape(len(y), -1)
    if len(y) != len(k):
        raise TheoryError(f"{len(y)} targets were given for a kernel of {len(k)} points.")
    if not bool((t >= 0).all()):
        raise TheoryError("times must be at least 0.")
    cross = None if ntk_test is None else reals("ntk_test", ntk_test)
    if cross is not None and (cross.dim() != 2 or cross.shape[1] != len(k)):
        raise TheoryError(f"ntk_test must be (test points, {len(k)}), not {tuple(cross.shape)}.")

    def beginning(name: str, given: Tensor | None, points: int) -> Tensor:
        if given is None:
            return torch.zeros(points, y.shape[1], dtype=y.dtype, device=y.device)
        found = reals(name, given)
        if found.numel() != points * y.shape[1]:
            raise TheoryError(f"{name} has shape {tuple(found.shape)}; give one value per point and output.")
        return found.reshape(points, -1)

    first, first_test = (
        beginning("start", start, len(k)),
        beginning("start_test", start_test, 0 if cross is None else len(cross)),
    )
    values, vectors = torch.linalg.eigh(k)
    most = float(values.abs().max())
    least = len(k) * rounding * most
    if float(values[0]) < -max(least, 1e-5 * most):  # a float32 network's kernel rounds by 1e-7, whatever its type
        raise TheoryError(
            f"the kernel has the eigenvalue {float(values[0]):.3g}, far beyond rounding: gradient flow on it diverges, "
            "and no tangent kernel has one."
        )
    values = torch.where(values < least, 0.0, values)  # rounding, of either sign, which long times would blow up
    error = first - y
    modes = vectors.T @ error
    decay = torch.exp(-values * t[:, None])
    train = y + torch.einsum("im,tm,mo->tio", vectors, decay, modes)
    test = None
    if cross is not None:
        # J^T v = 0 in a null direction v of Theta = J J^T: Theta* v = J* J^T v is 0, too, and its rounding times t not
        null = values == 0
        travelled = torch.where(null, 0.0, -torch.expm1(-values * t[:, None]) / torch.where(null, 1.0, values))
        test = first_test - torch.einsum("im,tm,mo->tio", cross @ vectors, travelled, modes)
    return LearningCurve(t, train, test, ((train - y) ** 2).mean((1, 2)))


def _symmetric(kernel: Any) -> tuple[Tensor, float]:
    """Return the kernel in float64, and the rounding of the type it came in."""
    rounding = torch.finfo(kernel.dtype).eps if isinstance(kernel, Tensor) and kernel.is_floating_point() else 0.0
    kernel = reals("the kernel", kernel)
    if kernel.dim() != 2 or kernel.shape[0] != kernel.shape[1]:
        raise TheoryError(f"a kernel must be a square matrix, not of shape {tuple(kernel.shape)}.")
    if not torch.allclose(kernel, kernel.T, rtol=1e-6, atol=1e-9 * float(kernel.abs().max())):
        raise TheoryError("the kernel is not symmetric; a kernel between two sets of points has no eigenvalues.")
    return (kernel + kernel.T) / 2, max(rounding, torch.finfo(torch.float64).eps)
