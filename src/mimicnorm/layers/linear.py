"""Linear maps: convolutions and matrices, the calls that apply them, the layers that hold their weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHT_LAYERS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)


# -- maps --------------------------------------------------------------------------------------------------------
# eq=False: Dynamo of torch 2.6 and 2.8 hashes an object before its fields exist.


@dataclass(frozen=True, eq=False)
class Convolution:
    """The linear map of a convolution, transposed or not, on a batched input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0,)

    @property
    def weight_groups(self) -> int | None:
        """See ``by_output``."""
        return self.groups if self.transposed else None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._settings())

    def backward(
        self, grad: Tensor, x: Tensor | None, x_shape: torch.Size, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients for (x, weight, bias), each where ``mask`` asks for it."""
        if x is None:  # its values are not needed, only its shape
            x = grad.new_empty(1).expand(x_shape)
        bias_shape = [grad.shape[1]] if mask[2] else None
        return torch.ops.aten.convolution_backward.default(grad, x, weight, bias_shape, *self._settings(), list(mask))

    def _settings(self) -> tuple[Any, ...]:
        output_padding = self.output_padding if self.transposed else (0,) * len(self.stride)
        return self.stride, self.padding, self.dilation, self.transposed, output_padding, self.groups


@dataclass(frozen=True, eq=False)
class Matrix:
    """The linear map of ``nn.Linear`` on an input of any rank."""

    weight_groups = None

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def backward(
        self, grad: Tensor, x: Tensor | None, x_shape: torch.Size, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients for (x, weight, bias), each where ``mask`` asks for it."""
        del x_shape
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if mask[0] else None
        grad_weight = rows.T @ x.reshape(-1, x.shape[-1]) if mask[1] and x is not None else None
        return grad_x, grad_weight, rows.sum(0) if mask[2] else None


Op = Convolution | Matrix


def fan_in(weight: Tensor, groups: int, transposed: bool, stride: tuple[int, ...]) -> int:
    """Count the inputs that one output sums: for a strided transposed convolution, the most that reach a pixel.

    Example:
        >>> fan_in(torch.empty(64, 32, 3, 3), groups=1, transposed=False, stride=(1, 1))
        288
    """
    kernel = weight.shape[2:]
    if not transposed:
        return weight.shape[1] * math.prod(kernel)
    taps = math.prod(math.ceil(k / s) for k, s in zip(kernel, stride, strict=True))
    return weight.shape[0] // groups * taps


# -- calls and layers --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LinearCall:
    """One call of ``F.conv*``, ``F.conv_transpose*`` or ``F.linear``.

    Attributes:
        uneven: Zeros to add after the input, from the last dimension on: ``padding="same"`` with an even kernel.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    op: Op
    uneven: tuple[int, ...] = ()


def conv_call(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> LinearCall:
    """Parse the arguments of ``F.conv1d`` and its like."""
    n = weight.dim() - 2
    stride, dilation = _each(stride, n), _each(dilation, n)
    uneven: tuple[int, ...] = ()
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):
            uneven = tuple(side for total in reversed(totals) for side in (0, total % 2))
    padding = _each(0 if padding == "valid" else padding, n)
    return LinearCall(input, weight, bias, Convolution(stride, padding, dilation, groups), uneven)


def conv_transpose_call(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> LinearCall:
    """Parse the arguments of ``F.conv_transpose1d`` and its like."""
    n = weight.dim() - 2
    op = Convolution(_each(stride, n), _each(padding, n), _each(dilation, n), groups, True, _each(output_padding, n))
    return LinearCall(input, weight, bias, op)


def linear_call(input, weight, bias=None) -> LinearCall:
    """Parse the arguments of ``F.linear``."""
    return LinearCall(input, weight, bias, Matrix())


def _each(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


LINEAR_CALLS: dict[Any, Any] = {
    F.linear: linear_call,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), conv_call),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), conv_transpose_call),
}
"""The functions that apply a weight, each with the parser of its arguments."""


def plain_kind(cls: type) -> type | None:
    """Which of PyTorch's weight layers a class is derived from, or None."""
    return next((kind for kind in WEIGHT_LAYERS if issubclass(cls, kind)), None)


def has_own_forward(cls: type) -> bool:
    """Whether a class computes something else than the weight layer of PyTorch that it is derived from."""
    kind = plain_kind(cls)
    if kind is None:
        return True
    names = ("forward", "_conv_forward") if kind in CONVOLUTIONS else ("forward",)
    return any(getattr(cls, name) is not getattr(kind, name) for name in names)
