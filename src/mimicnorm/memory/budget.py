"""The largest batch that a budget of memory allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import nn

from mimicnorm.errors import ExampleError, MemoryPredictionError, MicroBatchError
from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.step import Settings, measure
from mimicnorm.memory.units import format_bytes, parse_bytes

_MANY = 8  # predictions; three to five are enough where memory grows along lines


def largest_batch(model: nn.Module, example: Any, budget: str | int, **settings: Unpack[Settings]) -> int:
    """Find the largest batch whose predicted peak stays within a budget.

    The prediction of the answer fits, and that of one sample more does not. Leave room for what ``measure`` does not
    count.

    Args:
        model: Any module.
        example: As for ``measure``; every input tensor with the batch size of the first one is resized.
        budget: Bytes, or text such as ``"16 GiB"``, as for ``parse_bytes``.
        **settings: As for ``measure``. A loss must take outputs of any batch size. With ``fake=False`` every batch that
            is tried is run, the first that is too large as well.

    Raises:
        MemoryPredictionError: Not even the smallest batch the network accepts fits.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 10))
        >>> largest_batch(net, (1, 3, 32, 32), "64 MiB") > 500
        True
    """
    budget_bytes = parse_bytes(budget)

    def predict(batch: int) -> Analysis:
        return measure(model, example, batch=batch, **settings)

    return search(predict, budget_bytes, predict(2))  # a BatchNorm cannot train on one sample


def search(predict: Callable[[int], Analysis], budget_bytes: int, first: Analysis) -> int:
    """Find the largest batch that fits, from the prediction for one batch of any size.

    Each moment of the step grows along a line, as long as the kernels stay the same. So one or two predictions lead
    close to the answer, whichever moment is the peak there. Where many do not (memory that grows in steps), the search
    goes on by doubling and halving.
    """
    known = {first.batch: first}
    fitting, too_large = 0, 2**63
    probe = first.batch
    while too_large - fitting > 1:
        try:
            analysis = known[probe] = known.get(probe) or predict(probe)
            fits = analysis.peak_bytes <= budget_bytes
        except (ExampleError, MicroBatchError):  # a BatchNorm, or a LastNorm, over a single value
            if probe > 1:
                raise
            fits = False
        if fits:
            fitting = probe
        else:
            too_large = probe
        if len(known) < _MANY:
            guess = _largest_on_lines(known, probe, budget_bytes)
            probe = min(max(guess, fitting + 1, 2), too_large - 1)
        else:
            middle = (fitting + too_large) // 2
            probe = min(middle, 2 * fitting) if fitting else middle
    if fitting:
        return fitting
    smallest = known[min(known)]
    fixed = smallest.parameters + smallest.buffers + smallest.gradients + smallest.optimizer_state
    raise MemoryPredictionError(
        f"a batch of {smallest.batch} needs {format_bytes(smallest.peak_bytes)} at its peak, and the budget is "
        f"{format_bytes(budget_bytes)}. Parameters, buffers, gradients and optimizer state take {format_bytes(fixed)} "
        "with any batch. Raise the budget, shrink the input or the network, or use an optimizer with less state"
    )


def _largest_on_lines(known: dict[int, Analysis], probe: int, budget_bytes: int) -> int:
    """Follow every moment of the step along the line through the last prediction and the one nearest to it."""
    last = known[min(known, key=lambda batch: abs(batch - probe))]
    others = [analysis for analysis in known.values() if analysis is not last]
    totals = [moment.total for moment in last.timeline]
    if others:
        other = min(others, key=lambda analysis: abs(analysis.batch - last.batch))
        start, starts = other.batch, [moment.total for moment in other.timeline]
    else:  # without samples: what does not depend on their number
        start, starts = 0, [m.parameters + m.gradients + m.optimizer_state for m in last.timeline]
    if len(starts) != len(totals):
        starts, totals = [max(starts)], [max(totals)]
    samples = last.batch - start
    growths = [(a, b - a) for a, b in zip(starts, totals, strict=True) if (b - a) * samples > 0]
    return min((start + (budget_bytes - a) * samples // growth for a, growth in growths), default=2 * last.batch)
