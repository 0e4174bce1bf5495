"""Random numbers by counting: a hash of (seed, epoch, sample index, draw), with no state to keep or split."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = 0x9E3779B97F4A7C15  # splitmix64 (Steele, Lea and Flood 2014): its increment and its finaliser
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _mixed(x: Tensor) -> Tensor:
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        x = x ^ ((x >> shift) & (2 ** (64 - shift) - 1))  # the mask makes the shift logical
        if factor is not None:
            x = x * _signed(factor)
    return x


def uniforms(seed: int, epoch: int, indices: Tensor, draws: int) -> Tensor:
    """Return (samples, draws) numbers in [0, 1), float64, each a function of (seed, epoch, index, draw).

    Example:
        >>> both = uniforms(7, 3, torch.tensor([5, 9]), 2)
        >>> torch.equal(both[1:], uniforms(7, 3, torch.tensor([9]), 2))
        True
    """
    key = torch.tensor([_signed(seed)])
    for part in (epoch, indices.cpu().to(torch.int64)):
        key = _mixed(key + _signed(_STEP)) + part
    counter = torch.arange(1, draws + 1) * _signed(_STEP)
    bits = _mixed(_mixed(key)[:, None] + counter)
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
