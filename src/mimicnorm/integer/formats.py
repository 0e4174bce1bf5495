"""Block floating point: integers that share one power of two, and the shifts between such blocks.

A `Block` stands for ``data * 2^exponent``. Activations, weights and errors are int8 codes within +-127; what a matrix
product gives is int32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CODE = 127
"""The largest code. -128 is left out, so that 131,072 products of two codes fit 32 bits."""
CHUNK = 2**18
"""Elements worked on at once: a few int32 copies of them fit a core's cache."""
FRACTION = 12
"""Fraction bits while blocks of different exponents are summed."""


class Block(NamedTuple):
    """Integers and the power of two that they are counted in."""

    data: Tensor
    exponent: int


def peak(data: Tensor) -> int:
    """Return the largest absolute value."""
    if not data.numel():
        return 0
    low, high = torch.aminmax(data)
    return max(int(high), -int(low))


def fitting(value: int, exponent: int, bits: int = 7) -> int:
    """Return the exponent in which ``value * 2^exponent`` takes exactly ``bits`` bits.

    Example:
        >>> fitting(1000, 0)  # 1000 / 2^3 = 125
        3
    """
    return exponent + value.bit_length() - bits


def raised(data: Tensor, by: int, bits: int) -> Tensor:
    """Return ``data * 2^by``; what would take more than ``bits`` bits saturates at ``2^bits``.

    Example:
        >>> raised(torch.tensor([3, 1000, -1000]), 4, 10).tolist()
        [48, 1024, -1024]
    """
    by = min(by, bits)
    most = 2**bits >> by
    return data.clamp(-most, most) << by


def shifted(data: Tensor, by: int) -> Tensor:
    """Return ``data / 2^by``, to the nearest integer (ties up); ``by`` may be negative, and saturates then.

    Example:
        >>> shifted(torch.tensor([5, 6, -6, 7]), 2).tolist(), shifted(torch.tensor([5]), -2).tolist()
        ([1, 2, -1, 2], [20])
    """
    most = torch.iinfo(data.dtype).bits - 2
    if by > most:
        return torch.zeros_like(data)
    if by > 0:
        return (data + (1 << by - 1)) >> by
    return raised(data, -by, most) if by else data


def aligned(terms: list[Block], exponent: int) -> Tensor:
    """Return the sum of blocks in int32, counted in ``2^exponent``; what would not fit saturates.

    Example:
        >>> aligned([Block(torch.tensor([3]), 1), Block(torch.tensor([4]), 0)], 0).tolist()
        [10]
    """
    total: Tensor | None = None
    bits = room(terms)
    for data, own in terms:
        wide, left = data.to(torch.int32), own - exponent
        if left > 0:
            wide = raised(wide, left, bits)
        else:
            wide = wide.clamp(-(2**bits), 2**bits) if data.dtype == torch.int32 else wide
            wide = shifted(wide, -left)
        total = wide if total is None else total + wide
    assert total is not None
    return total


def room(terms: list[Block]) -> int:
    """Return the bits that each of these blocks may take, so that their sum stays below 2^30."""
    return 29 - (len(terms) - 1).bit_length()


def divided(data: Tensor, by: int | Tensor) -> Tensor:
    """Return the quotient by a positive integer, to the nearest one."""
    return torch.div(data + by // 2, by, rounding_mode="floor")


def rate(value: float) -> tuple[int, int]:
    """Return (m, k) with ``m * 2^-k`` within 0.4 % of a number of at least 0, and m of 9 bits at most.

    Example:
        >>> rate(0.1)  # 205 / 2048
        (205, 11)
    """
    fraction, exponent = math.frexp(value)
    return round(fraction * 256), 8 - exponent


def encoded(values: Tensor, exponent: int) -> Tensor:
    """Return codes of floating-point numbers: the data's way in."""
    return (values * 2.0**-exponent).round_().clamp_(-CODE, CODE).to(torch.int8)


def chunks(samples: int, elements: int) -> Iterator[slice]:
    """Cut a batch into slices of about `CHUNK` elements."""
    count = max(1, CHUNK // max(elements, 1))
    for first in range(0, samples, count):
        yield slice(first, min(first + count, samples))
