"""Devices and precision; test_exact.py has the random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from whole_and_parts import Classifier, batch, converted

from mimicnorm.microbatch import backward
from mimicnorm.microbatch.replay import accelerators, full_precision, input_device
from mimicnorm.microbatch.trees import leaves


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


class NoDouble(TorchDispatchMode):
    """A device without float64, such as MPS."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        assert not any(isinstance(t, torch.Tensor) and t.dtype is torch.float64 for t in leaves(out)), func
        return out


@pytest.mark.parametrize("how", [{}, {"loss_in_pieces": True}, {"last_norm": False}])
def test_devices_without_double_precision(how):
    net = converted(Classifier(), torch.float32, last_norm=how.get("last_norm", True))
    x, y = batch(8, torch.float32)
    with NoDouble():
        backward(net, torch.nn.functional.cross_entropy, x, y, micro_batch=3, loss_in_pieces=how.get("loss_in_pieces"))
