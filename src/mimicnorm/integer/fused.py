"""Requantisation compiled by ``torch.compile``: one pass over the data instead of one per shift, mask and random bit.

All shifts are data, not constants, so a kernel is compiled once for a number of blocks, whatever their exponents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from mimicnorm.errors import IntegerError
from mimicnorm.integer import narrow as eager
from mimicnorm.integer.counter import mixed_, multiples, start
from mimicnorm.integer.formats import CODE, Block, room

_BLOCK = 4  # numbers per block: limit, shift to the left, half a unit, shift to the right
_LARGEST = 2**31 - 1
_ALL = 31
_KERNELS = 64  # one for each number and types of blocks, with a mask or not; torch's own limit is 8


def narrow(
    terms: list[Block], unit: int, by: int, low: int, open_: Tensor | None, random: tuple[int, int] | None
) -> tuple[Tensor, int]:
    """Return what `mimicnorm.integer.narrow.narrow` returns."""
    bits = room(terms)
    numbers: list[int] = []
    for _, own in terms:
        left, back = min(max(own - unit, 0), bits), _right(unit - own)
        numbers += [2**bits >> left, left, _half(back), back]
    dropped = min(max(by - 24, 0), _ALL) if random else 0  # more random bits than 24 say nothing
    right = min(_right(by), 24) if random else _right(by)
    numbers += [CODE if by < 0 else _LARGEST, min(max(-by, 0), 20), dropped, right, low]
    numbers += [start(*random), 2**right - 1] if random else [_half(right), 0]
    shape = terms[0].data.shape
    flat = [data.reshape(-1) for data, _ in terms]
    some = None if open_ is None else open_.reshape(-1)
    with torch._dynamo.config.patch(recompile_limit=_KERNELS):
        codes, least, most = _compiled()(flat, some, torch.tensor(numbers, dtype=torch.int32), bool(random))
    return codes.view(shape), max(int(most), 0 if low == 0 else -int(least), 0)


@functools.cache
def require() -> None:
    """Compile a kernel and compare it with `mimicnorm.integer.narrow.narrow`.

    Raises:
        IntegerError: There is no compiler here, or its kernels give other codes.
    """
    data = mixed_(multiples(999)) >> 3
    case = ([Block(data, 0)], 0, 20, -CODE, (data > 0).to(torch.int8), (1, 2))
    try:
        made = narrow(*case)
    except Exception as error:  # whatever a compiler may say
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise IntegerError(f"torch.compile failed: {reason}; without compile=True the same codes are made") from error
    (codes, most), (right, largest) = made, eager.narrow(*case)
    if most != largest or not torch.equal(codes, right):
        raise IntegerError("compiled kernels give other codes on this machine: train without compile=True")


def _right(shift: int) -> int:
    """Return a shift to the right that an int32 can take; a sum has 30 bits, so `_ALL` leave nothing of it."""
    return min(max(shift, 0), _ALL)


def _half(right: int) -> int:
    return 1 << right - 1 if right else 0


def _kernel(terms: list[Tensor], open_: Tensor | None, numbers: Tensor, random: bool) -> tuple[Tensor, Tensor, Tensor]:
    wide = None
    for i, data in enumerate(terms):
        limit, left, half, right = (numbers[_BLOCK * i + j] for j in range(_BLOCK))
        one = ((data.to(torch.int32).clamp(-limit, limit) << left) + half) >> right
        wide = one if wide is None else wide + one
    assert wide is not None
    if open_ is not None:
        wide = torch.where(open_ > 0, wide, 0)
    limit, left, dropped, right, low, first, mask = (numbers[_BLOCK * len(terms) + j] for j in range(7))
    narrow = (wide.clamp(-limit, limit) << left) >> dropped
    more = mixed_(multiples(wide.numel()) + first) & mask if random else first
    codes = ((narrow + more) >> right).clamp(max=CODE).maximum(low).to(torch.int8)
    return codes, wide.amin(), wide.amax()


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(_kernel, dynamic=True, fullgraph=True)
