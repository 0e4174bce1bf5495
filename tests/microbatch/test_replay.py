"""Random states go back to where they were."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from mimicnorm.microbatch.replay import RandomState, accelerators, full_precision, input_device


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


def test_all_generators_are_restored():
    start = RandomState.now(())
    first = draw()
    assert draw() != first
    start.restore()
    assert draw() == first


def test_devices():
    net = nn.Linear(2, 2)
    assert accelerators(net) == ()
    assert accelerators(net.to("meta")) == ()
    assert input_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert input_device(nn.ReLU()) is None


def test_full_precision_switches_autocast_off_and_on_again():
    with torch.autocast("cpu", torch.bfloat16):
        with full_precision(torch.device("cpu")):
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")
    with full_precision(None):
        assert not torch.is_autocast_enabled("cpu")
