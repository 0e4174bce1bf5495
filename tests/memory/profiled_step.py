"""A real training step on the CPU and what the profiler saw it allocate: nothing here comes from the package."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "measured"
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


def at_once(model: nn.Module, images: torch.Tensor, classes: torch.Tensor) -> Any:
    """Forward and backward pass of the whole batch; what a training loop holds of it to the end."""
    output = model(images)
    loss = F.cross_entropy(output, classes)
    loss.backward()
    return output, loss


def profiled_peak(
    make_model: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: str, passes: Callable[..., Any] = at_once
) -> int:
    """Build, train two steps, and return the largest sum of live allocations during the second one.

    Everything that PyTorch's CPU allocator hands out counts, inside of operations too. Everything is made under the
    profiler, so that the events from the first on give the absolute amount.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        model = make_model().train()
        images, classes = torch.rand(shape), torch.zeros(shape[0], dtype=torch.long)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        for name in ("first step", MEASURED):
            stepper.zero_grad()
            with record_function(name):
                held = passes(model, images, classes)
                stepper.step()
            del held
    return max(alive for alive, measured in _alive(profiler) if measured)


def profiled_workspace(operation: Callable[[], Any]) -> tuple[Any, int]:
    """Run one operation; return its result, and by how much the most that it held exceeds what it left."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(MEASURED):
        result = operation()
    alive = [0] + [bytes_ for bytes_, measured in _alive(profiler) if measured]
    return result, max(alive) - alive[-1]


def _alive(profiler: profile) -> Iterator[tuple[int, bool]]:
    """Bytes alive after each event of the allocator, and whether it happened in the measured part."""
    events: list[tuple[int, int, bool]] = []

    def visit(node, measured: bool) -> None:
        if node.tag == _EventType.Allocation:
            events.append((node.start_time_ns, node.extra_fields.alloc_size, measured))
        for child in node.children:
            visit(child, measured or node.name == MEASURED)

    assert profiler.profiler is not None
    for root in profiler.profiler.kineto_results.experimental_event_tree():
        visit(root, False)
    alive = 0
    for _, size, measured in sorted(events):
        alive += size  # negative: freed
        yield alive, measured
