"""From sums in int32 to int8 codes: align, mask, shift, round, saturate; each an operation on a chunk of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from mimicnorm.integer.counter import stochastic_shift
from mimicnorm.integer.formats import CODE, Block, aligned, chunks, peak, shifted


def narrow(
    terms: list[Block], unit: int, by: int, low: int, open_: Tensor | None, random: tuple[int, int] | None
) -> tuple[Tensor, int]:
    """Return int8 codes of a sum of blocks, and the largest absolute value of the sum.

    Args:
        terms: The blocks.
        unit: What their sum is counted in.
        by: How far it is shifted to the right; negative is to the left.
        low: The smallest code: 0 is a ReLU, and then negative values do not count as large.
        open_: The ReLU's codes: where they are 0, the sum counts as 0.
        random: The key of the random bits and the index of the first element; None rounds to nearest.
    """
    shape = terms[0].data.shape
    codes, most, per_sample = torch.empty(shape, dtype=torch.int8), 0, shape[1:].numel()
    for part in chunks(shape[0], per_sample):
        wide = aligned([Block(data[part], own) for data, own in terms], unit)
        if open_ is not None:  # a product with a boolean mask takes ten times as long
            wide = wide.bitwise_and(open_[part].clamp(max=1).neg_().to(torch.int32))
        most = max(most, int(wide.max()) if low == 0 and wide.numel() else peak(wide))
        if by < 0:  # what is shifted to the left must not overflow before it saturates
            wide = shifted(wide.clamp(-CODE, CODE), max(by, -20))
        elif random is None:
            wide = shifted(wide, by)
        else:
            wide = stochastic_shift(wide, by, random[0], random[1] + part.start * per_sample)
        codes[part] = wide.clamp(low, CODE)  # not in place: it may be an input
    return codes, most
