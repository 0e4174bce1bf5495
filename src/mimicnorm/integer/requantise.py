"""Where int8 codes are made: the ReLU on the way forward, its mask and random rounding on the way back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mimicnorm.integer import fused
from mimicnorm.integer.exponents import Watch
from mimicnorm.integer.formats import CODE, Block
from mimicnorm.integer.narrow import narrow
from mimicnorm.integer.operation import Operation, Pass, Value


class Requantise(Operation):
    """ReLU (or nothing) and int8 codes forward; the ReLU's mask and int8 errors, rounded at random, backward."""

    reads_sums = True

    def __init__(self, name: str, relu: bool):
        super().__init__(name)
        self.relu, self.output, self.error = relu, Watch(), Watch()

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        block = _requantised(at, self.output, values[0], 0 if self.relu else -CODE)
        return [block], block.data if self.relu else None

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        shape = saved.shape if self.relu else torch.broadcast_shapes(*(e.data.shape for e in error))
        terms = [Block(e.data.expand(shape), e.exponent) for e in error]
        random = (at.key(self.place), at.first * shape[1:].numel()) if at.stochastic else None
        return [[_requantised(at, self.error, terms, -CODE, saved, random)]]


def _requantised(
    at: Pass,
    watch: Watch,
    terms: list[Block],
    low: int,
    open_: Tensor | None = None,
    random: tuple[int, int] | None = None,
) -> Block:
    """Return a sum of blocks as one block of codes, with the exponent that ``watch`` knows."""
    unit = watch.unit_for(terms, at.calibrating)
    if at.calibrating and watch.exponent is None:
        watch.see(narrow(terms, unit, 0, low, open_, None)[1], unit, terms)
        watch.advance()
    exponent = watch.exponent_for(terms)
    to_codes = fused.narrow if at.compiled else narrow
    codes, most = to_codes(terms, unit, exponent - unit, low, open_, random)
    if at.training:
        watch.see(most, unit, terms)
        watch.count_saturated(codes, exponent - unit)
    return Block(codes, exponent)
