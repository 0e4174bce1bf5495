"""A real training step on the CPU and what the profiler saw it allocate: nothing here comes from the package."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _EventType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

MEASURED = "measured step"
CONVOLUTIONS = ("aten::mkldnn_convolution", "aten::convolution_backward")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
}


@dataclass(frozen=True)
class ProfiledPeak:
    """The largest sum of live allocations during the second step of a training."""

    all_bytes: int
    """Everything PyTorch's CPU allocator handed out."""
    tensor_bytes: int
    """Without what one convolution allocates and frees again itself: oneDNN's scratchpads and layout copies."""


@dataclass(frozen=True)
class _Event:
    time_ns: int
    address: int
    size_bytes: int  # negative: freed
    convolution: int | None  # the call it happened in
    measured: bool


def profiled_peak(make_model: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: str) -> ProfiledPeak:
    """Build, train two steps, and add up the allocator's events of the second one.

    Everything is made under the profiler, so that the events from the first on give the absolute amount.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        model = make_model().train()
        images, classes = torch.rand(shape), torch.zeros(shape[0], dtype=torch.long)
        stepper = OPTIMIZERS[optimizer](model.parameters())
        for name in ("first step", MEASURED):
            stepper.zero_grad()
            with record_function(name):
                output = model(images)
                loss = F.cross_entropy(output, classes)
                loss.backward()
                stepper.step()
            del output, loss
    return _peak(_events(profiler))


def _events(profiler: profile) -> list[_Event]:
    events: list[_Event] = []

    def visit(node, convolution: int | None, measured: bool) -> None:
        if node.tag == _EventType.Allocation:
            fields = node.extra_fields
            events.append(_Event(node.start_time_ns, fields.ptr, fields.alloc_size, convolution, measured))
        if convolution is None and node.name in CONVOLUTIONS:
            convolution = node.id
        for child in node.children:
            visit(child, convolution, measured or node.name == MEASURED)

    assert profiler.profiler is not None
    for root in profiler.profiler.kineto_results.experimental_event_tree():
        visit(root, None, False)
    return sorted(events, key=lambda event: event.time_ns)


def _peak(events: list[_Event]) -> ProfiledPeak:
    born: dict[int, int] = {}
    workspace: set[int] = set()
    for index, event in enumerate(events):
        if event.size_bytes > 0:
            born[event.address] = index
            continue
        birth = born.pop(event.address, None)
        if birth is not None and event.convolution is not None and events[birth].convolution == event.convolution:
            workspace |= {birth, index}
    alive = alive_tensors = peak = peak_tensors = 0
    for index, event in enumerate(events):
        alive += event.size_bytes
        alive_tensors += 0 if index in workspace else event.size_bytes
        if event.measured:
            peak, peak_tensors = max(peak, alive), max(peak_tensors, alive_tensors)
    return ProfiledPeak(peak, peak_tensors)
