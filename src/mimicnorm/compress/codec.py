"""Numbers in 8, 4 or 2 bits: flat buffers in, codes and a scale per group out, and back.

A buffer is an activation's memory in order, whatever its shape and memory format. Groups of 256 numbers share a scale
in bf16. ``Kind`` says what the codes mean; every kind keeps exactly what an activation's gradient asks of its output.
Rounding is to nearest at 8 bits and stochastic below, by a hash of (seed, element's index). The operations are custom
ops, so that fake tensors and dispatch modes see what goes in and comes out, not the kernels.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from mimicnorm.compress import kernels
from mimicnorm.compress.kernels import GROUP

BITS = (2, 4, 8)


class Kind(enum.IntEnum):
    """What a code stands for."""

    ABOVE = kernels.ABOVE
    """Numbers from ``low`` up: code 0 is ``low`` itself, all others are above it (ReLU)."""
    BETWEEN = kernels.BETWEEN
    """Numbers between ``low`` and ``high``: the first and the last code are the bounds themselves (ReLU6)."""
    SIGNED = kernels.SIGNED
    """Any numbers: one bit says whether they are above 0, the others are the magnitude."""


@dataclass(frozen=True)
class Code:
    """A kind of code, its width and its bounds."""

    kind: Kind
    bits: int
    low: float = 0.0
    high: float = 0.0

    @property
    def stochastic(self) -> bool:
        """Whether rounding is random: rounding to nearest would lose what is below half a step of 4 bits."""
        return self.bits < 8

    def payload_bytes(self, count: int) -> int:
        """Return what codes and scales of so many numbers take."""
        groups = -(-count // GROUP)
        return groups * (GROUP * self.bits // 8 + 2)

    def gate(self, grad: Tensor, codes: Tensor, inside: float, outside: float) -> Tensor:
        """Multiply a flat gradient by ``inside`` where the number is off its bounds (above 0), else by ``outside``."""
        return _gate(grad, codes, int(self.kind), self.bits, inside, outside)


@dataclass(frozen=True, eq=False)
class Payload:
    """An encoded buffer."""

    code: Code
    codes: Tensor
    scales: Tensor
    count: int
    dtype: torch.dtype

    def decode(self) -> Tensor:
        """Return the numbers, flat."""
        code = self.code
        return _decode(self.codes, self.scales, int(code.kind), code.bits, code.low, code.high, self.count, self.dtype)


def encode(flat: Tensor, code: Code, seed: int) -> Payload:
    """Encode a flat buffer.

    Example:
        >>> flat = torch.tensor([0.0, 0.25, 1.0]).repeat(200)
        >>> encode(flat, Code(Kind.ABOVE, 8), seed=0).decode()[:3].round(decimals=2)
        tensor([0.0000, 0.2500, 1.0000])
    """
    noise = kernels.fold_seed(seed) if code.stochastic else 0
    codes, scales = _encode(flat.detach(), int(code.kind), code.bits, code.low, code.high, noise)
    return Payload(code, codes, scales, flat.numel(), flat.dtype)


# -- custom ops --------------------------------------------------------------------------------------------------

_ENCODE = "(Tensor flat, int kind, int bits, float low, float high, int seed) -> (Tensor, Tensor)"
_DECODE = (
    "(Tensor codes, Tensor scales, int kind, int bits, float low, float high, int count, ScalarType dtype) -> Tensor"
)
_GATE = "(Tensor grad, Tensor codes, int kind, int bits, float inside, float outside) -> Tensor"


def _encode_fake(flat: Tensor, kind: int, bits: int, low: float, high: float, seed: int) -> tuple[Tensor, Tensor]:
    del kind, low, high, seed
    groups = -(-flat.numel() // GROUP)
    codes = flat.new_empty((groups, GROUP * bits // 8), dtype=torch.uint8)
    return codes, flat.new_empty((groups, 1), dtype=torch.bfloat16)


@torch.library.custom_op("mimicnorm::encode", mutates_args=(), schema=_ENCODE)
def _encode(flat: Tensor, kind: int, bits: int, low: float, high: float, seed: int) -> tuple[Tensor, Tensor]:
    codes, scales = _encode_fake(flat, kind, bits, low, high, seed)
    kernels.by_rows("encode", (flat, codes, scales), (kind, bits, low, high, seed))
    return codes, scales


def _decode_fake(
    codes: Tensor, scales: Tensor, kind: int, bits: int, low: float, high: float, count: int, dtype: torch.dtype
) -> Tensor:
    del scales, kind, bits, low, high
    return codes.new_empty(count, dtype=dtype)


@torch.library.custom_op("mimicnorm::decode", mutates_args=(), schema=_DECODE)
def _decode(
    codes: Tensor, scales: Tensor, kind: int, bits: int, low: float, high: float, count: int, dtype: torch.dtype
) -> Tensor:
    flat = _decode_fake(codes, scales, kind, bits, low, high, count, dtype)
    kernels.by_rows("decode", (flat, codes, scales), (kind, bits, low, high))
    return flat


def _gate_fake(grad: Tensor, codes: Tensor, kind: int, bits: int, inside: float, outside: float) -> Tensor:
    del codes, kind, bits, inside, outside
    return torch.empty_like(grad)


@torch.library.custom_op("mimicnorm::gate", mutates_args=(), schema=_GATE)
def _gate(grad: Tensor, codes: Tensor, kind: int, bits: int, inside: float, outside: float) -> Tensor:
    out = torch.empty_like(grad)
    kernels.by_rows("gate", (out, grad, codes), (kind, bits, inside, outside))
    return out


_encode.register_fake(_encode_fake)
_decode.register_fake(_decode_fake)
_gate.register_fake(_gate_fake)
