"""The largest batch that a budget of memory allows."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from mimicnorm.errors import ExampleError, MemoryPredictionError, MicroBatchError
from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.arguments import Settings
from mimicnorm.memory.step import measure
from mimicnorm.memory.units import format_bytes, parse_bytes


def largest_batch(model: nn.Module, example: Any, budget: str | int, **settings: Unpack[Settings]) -> int:
    """Find the largest batch whose predicted peak stays within a budget.

    Peak memory is linear in the batch as long as the peak stays at the same operation, so two predictions give
    a first answer; it stands when the prediction at the answer fits and the one at the next larger batch does
    not. The budget is for tensors: leave room for what ``measure`` does not count.

    Args:
        model: Any module.
        example: As for ``measure``; every input tensor with the batch size of the first one is resized.
        budget: Bytes, or text such as ``"16 GiB"``, as for ``parse_bytes``.
        **settings: ``loss``, ``optimizer``, ``autocast``, ``fake`` and ``device`` as for ``measure``. A loss must take
            outputs of any batch size. With ``fake=False`` every batch that is tried is run, the first that is too large
            as well.

    Raises:
        MemoryPredictionError: Not even the smallest batch the network accepts fits.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(7200, 10))
        >>> largest_batch(net, (1, 3, 32, 32), "64 MiB") > 500
        True
    """
    budget_bytes = parse_bytes(budget)
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        analysis = measure(model, example, batch=batch, **settings)
        _refuse_below_fixed_cost(analysis, budget_bytes)
        peaks[batch] = analysis.peak_bytes
        return analysis.peak_bytes <= budget_bytes

    # Two samples first: many networks cannot train on one (a BatchNorm over a single value).
    fitting = 2 if fits(2) else _one(fits, peaks[2], budget_bytes)
    if fitting == 1:
        return 1
    too_large, probe = None, 32
    while too_large is None or too_large - fitting > 1:
        if fits(probe):
            fitting = probe
        else:
            too_large = probe
        probe = _next_probe(peaks, fitting, too_large, budget_bytes)
    return fitting


def _next_probe(peaks: dict[int, int], fitting: int, too_large: int | None, budget_bytes: int) -> int:
    """Follow the line through the two nearest predictions to where it meets the budget."""
    low, high = sorted(peaks)[-2:] if too_large is None else (fitting, too_large)
    bytes_per_sample = max((peaks[high] - peaks[low]) / (high - low), 1)
    probe = low + int((budget_bytes - peaks[low]) / bytes_per_sample)
    if too_large is None:
        return max(probe, fitting + 1)
    return min(max(probe, fitting + 1), too_large - 1)


def _one(fits, peak_of_two: int, budget_bytes: int) -> int:
    try:
        if fits(1):
            return 1
    except (ExampleError, MicroBatchError):  # a BatchNorm, or a LastNorm, over a single value
        pass
    raise MemoryPredictionError(
        f"a batch of two needs {format_bytes(peak_of_two)} at its peak, the budget is {format_bytes(budget_bytes)}, "
        "and the network cannot train on one sample within it: raise the budget, shrink the input or the network"
    )


def _refuse_below_fixed_cost(analysis: Analysis, budget_bytes: int) -> None:
    own = analysis.parameters + analysis.buffers
    if own + analysis.gradients + analysis.optimizer_state > budget_bytes:
        raise MemoryPredictionError(
            f"the budget of {format_bytes(budget_bytes)} is below what the network needs without any input: "
            f"parameters and buffers {format_bytes(own)}, gradients {format_bytes(analysis.gradients)}, optimizer "
            f"state {format_bytes(analysis.optimizer_state)}. Raise the budget, or take an optimizer with less state"
        )
