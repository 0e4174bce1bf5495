"""Run a model without leaving a trace: values, attributes, registries, random numbers, logs, other processes."""

from __future__ import annotations

import contextlib
import logging
import operator
import random
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

_ATOMS = (str, bytes, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_EXCHANGEABLE = (dict, OrderedDict, defaultdict, list)  # others may refuse an assignment, or do more than that


def run(
    model: nn.Module,
    call: Callable[..., Any],
    inputs: tuple = (),
    *,
    fake: bool = False,
    training: bool | None = None,
    seed: int | None = None,
    modes: Iterable[AbstractContextManager] = (),
) -> Any:
    """Return ``call(*inputs)``, a function that runs the model, and leave no trace of it.

    While the call runs, the model holds copies of its parameters, buffers and other tensors. It may write into them and
    into its inputs, set attributes, fill caches, draw random numbers: afterwards everything is as before. Warnings and
    the log of fake tensors are silenced, and SyncBatchNorm runs as a plain BatchNorm. Gradients are enabled: pass
    ``torch.no_grad()`` as a mode to disable them.

    Args:
        model: The model that the call runs.
        call: Gets the inputs with every tensor copied.
        inputs: Tuples, lists and dicts of anything.
        fake: Make the copies fake tensors, which have shapes and no values, and run in their mode.
        training: The mode of the model and of all its modules; None for the modes they are in.
        seed: Seed Python, numpy and torch; None to go on with their states.
        modes: Context managers to enter just before the call, the outermost first.

    Example:
        >>> norm = nn.BatchNorm1d(3)
        >>> run(norm, norm, (torch.ones(2, 3),), training=True).shape, norm.num_batches_tracked
        (torch.Size([2, 3]), tensor(0))
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    copies: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that their ids stay valid

    def copied(t: Tensor) -> Tensor:
        if id(t) not in copies:
            copies[id(t)] = (t, _copy(t, mode))
        return copies[id(t)][1]

    with contextlib.ExitStack() as stack:
        for context in (silent(), _unsynchronised(), _random_states(), torch.inference_mode(False)):
            stack.enter_context(context)
        state = _State(model)
        stack.callback(state.restore)
        state.exchange(copied)
        if training is not None:
            model.train(training)
        for m in model.modules() if fake else ():
            if isinstance(m, _BatchNorm) and m.momentum is None:
                m.momentum = 0.0  # an average over all batches divides by their number, which fake tensors do not tell
        if seed is not None:
            _seed(seed)
        inputs = pytree.tree_map_only(Tensor, copied, inputs)
        for context in (mode, *modes):
            stack.enter_context(context)
        return call(*inputs)


def _copy(t: Tensor, mode: Any) -> Tensor:
    if nn.parameter.is_lazy(t):
        return t
    value = (
        t.detach().clone() if t.is_inference() else t.detach()
    )  # fake tensors and versions are not for inference tensors
    if isinstance(mode, FakeTensorMode):
        return mode.from_tensor(value)
    return value.clone().requires_grad_(t.requires_grad)


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Note every module's class, attributes and registries; return the function that restores them, in place.

    Containers are restored at any depth, and so are generators and numpy arrays. Values of tensors are not.
    """
    return _State(model).restore


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore a model as ``snapshot`` does, and the random states, on the way out."""
    restore = snapshot(model)
    try:
        with _random_states():
            yield
    finally:
        restore()


class _State:
    """What a model holds: modules, containers, arrays and generators, at any depth.

    Only modules and containers are searched. What other objects hold is theirs: a data set or a logger may be among it.
    """

    def __init__(self, model: nn.Module):
        self.undo: list[Callable[[], Any]] = []
        self.slots: list[tuple[Any, Any, Tensor]] = []  # container and key of each tensor that can be exchanged
        self.fixed: list[Tensor] = []  # tensors in tuples, sets and containers of other classes
        seen: dict[int, Any] = {}
        waiting: list[Any] = [model]
        while waiting:
            thing = waiting.pop()
            if id(thing) not in seen:
                seen[id(thing)] = thing
                waiting += [inner for inner in self._note(thing) if not isinstance(inner, _ATOMS)]

    def _note(self, thing: Any) -> Iterable[Any]:
        """Note how to restore one thing; return what it holds."""
        if isinstance(thing, nn.Module):
            self.undo.append(partial(setattr, thing, "__class__", type(thing)))
            if isinstance(thing, torch.jit.ScriptModule):
                self._note_scripted(thing)
            return [thing.__dict__, *thing._modules.values()]
        if isinstance(thing, (dict, list, deque, set)):
            return self._note_container(thing)
        if isinstance(thing, (tuple, frozenset)):
            self.fixed += [t for t in thing if isinstance(t, Tensor)]
            return thing
        if isinstance(thing, torch.Generator):
            self.undo.append(partial(thing.set_state, thing.get_state()))
        elif isinstance(thing, random.Random):
            self.undo.append(partial(thing.setstate, thing.getstate()))
        elif isinstance(thing, np.random.Generator):
            self.undo.append(partial(setattr, thing.bit_generator, "state", thing.bit_generator.state))
        elif isinstance(thing, np.random.RandomState):
            self.undo.append(partial(thing.set_state, thing.get_state()))
        elif isinstance(thing, np.ndarray) and thing.flags.writeable:
            self.undo.append(partial(np.copyto, thing, thing.copy()))
        return ()

    def _note_container(self, thing: Any) -> Iterable[Any]:
        if not thing:  # most are: a module has a dozen registries
            self.undo.append(thing.clear)
            return ()
        saved, before = dict(thing) if isinstance(thing, dict) else list(thing), _contents(thing)
        if type(thing) in _EXCHANGEABLE:
            items = saved.items() if isinstance(saved, dict) else enumerate(saved)
            self.slots += [(thing, key, t) for key, t in items if isinstance(t, Tensor)]
        else:
            self.fixed += [t for t in before if isinstance(t, Tensor)]

        def restore() -> None:
            now = _contents(thing)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                thing.clear()
                thing.extend(saved) if isinstance(thing, (list, deque)) else thing.update(saved)

        self.undo.append(restore)
        return before

    def _note_scripted(self, module: nn.Module) -> None:
        """A scripted module keeps its tensors outside of Python: assign them again."""
        for registry in (module._parameters, module._buffers):
            for key, t in registry.items():
                if t is not None:
                    self.slots.append((registry, key, t))
                    self.undo.append(partial(registry.__setitem__, key, t))

    def exchange(self, copied: Callable[[Tensor], Tensor]) -> None:
        """Put copies in the place of tensors; where that is not possible, note their values."""
        for container, key, t in self.slots:
            container[key] = copied(t)
        for t in {id(t): t for t in self.fixed}.values():
            if not t.is_inference() and not t.is_meta:
                self.undo.append(partial(_write_back, t, t.detach().clone()))

    def restore(self) -> None:
        """Restore everything noted, in place: others may hold the same objects."""
        for undo in self.undo:
            undo()


def _contents(container: Any) -> list[Any]:
    """What a container holds; of a dict, keys and values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _write_back(t: Tensor, value: Tensor) -> None:
    if t.shape != value.shape:
        t.data = value
    elif t.layout is not torch.strided or not torch.equal(t, value):  # versions do not count writes to ``t.data``
        t.data.copy_(value)


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """Restore the states of Python, numpy and torch; of CUDA only if it is in use, as to look would initialise it."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _seed(value: int) -> None:
    # not torch.manual_seed: where CUDA is not in use, it queues a seed for the day that it is
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value)


@contextlib.contextmanager
def instead_of_forward(modules: Iterable[nn.Module], wrap: Callable) -> Iterator[None]:
    """Wrap ``forward`` on the instances: unlike a hook it also sees ``layer.forward(x)``.

    Args:
        modules: The modules. Scripted ones are left out, as their forward is not Python's.
        wrap: ``wrap(module, forward)`` returns what is called in place of ``forward``.
    """
    wrapped = [(m, m.__dict__.get("forward")) for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    try:
        for m, _ in wrapped:
            m.__dict__["forward"] = wrap(m, m.forward)
        yield
    finally:
        for m, before in wrapped:
            m.__dict__.pop("forward", None)
            m.__dict__.update({} if before is None else {"forward": before})


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Silence warnings and the log of fake tensors: a failed fake kernel prints a traceback before it raises."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _unsynchronised() -> Iterator[None]:
    """Let SyncBatchNorm run as a plain one: a recording talks to no other process."""
    original = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # pyrefly: ignore
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = original  # pyrefly: ignore
