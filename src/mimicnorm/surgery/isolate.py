"""Run a model without leaving a trace: flags, attributes, registries, random numbers, logs, other processes."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Note every module's class, attributes and registries; the function that puts them back."""
    modules = [(m, type(m), dict(m.__dict__)) for m in model.modules()]
    containers = [(v, copy.copy(v)) for _, _, d in modules for v in d.values() if isinstance(v, (dict, list, set))]

    def restore() -> None:
        for m, cls, attributes in modules:
            m.__class__ = cls
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for container, saved in containers:
            container.clear()
            container.extend(saved) if isinstance(container, list) else container.update(saved)

    return restore


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Give a model and the random number generators back as they were: flags, attributes, registries."""
    restore = snapshot(model)
    attributes = [t for m in model.modules() for t in m.__dict__.values() if isinstance(t, torch.Tensor)]
    values = [(t, t._version, t.detach().clone()) for t in attributes if not t.is_meta]
    python_random = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_random = numpy.random.get_state() if numpy is not None else None
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_random)
        if numpy is not None:
            numpy.random.set_state(numpy_random)
        restore()
        for t, version, value in values:
            if t._version != version:
                t.data.copy_(value)


def seed(value: int) -> None:
    """Seed every source of random numbers that ``untouched`` puts back."""
    torch.manual_seed(value)
    random.seed(value)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(value)


@contextlib.contextmanager
def following(enter: Callable, leave: Callable) -> Iterator[None]:
    """Call ``enter(module, args)`` and ``leave(module, args, output)`` around every module that runs."""
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def instead_of_forward(modules: Iterable[nn.Module], wrap: Callable) -> Iterator[None]:
    """Wrap ``forward`` on the instances: unlike a hook it also sees ``layer.forward(x)``.

    Args:
        modules: The modules.
        wrap: ``wrap(module, forward)`` returns what is called in place of ``forward``.
    """
    modules = list(modules)
    try:
        for m in modules:
            m.__dict__["forward"] = wrap(m, m.forward)
        yield
    finally:
        for m in modules:
            m.__dict__.pop("forward", None)


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
