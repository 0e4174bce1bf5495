"""Random bits by counting: a hash of (seed, step, place, index of the element), with no state to keep or split."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor

from mimicnorm.integer.formats import CHUNK, raised

_STEP, _FACTORS, _SHIFTS = 0x9E3779B1, (0x85EBCA6B, 0xC2B2AE35), (16, 13, 16)  # the finaliser of murmur3


def key(*parts: int | str) -> int:
    """Mix several parts into one number of 32 bits."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest()
    return _signed(int.from_bytes(digest, "little"))


def random_bits(key: int, first: int, count: int, bits: int) -> Tensor:
    """Return ``count`` integers of ``bits`` bits (at most 31), for the elements from ``first`` on.

    Example:
        >>> whole = random_bits(7, 0, 10, 8)
        >>> torch.equal(whole[4:], random_bits(7, 4, 6, 8))
        True
    """
    steps = _chunk()[:count] if count <= CHUNK else multiples(count)
    return mixed_(steps + start(key, first)).bitwise_and_(2**bits - 1)


def start(key: int, first: int) -> int:
    """Return what is added to `multiples` where the first element is number ``first``."""
    return _signed(first * _STEP + key)


def multiples(count: int) -> Tensor:
    """Return 0, 1, 2, ... times an odd number, in 32 bits."""
    return torch.arange(count, dtype=torch.int32).mul_(_signed(_STEP))


@functools.cache
def _chunk() -> Tensor:
    return multiples(CHUNK)


def mixed_(h: Tensor) -> Tensor:
    """Let every bit of an int32 change every other; in place."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        h ^= (h >> shift).bitwise_and_(2 ** (32 - shift) - 1)  # the mask makes the shift logical
        if factor is not None:
            h *= _signed(factor)
    return h


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def stochastic_shift(data: Tensor, by: int, key: int | None, first: int = 0) -> Tensor:
    """Return ``data / 2^by``, rounded up or down at random so that the mean is exact.

    ``by`` may be negative; what does not fit saturates then.

    Args:
        data: int32 or int64; an int32 may hold up to 30 bits.
        by: The shift.
        key: Of the random bits; None rounds to nearest.
        first: The index of the first element.
    """
    if by <= 0:
        return raised(data, -by, torch.iinfo(data.dtype).bits - 2)  # a copy, like all that is returned
    if by > 24:  # more random bits than 24 say nothing
        data, by = data >> min(by - 24, 62 if data.dtype == torch.int64 else 30), 24
    if key is None:
        return (data + (1 << by - 1)) >> by
    bits = random_bits(key, first, data.numel(), by).view(data.shape)
    return (bits.add_(data) if data.dtype == torch.int32 else data + bits) >> by
