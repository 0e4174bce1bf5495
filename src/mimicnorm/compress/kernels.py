"""The arithmetic of the codec: encode, decode and gate rows of 256 numbers, with codes packed into bytes.

Large buffers run through ``torch.compile``, small ones and those of machines without a compiler in eager mode, in
pieces that stay in the processor's cache. Both write into memory that is there, so no activation is copied.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GROUP = 256
"""Numbers that share a scale."""
ABOVE, BETWEEN, SIGNED = range(3)
COMPILED_FROM = 2**15
"""Numbers from which on a compiled kernel is worth its start."""
_EAGER_ROWS = 256  # 64 Ki numbers: a piece and its intermediates fit a processor's cache
_COMPILED_ROWS = 2**22  # 2^30 numbers: an index fits 32 bits
_TINY = 1e-30  # what a number above the bound decodes to at least; stock backward functions test `> 0`
_TINY_HALF = 6e-8  # the least number of fp16


# -- kernels on whole rows ---------------------------------------------------------------------------------------


def encode_rows(
    x: Tensor, codes: Tensor, scales: Tensor, start: int, kind: int, bits: int, low: float, high: float, seed: int
) -> None:
    """Write codes and scales of (rows, 256) numbers; ``start`` is the first row's number."""
    x = x.float()
    last = 2**bits - 1
    if kind == SIGNED:
        size, steps = x.abs(), 2 ** (bits - 1) - 1
    elif kind == BETWEEN:
        size, steps = (x - low) * (x < high).float(), last - 2
    else:
        size, steps = x - low, last - 1
    scale = _up_to_bf16(size.amax(1, keepdim=True).clamp(min=_TINY))
    scales.copy_(scale)
    # In floats up to the last cast: on CPUs neither sums of bytes and booleans (compiled) nor torch.where (eager) are
    # vectorised.
    level = (size * (steps / scale) + (_uniforms(x, start, seed) if seed else 0.5)).clamp(0, steps + 0.5)
    if kind == SIGNED:
        code = level + (x > 0).float() * 2 ** (bits - 1)
    else:
        code = (level + 1) * (x > low).float()
        if kind == BETWEEN:
            code = code + (x >= high).float() * (last - 1)  # their size is 0, so their code was 1
    codes.copy_(packed(code.to(torch.int32), bits))


def decode_rows(
    out: Tensor, codes: Tensor, scales: Tensor, start: int, kind: int, bits: int, low: float, high: float
) -> None:
    """Write the (rows, 256) numbers of codes."""
    del start
    tiny = _TINY_HALF if out.dtype == torch.float16 else _TINY
    code, last = unpacked(codes, bits).float(), 2**bits - 1
    scale = scales.float()
    if kind == SIGNED:
        half = 2 ** (bits - 1)
        above = (code >= half).float()
        size = (code - half * above) * (scale * (1 / (half - 1)))
        out.copy_(torch.maximum(size, tiny * above) * (2 * above - 1))
    elif kind == BETWEEN:
        inside = ((code > 0) & (code < last)).float()
        size = ((code - 1) * (scale * (1 / (last - 2)))).clamp(tiny, (high - low) * (1 - 2**-10))
        out.copy_(low + size * inside + (high - low) * (code == last))
    else:
        size = (code - 1) * (scale * (1 / (last - 1)))
        out.copy_(low + size.clamp(min=tiny) * code.clamp(max=1))


def gate_rows(
    out: Tensor, grad: Tensor, codes: Tensor, start: int, kind: int, bits: int, inside: float, outside: float
) -> None:
    """Write a gradient multiplied by ``inside`` or ``outside``, as its code says."""
    del start
    code, last = unpacked(codes, bits), 2**bits - 1
    if kind == ABOVE:
        is_inside = code.clamp(max=1).to(grad.dtype)
    elif kind == SIGNED:
        is_inside = (code.float() >= 2 ** (bits - 1)).to(grad.dtype)
    else:
        is_inside = (code.float() > 0).to(grad.dtype) * (code.float() < last).to(grad.dtype)
    if outside or inside != 1:
        is_inside = is_inside * inside + (1 - is_inside) * outside  # exactly one of the two
    out.copy_(grad * is_inside)


def _up_to_bf16(x: Tensor) -> Tensor:
    """Round up to a number that bf16 has; a compiled kernel skips a cast there and back."""
    return (x.contiguous().view(torch.int32) + 0xFFFF & -0x10000).view(torch.float32)


def packed(code: Tensor, bits: int) -> Tensor:
    """Put several codes into a byte: those of the row's halves, or quarters."""
    parts = code.chunk(8 // bits, 1)
    byte = parts[0]
    for number, part in enumerate(parts[1:], 1):
        byte = byte | part << bits * number
    return byte.to(torch.uint8)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """Return the codes of bytes, one byte each."""
    if bits == 8:
        return codes
    return torch.cat([codes >> shift & 2**bits - 1 for shift in range(0, 8, bits)], 1)


def _uniforms(x: Tensor, start: int, seed: int) -> Tensor:
    """Return a number in [0, 1) for each element: a hash of its index and the seed (the finaliser of murmur3)."""
    index = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape) + _signed(start * GROUP)
    h = index * _signed(0x9E3779B1) + seed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift & 2 ** (32 - shift) - 1)) * _signed(factor)  # the mask makes the shift logical
    return (h >> 8 & 2**24 - 1).float() * 2**-24


def _signed(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def fold_seed(seed: int) -> int:
    """Fold a seed of any size to a number of 32 bits other than 0."""
    seed = (seed ^ seed >> 32) % 2**32
    return _signed(seed) or 1


# -- whole buffers -----------------------------------------------------------------------------------------------

_ROWS: dict[str, Callable[..., None]] = {"encode": encode_rows, "decode": decode_rows, "gate": gate_rows}
_broken: list[str] = []  # why the compiler does not work, once that is known


def by_rows(kernel: str, tensors: tuple[Tensor, ...], settings: tuple) -> None:
    """Run a kernel over all rows; numbers come flat, and what does not fill the last row is filled up with zeros."""
    flat = [t for t in tensors if t.dim() == 1]
    count = flat[0].numel()
    whole = count // GROUP
    rows = [t[: whole * GROUP].view(whole, GROUP) if t.dim() == 1 else t[:whole] for t in tensors]
    if count >= COMPILED_FROM and not _broken:
        for first in range(0, whole, _COMPILED_ROWS):
            _try_compiled(kernel, [t[first : first + _COMPILED_ROWS] for t in rows], first, settings)
    if count < COMPILED_FROM or _broken:
        for first in range(0, whole, _EAGER_ROWS):
            _ROWS[kernel](*(t[first : first + _EAGER_ROWS] for t in rows), first, *settings)
    if count % GROUP:
        tail = [_padded(t[whole * GROUP :]) if t.dim() == 1 else t[whole:] for t in tensors]
        _ROWS[kernel](*tail, whole, *settings)
        if kernel != "encode":
            tensors[0][whole * GROUP :] = tail[0].view(-1)[: count % GROUP]


def _padded(tail: Tensor) -> Tensor:
    return torch.nn.functional.pad(tail, (0, GROUP - tail.numel())).view(1, GROUP)


def _try_compiled(kernel: str, rows: list[Tensor], first: int, settings: tuple) -> None:
    try:
        with torch._C.DisableTorchFunction():  # or the compiler guards on the modes of the forward pass
            _compiled(kernel, settings[:2])(*rows, first, *settings)
    except Exception as error:  # no compiler, or one that fails: whatever it raises, eager mode computes the same
        _broken.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        warnings.warn(
            f"the kernels of mimicnorm.compress run uncompiled, at about a third of the speed ({_broken[0]})",
            stacklevel=2,
        )


@functools.cache
def _compiled(kernel: str, static: tuple) -> Any:
    """Compile a kernel for a kind and a width; sizes and seeds stay variable."""
    del static
    function: Any = _ROWS[kernel]
    # a code object of its own: the compiler hangs its cache on it, and gives up after eight entries
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(own, dynamic=True)
