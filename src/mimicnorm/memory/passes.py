"""Forward and backward pass of one training step: which module saves what, and what an error in them means."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mimicnorm.compress import saved_activations
from mimicnorm.errors import ExampleError, MemoryPredictionError, MimicNormError
from mimicnorm.layers.regression_loss import nodes_from
from mimicnorm.memory.analysis import LOSS
from mimicnorm.memory.tracker import StorageTracker, UnsizedWorkspaceError
from mimicnorm.surgery.example import describe

Loss = Callable[[Any], Tensor]

_NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    UnsizedWorkspaceError,
)
# Errors of the same cause that have no class of their own; .numpy() and printed numbers are the usual ones.
_NEEDS_VALUES_TEXT = re.compile(r"\.numpy\(\)|fake impl|FakeTensor|data pointer")


@dataclass
class Passes:
    """The passes of one step with the whole batch at once, on a model that ``isolate.run`` has prepared.

    Attributes:
        compiled: The modules of the model that are compiled.
        autocast: The type to run forward and loss in, or None.
        activation_bits: The bits to save activations in, as for ``compress.saved_activations``, or None.
        fake: Whether the tensors are fake.
    """

    model: nn.Module
    compiled: set[nn.Module]
    args: tuple
    kwargs: dict[str, Any]
    loss: Loss
    autocast: torch.dtype | None
    activation_bits: int | None
    fake: bool
    tracker: StorageTracker
    _running: list[str] = field(default_factory=list)

    def run(self) -> Any:
        """Run forward, loss and backward; returns what a training loop holds to the end of the step."""
        with self.forward():
            with self.explained():
                output = self.model(*self.args, **self.kwargs)
            value = self.value(output)
        self.backward(value)
        return output, value

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Track a forward pass and what it saves, in the precision asked for."""
        cast = nullcontext() if self.autocast is None else torch.autocast(self.tracker.device_type, self.autocast)
        few_bits = nullcontext() if self.activation_bits is None else saved_activations(self.activation_bits)
        with self.tracker.during("forward"), saved_tensors_hooks(self._save, lambda tensor: tensor), few_bits, cast:
            yield

    def value(self, output: Any) -> Tensor:
        """Return the loss of an output."""
        hint = "give a function of the model's output alone, loss=lambda output: criterion(output, targets)"
        self._running.append(LOSS)
        with self.explained("the loss", hint):
            value = self.loss(output)
        self._leave(LOSS)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
            detached = " without a gradient" if shape and not value.requires_grad else ""
            raise MemoryPredictionError(
                f"the loss returned a {type(value).__name__}{shape}{detached}: return a scalar tensor computed from "
                "the model's output, e.g. output.mean()"
            )
        return value

    def backward(self, value: Tensor) -> None:
        """Run the backward pass; leaves that are not the model's (a loss module's) get their gradients back."""
        ours = {id(tensor) for tensor in (*self.model.parameters(), *tree_leaves((self.args, self.kwargs)))}
        leaves = [node.variable for node in nodes_from(value.grad_fn) if hasattr(node, "variable")]
        others = [(leaf, leaf.grad) for leaf in leaves if id(leaf) not in ours]
        try:
            for leaf, _ in others:
                leaf.grad = None
            with self.tracker.during("backward"), self.explained("the backward pass"):
                value.backward()
        finally:
            for leaf, grad in others:
                leaf.grad = grad

    def follow_modules(self) -> None:
        """Note which module runs, but not inside what is compiled: that would be compiled, too."""
        inside = {part for module in self.compiled for part in module.modules() if part is not module}
        for name, module in self.model.named_modules():
            if module not in inside:
                module._compiled_call_impl = self._named(module._compiled_call_impl or module._call_impl, name)

    def _named(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def named(*args, **kwargs):
            self._running.append(name)
            output = call(*args, **kwargs)
            self._leave(name)
            return output

        return named

    def _leave(self, name: str) -> None:
        """Take a module off the list, with any inside it that raised an error which it caught."""
        while self._running.pop() != name:
            pass

    @_disable_dynamo  # where a compiled model breaks its graph, the compiler would look into what runs in between
    def _save(self, tensor: Tensor) -> Tensor:
        self.tracker.save(tensor, self._running[-1] if self._running else "")
        return tensor

    @contextmanager
    def explained(self, what: str = "", hint: str = "") -> Iterator[None]:
        """Turn an error into one of this package: what failed, and how it may run where it needs values.

        Args:
            what: What runs, such as "the loss". Without it, the module in which the error was raised.
            hint: What to do about an error of any other kind.
        """
        try:
            yield
        except MimicNormError:
            raise
        except Exception as error:
            cause = _cause(error)
            text = f"{type(cause).__name__}: {first_line(cause)}"
            module = self._running[-1] if self._running else ""
            place = what or (f"module {module!r}" if module else "the model")
            if self.fake and (isinstance(cause, _NEEDS_VALUES) or _NEEDS_VALUES_TEXT.search(str(cause))):
                raise MemoryPredictionError(
                    f"{place} cannot run on fake tensors, because it needs values, not only shapes ({text}). "
                    "fake=False (--no-fake on the command line), with real data as the example, runs one real step"
                ) from error
            if not what:
                example = describe(self.args, self.kwargs)
                raise ExampleError(f"{place} does not run on the example ({example}): {text}", module) from error
            raise MemoryPredictionError(f"{what} fails: {text}" + (f". Instead, {hint}" if hint else "")) from error


def default_loss(output: Any) -> Tensor:
    """Make a scalar of any output: cross entropy where there are classes, a sum elsewhere.

    Example:
        >>> default_loss({"logits": torch.zeros(5, 2, requires_grad=True)}).item()
        0.6931471824645996
    """
    terms = [
        F.cross_entropy(leaf, leaf.new_zeros((leaf.shape[0], *leaf.shape[2:]), dtype=torch.long))
        if leaf.dim() > 1
        else leaf.sum()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not terms:
        raise MemoryPredictionError(
            f"the output ({type(output).__name__}) has no tensor that requires a gradient, so there is nothing "
            "to train: give loss=, a function from the output to a scalar"
        )
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a full stop."""
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def _cause(error: Exception) -> Exception:
    """Return what an error of the compiler is about; its message is about the compiler."""
    inner = error.__cause__ or error.__context__
    of_compiler = type(error).__module__.startswith("torch._dynamo")
    return _cause(inner) if of_compiler and isinstance(inner, Exception) else error
