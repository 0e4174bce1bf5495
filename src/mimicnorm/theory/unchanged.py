"""Run a network and put everything back: weights, buffers, attributes of any kind, random states."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mimicnorm.errors import TheoryError


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model and the random states of Python and numpy on the way out (torch's: `fork_rng`)."""
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise TheoryError("the model has lazy layers without weights: run it once on a batch first.")
    undo: list[Callable[[], Any]] = []
    _remember(model, undo, {})
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for step in undo:
            step()


def _remember(thing: Any, undo: list[Callable[[], Any]], seen: dict[int, Any]) -> None:
    """Append what restores `thing` and all it holds, in place: others may hold the same objects."""
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    inner: list[Any] = []
    if isinstance(thing, Tensor):
        if not thing.is_meta and not thing.is_inference():
            undo.append(partial(_put_back, thing, thing.detach().clone()))
    elif isinstance(thing, nn.Module):
        inner = [thing.__dict__]
    elif isinstance(thing, dict):
        old_items = dict(thing)
        undo.append(lambda: (thing.clear(), thing.update(old_items)))
        inner = list(old_items.values())
    elif isinstance(thing, (list, deque)):
        old_list = list(thing)
        undo.append(lambda: (thing.clear(), thing.extend(old_list)))
        inner = old_list
    elif isinstance(thing, set):
        old_set = set(thing)
        undo.append(lambda: (thing.clear(), thing.update(old_set)))
    elif isinstance(thing, tuple):
        inner = list(thing)
    elif isinstance(thing, np.ndarray):
        undo.append(partial(np.copyto, thing, thing.copy()))
    elif isinstance(thing, torch.Generator):
        undo.append(partial(thing.set_state, thing.get_state()))
    elif isinstance(thing, random.Random):
        undo.append(partial(thing.setstate, thing.getstate()))
    elif isinstance(thing, np.random.Generator):
        undo.append(partial(setattr, thing.bit_generator, "state", thing.bit_generator.state))
    for value in inner:
        _remember(value, undo, seen)


def _put_back(tensor: Tensor, old: Tensor) -> None:
    if tensor.shape != old.shape:
        tensor.data = old
    elif not torch.equal(tensor, old):
        tensor.data.copy_(old)
