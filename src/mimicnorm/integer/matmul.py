"""Exact products of int8 matrices, in int32.

``torch._int_mm`` is fast, and wrong on CPUs without VNNI: pairs of products saturate at 16 bits there. It is compared
with an integer product once, on the values that would saturate. Where a side is 1, strides are ambiguous and torch 2.13
returns memory as it was: such products are small, and are made in int32.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

ROWS = 2**17
"""Most products that a sum of 32 bits holds: 127 * 127 * 2^17 < 2^31."""


def matmul(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the int32 product of two int8 matrices, exactly.

    Args:
        a: (m, k), dense; it may be the transpose of a contiguous matrix, like ``b``.
        b: (k, n).
        out: Where to write it, contiguous.

    Example:
        >>> codes = torch.full((2, 3), 127, dtype=torch.int8)
        >>> matmul(codes, codes.t()).tolist()
        [[48387, 48387], [48387, 48387]]
    """
    if fast() and 1 not in (*a.shape, b.shape[1]):
        return torch._int_mm(a, b) if out is None else torch._int_mm(a, b, out=out)
    return plain(a, b) if out is None else out.copy_(plain(a, b))


def plain(a: Tensor, b: Tensor) -> Tensor:
    """Return the product by int32 arithmetic, which is exact everywhere and slow."""
    return torch.mm(a.to(torch.int32), b.to(torch.int32))


def column_sums(codes: Tensor) -> Tensor:
    """Return the sums of the columns of int8 codes, in int64; five times as fast as ``sum``."""
    total = torch.zeros(codes.shape[1], dtype=torch.int64)
    for part in codes.split(ROWS):
        total += matmul(part.t(), torch.ones(len(part), 2, dtype=torch.int8))[:, 0]
    return total


@functools.cache
def fast() -> bool:
    """Whether ``torch._int_mm`` is there and exact on this machine."""
    a = (torch.arange(64 * 192, dtype=torch.int32).mul_(73) % 255 - 127).to(torch.int8).view(64, 192)
    b = a.flip(0, 1).t()
    extremes = [torch.full((64, 192), value, dtype=torch.int8) for value in (127, -127)]
    try:
        pairs = [(a, b), (extremes[0], extremes[0].t()), (extremes[0], extremes[1].t()), (a.t(), b.t())]
        return all(torch.equal(torch._int_mm(x, y), plain(x, y)) for x, y in pairs)
    except (AttributeError, RuntimeError):
        return False
