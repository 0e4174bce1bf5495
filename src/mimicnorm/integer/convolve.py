"""Convolutions as one int8 matrix product per chunk: im2col in channels-last, forward and for both gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mimicnorm.integer.formats import CHUNK, chunks
from mimicnorm.integer.matmul import ROWS, matmul


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride and padding, each (height, width)."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    def output(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the output."""
        sides = zip(size, self.kernel, self.stride, self.padding, strict=True)
        height, width = ((n + 2 * p - k) // s + 1 for n, k, s, p in sides)
        return height, width


def columns(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Return one row per output pixel of padded images (N, H, W, C), in the order (kernel row, kernel column, C)."""
    n, h, w, c = x.shape
    (kh, kw), (sh, sw) = kernel, stride
    rows, cols = (h - kh) // sh + 1, (w - kw) // sw + 1
    strides = (h * w * c, sh * w * c, sw * c, w * c, 1)  # a kernel row's columns and channels lie side by side
    return x.as_strided((n, rows, cols, kh, kw * c), strides).reshape(n * rows * cols, kh * kw * c)


def padded(x: Tensor, geometry: Geometry) -> Tensor:
    """Return contiguous images with zeros around them."""
    ph, pw = geometry.padding
    return F.pad(x, (0, 0, pw, pw, ph, ph)) if ph or pw else x.contiguous()


def _parts(samples: int, pixels: int, outputs: int, fan_in: int) -> Iterator[slice]:
    """Cut a batch so that columns and output fit a cache, but not below 2,048 rows: each product packs the weight."""
    elements = min(pixels * max(outputs, fan_in // 4), CHUNK * pixels // 2**11)
    return chunks(samples, max(elements, CHUNK * pixels // ROWS))


def forward(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Convolve codes (N, H, W, C) with a weight (O, kh * kw * C); return int32 (N, H', W', O)."""
    height, width = geometry.output((x.shape[1], x.shape[2]))
    out = torch.empty(len(x), height, width, len(weight), dtype=torch.int32)
    for part in _parts(len(x), height * width, len(weight), weight.shape[1]):
        rows = columns(padded(x[part], geometry), geometry.kernel, geometry.stride)
        matmul(rows, weight.t(), out=out[part].view(-1, len(weight)))
    return out


def weight_gradient(x: Tensor, error: Tensor, geometry: Geometry) -> Tensor:
    """Return the exact gradient of the weight, int64 (O, kh * kw * C): int32 in a chunk, int64 over chunks."""
    outputs = error.shape[-1]
    pixels = error.shape[1] * error.shape[2]
    fan_in = geometry.kernel[0] * geometry.kernel[1] * x.shape[-1]
    total = torch.zeros(outputs, fan_in, dtype=torch.int64)
    for part in _parts(len(x), pixels, outputs, fan_in):
        rows = columns(padded(x[part], geometry), geometry.kernel, geometry.stride)
        pairs = zip(error[part].reshape(-1, outputs).split(ROWS), rows.split(ROWS), strict=True)
        for some, their_rows in pairs:  # one image may have more pixels than an int32 can sum
            total += matmul(some.t(), their_rows)
    return total


def input_gradient(error: Tensor, weight: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """Return the gradient of the input, int32 (N, H, W, C): the error convolved with the flipped kernel.

    As a convolution it sums in the matrix product; spreading columns back would write 9 times the output.
    """
    (kh, kw), (sh, sw) = geometry.kernel, geometry.stride
    samples, eh, ew, outputs = error.shape
    channels = weight.shape[1] // (kh * kw)
    if (kh, kw) == (1, 1):
        plain = forward(error, weight.t().contiguous(), Geometry())
        if (sh, sw) == (1, 1) and (eh, ew) == size:
            return plain
        out = torch.zeros(samples, *size, channels, dtype=torch.int32)
        out[:, : eh * sh : sh, : ew * sw : sw] = plain
        return out
    flipped = weight.view(outputs, kh, kw, channels).flip(1, 2).permute(3, 1, 2, 0).reshape(channels, -1)
    top, left = kh - 1 - geometry.padding[0], kw - 1 - geometry.padding[1]
    out = torch.empty(samples, *size, channels, dtype=torch.int32)
    for part in _parts(samples, size[0] * size[1], channels, kh * kw * outputs):
        count = part.stop - part.start
        spread = torch.zeros(count, size[0] + kh - 1, size[1] + kw - 1, outputs, dtype=torch.int8)
        spread[:, top : top + eh * sh : sh, left : left + ew * sw : sw][:, :eh, :ew] = error[part]
        matmul(columns(spread, (kh, kw), (1, 1)), flipped.t(), out=out[part].view(-1, channels))
    return out
