"""Pooling that saves where each maximum was, in 2, 4 or 8 bits, and nothing else.

PyTorch saves the input and an int64 index per output for max pooling, the input for average pooling; of the input only
the shape is needed. An index fits in a window's few places: 4 bits for 3 x 3, 2 bits for 2 x 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.utils import _pair

from mimicnorm.compress.kernels import packed, unpacked

_aten = torch.ops.aten


def max_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Return ``F.max_pool2d``; None if indices are wanted, or a window has more places than a byte counts."""
    kernel = _pair(kernel_size)
    if return_indices or math.prod(kernel) > 256:
        return None
    settings = (kernel, _pair(stride or kernel), _pair(padding), _pair(dilation))
    return _MaxPool.apply(x, *settings, ceil_mode)


def avg_pool2d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Return ``F.avg_pool2d``."""
    kernel = _pair(kernel_size)
    settings = (kernel, _pair(stride or kernel), _pair(padding), ceil_mode, count_include_pad, divisor_override)
    return _AvgPool.apply(x, settings)


class _MaxPool(torch.autograd.Function):
    """Saves each maximum's place in its window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *settings: Any) -> Tensor:
        y, indices = _aten.max_pool2d_with_indices(x, *settings)
        kernel, stride, padding, dilation, _ = settings
        ctx.settings, ctx.shape, ctx.stride, ctx.places_stride = settings, x.shape, x.stride(), indices.stride()
        top, left = _corners(y, stride, padding)
        rows = indices.div(x.shape[-1], rounding_mode="floor").sub_(top).floor_divide_(dilation[0])
        places = indices.remainder_(x.shape[-1]).sub_(left).floor_divide_(dilation[1])
        places = places.add_(rows, alpha=kernel[1]).to(torch.uint8).as_strided((1, places.numel()), (0, 1))
        per_byte = 8 // _bits(kernel)
        places = torch.nn.functional.pad(places, (0, -places.numel() % per_byte))
        ctx.save_for_backward(packed(places, _bits(kernel)))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        kernel, stride, padding, dilation, _ = ctx.settings
        places = unpacked(ctx.saved_tensors[0], _bits(kernel)).as_strided(grad.shape, ctx.places_stride).long()
        top, left = _corners(grad, stride, padding)
        rows = places.div(kernel[1], rounding_mode="floor").mul_(dilation[0]).add_(top)
        indices = places.remainder_(kernel[1]).mul_(dilation[1]).add_(left).add_(rows, alpha=ctx.shape[-1])
        del rows
        like = torch.empty_strided(ctx.shape, ctx.stride, dtype=grad.dtype, device=grad.device)  # only its shape counts
        passed = _aten.max_pool2d_with_indices_backward(grad, like, *ctx.settings, indices)
        return passed, *[None] * 5


class _AvgPool(torch.autograd.Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple) -> Tensor:
        ctx.settings, ctx.shape, ctx.stride = settings, x.shape, x.stride()
        return _aten.avg_pool2d(x, *settings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        like = torch.empty_strided(ctx.shape, ctx.stride, dtype=grad.dtype, device=grad.device)
        return _aten.avg_pool2d_backward(grad, like, *ctx.settings), None


def _bits(kernel: tuple[int, ...]) -> int:
    return next(bits for bits in (2, 4, 8) if math.prod(kernel) <= 2**bits)


def _corners(y: Tensor, stride: tuple[int, ...], padding: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return where each window starts: its row, and its column."""
    rows, columns = (torch.arange(n, device=y.device) for n in y.shape[-2:])
    return (rows * stride[0] - padding[0])[:, None], columns * stride[1] - padding[1]
