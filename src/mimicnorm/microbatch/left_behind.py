"""Refuse a loss that reads what the forward passes left behind, outside of the model's output.

A loss may take more from a forward pass than its output: an auxiliary loss in an attribute, features that a hook put
into a list. Where the loss comes after passes without a graph, such a tensor is that of the last micro-batch and a
constant: loss and gradient would be wrong. In one pass nobody knows whether it is a mean over samples. Networks that
only keep tensors for others are no problem, so it has to be seen whether the loss reads them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch.batches import writes
from mimicnorm.microbatch.guards import readable
from mimicnorm.microbatch.reach import reached
from mimicnorm.microbatch.trees import leaves

_OF_TORCH = vars(nn.Module()).keys()


class LeftBehindError(MicroBatchError):
    """A loss reads what the forward passes left outside of the model's output."""


class LeftBehind:
    """The tensors that forward passes leave in attributes, or in anything else that the loss can refer to."""

    def __init__(self, model: nn.Module, loss_fn: Callable):
        self._model, self._loss_fn = model, loss_fn
        # Weak: what an earlier step left behind must not stay in memory during this one.
        self._before, self._left = WeakIdKeyDictionary(), WeakIdKeyDictionary()

    def begin(self) -> None:
        """Remember what is there before the passes."""
        self._before = WeakIdKeyDictionary({t: writes(t) for _, t in self._held()})

    def find(self) -> None:
        """Find what the passes since ``begin`` have made or written."""
        left = {t: name for name, t in self._held() if self._before.get(t) != writes(t)}
        self._left = WeakIdKeyDictionary(left)

    @contextlib.contextmanager
    def refused(self) -> Iterator[None]:
        """Raise, with its name, for a tensor among those found that is read inside."""
        if not self._left:
            yield
            return
        with torch.compiler.set_stance("force_eager"), _Refuse(self._left):  # compiled code hides what it reads
            yield

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are neither parameters nor buffers, by the names under which others find them."""
        of_loss = list(reached([("loss_fn", self._loss_fn)]))
        modules: dict[nn.Module, str] = {}
        for owner, thing in (("model", self._model), *of_loss):
            if isinstance(thing, nn.Module):
                modules = {m: f"{owner}.{name}".rstrip(".") for name, m in thing.named_modules()} | modules
        attributes = [
            (f"{name}.{key}", value)
            for m, name in modules.items()
            for key, value in vars(m).items()
            if key not in _OF_TORCH and not isinstance(value, (int, float, str, NoneType))
        ]
        registered = {id(t) for m in modules for t in (*m._parameters.values(), *m._buffers.values())}
        for name, thing in (*of_loss, *reached(attributes)):
            if isinstance(thing, Tensor) and id(thing) not in registered:
                yield readable(name), thing


class _Refuse(TorchDispatchMode):
    """Raise for an operation on one of these tensors."""

    def __init__(self, named: WeakIdKeyDictionary):
        super().__init__()
        self._named = named

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for t in leaves((args, kwargs)):
            if isinstance(t, Tensor) and t in self._named:
                raise LeftBehindError(
                    f"{self._named[t]}: loss_fn reads this tensor, which the forward pass leaves outside of the "
                    "model's output. In two passes it is that of the last micro-batch and has no graph, so loss and "
                    "gradient would be wrong. Return it from forward with the samples in its first dimension, so that "
                    "loss_fn gets it in the output; or compute it in loss_fn; or, if it is a mean over samples and the "
                    "model has no last BN, take one pass with loss_in_pieces=True"
                )
        return func(*args, **kwargs)
