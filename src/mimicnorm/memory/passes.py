"""Forward and backward pass of a replica: who saves what, and what an error in one of them is about."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks

from mimicnorm.errors import ExampleError, MemoryPredictionError, MimicNormError
from mimicnorm.memory.analysis import LOSS
from mimicnorm.memory.arguments import Loss
from mimicnorm.memory.replica import Replica, first_line
from mimicnorm.memory.tracker import StorageTracker, UnsizedWorkspaceError
from mimicnorm.surgery.example import describe

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# Errors of the same cause that have no class of their own; .numpy() and printed numbers are the usual ones.
_NEEDS_VALUES_TEXT = re.compile(r"\.numpy\(\)|fake impl|FakeTensor|data pointer")
_ON_REAL_TENSORS = (
    "fake=False (--no-fake on the command line), with real data as the example, runs one real step on a copy of the "
    "network"
)


class Names:
    """Which module runs, for the attribution of what is saved and for messages.

    A module that fails is not left, so the last one in the list is where an error came from. One whose error was
    caught is taken off with the module that caught it.
    """

    def __init__(self) -> None:
        self.running: list[str] = []

    def enter(self, name: str) -> None:
        """A module begins."""
        self.running.append(name)

    def leave(self, name: str) -> None:
        """A module has ended, and with it all that it began."""
        while self.running.pop() != name:
            pass

    @property
    def place(self) -> str:
        """What is running, for a message."""
        name = self.running[-1] if self.running else ""
        if name == LOSS:
            return "the loss"
        return f"module {name!r}" if name else "the model"


def follow_modules(replica: Replica) -> Names:
    """Follow the forward through the replica, but not into what is compiled: a hook there would be compiled too."""
    names = Names()
    inside = {part for module in replica.compiled for part in module.children()}
    inside |= {part for child in inside for part in child.modules()}
    for name, module in replica.model.named_modules():
        if module in inside:
            continue
        if module in replica.compiled:
            module._compiled_call_impl = _named(module._compiled_call_impl, name, names)  # pyrefly: ignore
        else:
            module.register_forward_pre_hook(lambda *_, name=name: names.enter(name))
            module.register_forward_hook(lambda *_, name=name: names.leave(name))
    return names


def _named(call: Callable[..., Any], name: str, names: Names) -> Callable[..., Any]:
    def named(*args, **kwargs):
        names.enter(name)
        output = call(*args, **kwargs)
        names.leave(name)
        return output

    return named


@dataclass
class Watch:
    """What the passes leave with a tracker; without one, nothing.

    Attributes:
        saved_by_module: What was saved for backward when a forward pass ended, where that was most.
    """

    names: Names
    tracker: StorageTracker | None = None
    saved_by_module: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Note what is alive during a forward pass, and what is saved at its end."""
        if self.tracker is None:
            yield
            return
        with self.tracker.during("forward"), saved_tensors_hooks(self._saved, lambda tensor: tensor):
            yield
        saved = self.tracker.saved_bytes_by_module()
        if sum(saved.values()) > sum(self.saved_by_module.values()):
            self.saved_by_module = saved

    def backward(self) -> Any:
        """Note what is alive during a backward pass."""
        return nullcontext() if self.tracker is None else self.tracker.during("backward")

    @_disable_dynamo  # where a compiled model breaks its graph, the compiler would look into what runs in between
    def _saved(self, tensor: Tensor) -> Tensor:
        assert self.tracker is not None
        self.tracker.save(tensor, self.names.running[-1] if self.names.running else "")
        return tensor


@dataclass
class Passes:
    """The passes of one step: the whole batch at once.

    Attributes:
        autocast: The type to run forward and loss in, or None.
    """

    replica: Replica
    names: Names
    loss: Loss
    autocast: torch.dtype | None

    def run(self, watch: Watch) -> Any:
        """Run forward, loss and backward; returns what a training loop holds to the end of the step."""
        with watch.forward(), self.casting():  # one context: autocast keeps its copies of weights to the end of it
            output = self.call(self.replica.args, self.replica.kwargs)
            value = self.value(output)
        with watch.backward():
            self.backward(value)
        return output, value

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The model's output."""
        self.names.running.clear()
        with self._explained_by_place(), self.casting():
            output = self.replica.model(*args, **kwargs)
        self.names.running.clear()
        return output

    def value(self, output: Any) -> Tensor:
        """The loss of an output."""
        self.names.enter(LOSS)
        with self._explained_by_place(), self.casting():
            value = self.loss(output)
        self.names.running.clear()
        _refuse_unfit_loss(value)
        return value

    def backward(self, value: Tensor) -> None:
        """Run the backward pass, and give leaves that are not the replica's (a loss module's) back their gradients."""
        own = {id(tensor) for tensor in (*self.replica.model.parameters(), *self.replica.inputs)}
        foreign = [(leaf, leaf.grad) for leaf in _leaves(value) if id(leaf) not in own]
        try:
            for leaf, _ in foreign:
                leaf.grad = None
            with explained("the backward pass", self.replica):
                value.backward()
        finally:
            for leaf, grad in foreign:
                leaf.grad = grad

    def casting(self) -> Any:
        """The precision of forward and loss, as a context."""
        device = self.replica.device.type
        return nullcontext() if self.autocast is None else torch.autocast(device, self.autocast)

    @contextmanager
    def _explained_by_place(self) -> Iterator[None]:
        names, replica = self.names, self.replica
        try:
            yield
        except UnsizedWorkspaceError as error:
            raise MemoryPredictionError(
                f"{names.place} runs as one fused kernel ({error}), whose workspace has no size on fake tensors: "
                f"{_ON_REAL_TENSORS}; torch.backends.mkldnn.flags(enabled=False) predicts the plain kernel of the CPU"
            ) from error
        except MimicNormError:
            raise
        except Exception as error:
            cause = _root(error)
            told = f"{type(cause).__name__}: {first_line(cause)}"
            if _needs_values(cause, replica):
                raise MemoryPredictionError(
                    f"{names.place} cannot run on fake tensors, because it needs values, not only shapes ({told}). "
                    f"{_ON_REAL_TENSORS}"
                ) from error
            raise ExampleError(
                f"{names.place} does not run on the example ({describe(replica.args, replica.kwargs)}): {told}"
            ) from error


@contextmanager
def explained(what: str, replica: Replica) -> Iterator[None]:
    """Say what failed, and how it may run where it needs values."""
    try:
        yield
    except MimicNormError:
        raise
    except Exception as error:
        cause = _root(error)
        hint = f". It needs values, not only shapes: {_ON_REAL_TENSORS}" if _needs_values(cause, replica) else ""
        raise MemoryPredictionError(f"{what} fails: {type(cause).__name__}: {first_line(cause)}{hint}") from error


def _refuse_unfit_loss(value: Any) -> None:
    if not isinstance(value, Tensor):
        wrong = f"a {type(value).__name__}"
    elif value.numel() != 1:
        wrong = f"a tensor of shape {tuple(value.shape)}"
    elif not value.requires_grad:
        wrong = "a tensor without a gradient (detached, or made from nothing that is trained)"
    else:
        return
    raise MemoryPredictionError(
        f"the loss returned {wrong}: return a scalar tensor computed from the model's output, e.g. output.mean()"
    )


def _leaves(value: Tensor) -> list[Tensor]:
    """Return the tensors in whose ``.grad`` a backward pass would accumulate."""
    seen, waiting, leaves = set(), [value.grad_fn], []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting.extend(following for following, _ in node.next_functions)
    return leaves


def _root(error: Exception) -> Exception:
    """What an error of the compiler's is about; its own text tells of the compiler."""
    inner = error.__cause__ or error.__context__
    of_compiler = type(error).__module__.startswith("torch._dynamo")
    return _root(inner) if of_compiler and isinstance(inner, Exception) else error


def _needs_values(error: Exception, replica: Replica) -> bool:
    fake = isinstance(replica.mode, FakeTensorMode)
    return fake and (isinstance(error, _NEEDS_VALUES) or _NEEDS_VALUES_TEXT.search(str(error)) is not None)
