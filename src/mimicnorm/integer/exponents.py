"""The exponents of activations and errors: each follows what a step saw, and serves the next one."""

from __future__ import annotations

from torch import Tensor

from mimicnorm.integer.formats import CODE, FRACTION, Block, aligned, fitting, peak


class Watch:
    """An exponent that follows the largest value of the step before.

    The exponent of a step is known before its first sample, so samples do not depend on each other, and a batch gives
    the same codes whole or in micro-batches.

    Attributes:
        exponent: None as long as nothing but zeros was seen, and where a sum was too small for the exponent it had.
            The next step takes it from a few samples then.
        saturated: Of this step's values, how many were too large for the exponent.
        count: How many values there were.
    """

    def __init__(self) -> None:
        self.exponent: int | None = None
        self.peak, self.unit = 0, 0
        self.forget()

    def forget(self) -> None:
        """Begin a step."""
        self.peak, self.saturated, self.count = 0, 0, 0
        self.zero_sum, self.zero_terms = True, True

    def see(self, largest: int, unit: int, terms: list[Block]) -> None:
        """Note the largest value of a sum of blocks, counted in ``2^unit``, which is the same throughout a step."""
        self.peak, self.unit = max(self.peak, largest), unit
        if not self.peak and len(terms) > 1:  # a sum of blocks may be rounded to zero
            self.zero_sum &= not aligned(terms, unit).any()
            self.zero_terms &= not any(bool(t.data.any()) for t in terms)

    def count_saturated(self, codes: Tensor, by: int) -> None:
        """Count the largest codes; a pass over the data only if some values did not fit after a shift by ``by``."""
        self.count += codes.numel()
        if self.peak > (CODE << by if by >= 0 else CODE >> -by):
            self.saturated += int((codes.abs() == CODE).sum())

    def advance(self) -> None:
        """Let the exponent follow what was seen."""
        if self.peak:
            self.exponent = fitting(self.peak, self.unit)
        elif self.zero_sum and not self.zero_terms:
            self.exponent = None

    def exponent_for(self, terms: list[Block]) -> int:
        """Return the exponent; if there is none even after calibration, the coarsest unit of the terms."""
        return max(t.exponent for t in terms) if self.exponent is None else self.exponent

    def unit_for(self, terms: list[Block], calibrating: bool) -> int:
        """Return what the sum of blocks is counted in: a single block's own unit, else a fraction of a code."""
        if len(terms) == 1:
            return terms[0].exponent
        if calibrating and self.exponent is None:
            return max(fitting(peak(t.data), t.exponent) for t in terms) - FRACTION
        return self.exponent_for(terms) - FRACTION
