"""Run the same micro-batch again and get the same numbers: random states, precision."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RandomState:
    """Where all generators stood that a forward pass may draw from: torch's on each device, Python's, NumPy's."""

    cpu: Tensor
    devices: tuple[tuple[torch.device, Tensor], ...]
    python: Any
    numpy: Any

    @classmethod
    def now(cls, devices: tuple[torch.device, ...]) -> RandomState:
        """Record the present state."""
        of_devices = tuple((d, _module(d).get_rng_state(*_which(d))) for d in devices)
        return cls(torch.get_rng_state(), of_devices, random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Go back to it."""
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            _module(device).set_rng_state(state, *_which(device))
        random.setstate(self.python)
        np.random.set_state(self.numpy)


def accelerators(model: nn.Module) -> tuple[torch.device, ...]:
    """Return the devices other than the CPU that a model is on."""
    devices = {t.device for t in (*model.parameters(), *model.buffers())}
    return tuple(sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str))


def input_device(model: nn.Module) -> torch.device | None:
    """Return where a micro-batch goes: the device of the first parameter."""
    return next((p.device for p in model.parameters()), None)


@contextlib.contextmanager
def full_precision(device: torch.device | None) -> Iterator[None]:
    """Switch autocast off: a backward pass runs in the precision its forward chose."""
    kind = "cpu" if device is None else device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple:
    return () if device.type == "mps" else (device,)  # there is only one
