"""Run a model without leaving a trace: flags, attributes, registries, random numbers, logs, other processes."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give a model and the random number generators back as they were: flags, attributes, registries."""
    modules = list(model.modules())
    attributes = [dict(m.__dict__) for m in modules]
    registries = [{k: copy.copy(v) for k, v in d.items() if isinstance(v, (dict, list, set))} for d in attributes]
    tensors = [t for d in attributes for t in d.values() if isinstance(t, torch.Tensor) and not t.is_meta]
    values = [(t, t._version, t.detach().clone()) for t in tensors]
    python_random = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_random = numpy.random.get_state() if numpy is not None else None
    devices = sorted({p.device for p in model.parameters() if p.device.type == "cuda"}, key=str)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_random)
        if numpy is not None:
            numpy.random.set_state(numpy_random)
        for m, attribute, registry in zip(modules, attributes, registries, strict=True):
            m.__dict__.clear()
            m.__dict__.update(attribute)
            for key, saved in registry.items():
                refill(m.__dict__[key], saved)
        for t, version, value in values:
            if t._version != version:
                t.data.copy_(value)


def refill(container: dict | list | set, saved: dict | list | set) -> None:
    """Give a container back its items, keeping the object."""
    container.clear()
    if isinstance(container, list):
        container.extend(saved)
    else:
        container.update(saved)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What goes wrong is said in one error; fake kernels would print a traceback besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def unsynchronised() -> Iterator[None]:
    """Let SyncBatchNorm run as a plain one: a recording talks to no other process."""
    original = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # pyrefly: ignore
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = original  # pyrefly: ignore
