"""Activations whose gradient follows from their output: ReLU, ReLU6, hardtanh, leaky ReLU, hardsigmoid.

PyTorch saves the *input* of all but ReLU, a second copy beside what the next layer saves. These functions save the
output, which the next layer saves anyway: as it is (lossless), or encoded with codes of their own for both bounds, so
that the gradient stays exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mimicnorm.compress.codec import Code, Kind
from mimicnorm.compress.store import Encoded, Store, refuse_second_derivatives


@dataclass(frozen=True)
class Gate:
    """The gradient of an activation: ``inside`` where the output lies between the bounds, ``outside`` elsewhere."""

    low: float
    high: float = math.inf
    inside: float = 1.0
    outside: float = 0.0

    def code(self, bits: int) -> Code:
        """Choose codes that keep the bounds exactly."""
        if self.outside:  # outputs go on below the bound
            return Code(Kind.SIGNED, bits)
        if self.high == math.inf:
            return Code(Kind.ABOVE, bits, self.low)
        return Code(Kind.BETWEEN, bits, self.low, self.high)


def gated(store: Store, bits: int, gate: Gate, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an activation, in place or not, and save its output in so many bits; 32 as it is."""
    made: list[Encoded] = []
    y = _Gated.apply(x, function, gate, store if bits < 32 else None, bits, made)
    if made:
        store.add(y, made[0])
    return y


class _Gated(torch.autograd.Function):
    """Saves the codes of its output, or the output."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        gate: Gate,
        store: Store | None,
        bits: int,
        made: list[Encoded],
    ) -> Tensor:
        version = x._version
        y = function(x)
        if x._version != version:
            ctx.mark_dirty(x)
        ctx.gate, ctx.encoded = gate, None
        code = gate.code(bits)
        pair = None if store is None else store.encode(y, code)
        if pair is None:
            ctx.save_for_backward(y)
            return y
        encoded, codes = pair
        made.append(encoded)
        ctx.save_for_backward(codes)
        ctx.encoded = (code, *encoded.geometry[:2])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        gate: Gate = ctx.gate
        (saved,) = ctx.saved_tensors
        if ctx.encoded is None:
            is_inside = (saved > gate.low) & (saved < gate.high)
            return torch.where(is_inside, grad * gate.inside, grad * gate.outside), None, None, None, None, None
        code, size, stride = ctx.encoded
        refuse_second_derivatives(code)
        if grad.stride() != stride:
            grad = torch.empty_strided(size, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
        passed = code.gate(grad.as_strided((grad.numel(),), (1,)), saved, gate.inside, gate.outside)
        return passed.as_strided(size, stride), None, None, None, None, None
