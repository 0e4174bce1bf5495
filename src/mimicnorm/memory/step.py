"""One training step, tried out on a replica."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from numbers import Integral
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mimicnorm.errors import ExampleError, MemoryPredictionError, MimicNormError
from mimicnorm.example import describe
from mimicnorm.isolate import untouched
from mimicnorm.memory.analysis import LOSS, Analysis
from mimicnorm.memory.replica import Replica, batch_size, first_line, replicate
from mimicnorm.memory.tracker import StorageTracker, UnsizedWorkspaceError

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Settings(TypedDict, total=False):
    """What kind of step: arguments of ``measure`` that ``largest_batch`` and ``compare`` take, too."""

    loss: Loss | None
    optimizer: str | MakeOptimizer | None
    autocast: torch.dtype | None
    fake: bool


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
}
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


def measure(
    model: nn.Module,
    example: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | MakeOptimizer | None = "sgd-momentum",
    autocast: torch.dtype | None = None,
    fake: bool = True,
    batch: int | None = None,
) -> Analysis:
    """Predict the memory of one training step without running it.

    The step is that of the usual loop once the optimizer has its state: gradients set to none, forward, loss,
    backward, ``optimizer.step()``; the input and the output are held to the end. It happens on a copy of fake
    tensors, which have sizes and lifetimes but no memory; the model and the random number generators are left
    as they were. What is compiled is partitioned as ``torch.compile`` does and then run operation by operation:
    ``saved_bytes`` is what the partitioner keeps, ``peak_bytes`` an upper bound, as nothing is fused. Active
    ``torch.autocast`` contexts and activation checkpointing count as they stand.

    The copies that a convolution on the CPU makes inside itself are part of ``peak_bytes``. Not counted: workspaces
    inside any other kernel (cuDNN's convolutions among them), the allocator's rounding, caching and fragmentation,
    the CUDA context and library handles, communication buffers, sparse gradients, and what a custom operation keeps
    outside of tensors.

    Args:
        model: Any module; ``torch.compile`` may have been applied to it or to parts of it.
        example: A tensor, call arguments (tuple or dict), or a shape. A shape of any size costs nothing.
        loss: From the model's output to a scalar. Without it, cross entropy against class 0 for every output
            tensor of two or more dimensions, the sum of any other.
        optimizer: ``"sgd-momentum"``, ``"sgd"``, ``"adamw"``, a function from parameters to an optimizer, or
            None for no step at all.
        autocast: Run forward and loss in ``torch.autocast`` with this type.
        fake: With False, run the step for real on a copy, on the device where the model is. For networks whose
            shapes depend on the data; give real data as the example.
        batch: Take that many samples instead of the example's.

    Raises:
        MemoryPredictionError: The network cannot run on fake tensors (an LSTM in one fused kernel among them, as
            its workspace has no size there), or nothing in it requires a gradient, or loss or optimizer are unfit.
        ExampleError: The model does not run on the example.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        >>> analysis = measure(net, (1024, 3, 34, 34))
        >>> analysis.parameters
        928
    """
    make_optimizer = _optimizer_maker(optimizer)
    require_module(model)
    loss = default_loss if loss is None else _fit_loss(loss)
    if not isinstance(autocast, torch.dtype | None):
        raise MemoryPredictionError(f"autocast={autocast!r}: give a type such as torch.bfloat16, or None")
    if batch is not None and (not isinstance(batch, Integral) or isinstance(batch, bool) or batch < 1):
        raise MemoryPredictionError(
            f"batch={batch!r}: give a whole number of samples from 1 on, or None for the example's"
        )
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        replica = replicate(model, example, fake=fake, batch=batch)
        names = _follow_modules(replica)
        with replica.mode:
            if replica.compiled:
                _compile(replica, names, loss, autocast)
            return _tracked_step(replica, names, make_optimizer, loss, autocast)


def require_module(model: Any) -> None:
    """Raise for a model that is none."""
    if not isinstance(model, nn.Module):
        raise MemoryPredictionError(f"the model is a {type(model).__name__}: give an nn.Module")


def _fit_loss(loss: Any) -> Loss:
    """Return a loss, unless it cannot be called with the output alone, as a criterion that wants targets."""
    if not callable(loss):
        raise MemoryPredictionError(
            f"loss={loss!r}: give a function from the model's output to a scalar, such as "
            "lambda output: criterion(output, targets), or None"
        )
    try:
        plain = getattr(loss, "_orig_mod", loss)
        signature = inspect.signature(plain.forward if isinstance(plain, nn.Module) else plain)
    except (TypeError, ValueError):  # written in C
        return loss
    try:
        signature.bind(None)
    except TypeError as error:
        raise MemoryPredictionError(
            f"the loss cannot be called with the model's output alone ({error}): give "
            "loss=lambda output: criterion(output, targets)"
        ) from error
    return loss


def _compile(replica: Replica, names: _Names, loss: Loss, autocast: torch.dtype | None) -> None:
    """Run once for the compiler, so that the tracker sees compiled code and not the compiler at work."""
    with warnings.catch_warnings():
        # The compiler looks at .grad of every input; fake intermediate results answer with a warning.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        _backward(_forward(replica, names, loss, autocast)[1], replica)
    replica.model.zero_grad()


def _tracked_step(
    replica: Replica, names: _Names, make_optimizer: MakeOptimizer | None, loss: Loss, autocast: torch.dtype | None
) -> Analysis:
    model = replica.model
    tracker = StorageTracker(replica.device.type)
    with tracker:
        for parameter in model.parameters():
            tracker.add(parameter, "parameters")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: tracker.add(p.grad, "gradients"))
        parameters_bytes = tracker.category_bytes("parameters")
        for buffer in model.buffers():
            tracker.add(buffer, "parameters")
        for tensor in replica.inputs:
            tracker.add(tensor, "inputs")
        optimizer = _with_state(make_optimizer, replica, tracker)
        own_bytes = tracker.category_bytes("parameters")
        with tracker.during("forward"), saved_tensors_hooks(lambda t: _saved(tracker, t, names), lambda t: t):
            output, value = _forward(replica, names, loss, autocast)
        saved_by_module = tracker.saved_bytes_by_module()
        with tracker.during("backward"):
            _backward(value, replica)
        gradients_bytes = tracker.category_bytes("gradients")
        if optimizer is not None:
            with tracker.during("optimizer"), _explained("the optimizer's step", replica):
                optimizer.step()
        del output, value
    return Analysis(
        batch=batch_size(replica.args, replica.kwargs),
        saved_bytes=sum(saved_by_module.values()),
        parameters=parameters_bytes,
        buffers=own_bytes - parameters_bytes,
        inputs=tracker.category_bytes("inputs"),
        gradients=gradients_bytes,
        optimizer_state=tracker.category_bytes("optimizer_state"),
        timeline=tuple(tracker.timeline),
        saved_by_module=saved_by_module,
    )


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


class _Names:
    """Which module runs, for the attribution of what is saved and for messages.

    A module that fails is not left, so the last one in the list is where an error came from. One whose error was
    caught is taken off with the module that caught it.
    """

    def __init__(self) -> None:
        self.running: list[str] = []

    def enter(self, name: str) -> None:
        self.running.append(name)

    def leave(self, name: str) -> None:
        while self.running.pop() != name:
            pass


def _follow_modules(replica: Replica) -> _Names:
    """Follow the forward through the replica, but not into what is compiled: a hook there would be compiled too."""
    names = _Names()
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


def _named(call: Callable[..., Any], name: str, names: _Names) -> Callable[..., Any]:
    def named(*args, **kwargs):
        names.enter(name)
        output = call(*args, **kwargs)
        names.leave(name)
        return output

    return named


def _forward(replica: Replica, names: _Names, loss: Loss, autocast: torch.dtype | None) -> tuple[Any, Tensor]:
    casting = torch.autocast(replica.device.type, autocast) if autocast is not None else nullcontext()
    names.running.clear()
    try:
        with casting:
            output = replica.model(*replica.args, **replica.kwargs)
            names.enter(LOSS)
            value = loss(output)
    except UnsizedWorkspaceError as error:
        raise MemoryPredictionError(
            f"{_place(names)} runs as one fused kernel ({error}), whose workspace has no size on fake tensors: "
            f"{_ON_REAL_TENSORS}; torch.backends.mkldnn.flags(enabled=False) predicts the plain kernel of the CPU"
        ) from error
    except MimicNormError:
        raise
    except Exception as error:
        cause = _root(error)
        told = f"{type(cause).__name__}: {first_line(cause)}"
        if _needs_values(cause, replica):
            raise MemoryPredictionError(
                f"{_place(names)} cannot run on fake tensors, because it needs values, not only shapes ({told}). "
                f"{_ON_REAL_TENSORS}"
            ) from error
        raise ExampleError(
            f"{_place(names)} does not run on the example ({describe(replica.args, replica.kwargs)}): {told}"
        ) from error
    names.running.clear()
    _refuse_unfit_loss(value)
    return output, value


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


def _backward(value: Tensor, replica: Replica) -> None:
    """Run the backward pass, and give leaves that are not the replica's (a loss module's) back their gradients."""
    own = {id(tensor) for tensor in (*replica.model.parameters(), *replica.inputs)}
    foreign = [(leaf, leaf.grad) for leaf in _leaves(value) if id(leaf) not in own]
    try:
        for leaf, _ in foreign:
            leaf.grad = None
        with _explained("the backward pass", replica):
            value.backward()
    finally:
        for leaf, grad in foreign:
            leaf.grad = grad


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


@contextmanager
def _explained(what: str, replica: Replica) -> Iterator[None]:
    try:
        yield
    except MimicNormError:
        raise
    except Exception as error:
        cause = _root(error)
        hint = f". It needs values, not only shapes: {_ON_REAL_TENSORS}" if _needs_values(cause, replica) else ""
        raise MemoryPredictionError(f"{what} fails: {type(cause).__name__}: {first_line(cause)}{hint}") from error


def _root(error: Exception) -> Exception:
    """What an error of the compiler's is about; its own text tells of the compiler."""
    inner = error.__cause__ or error.__context__
    of_compiler = type(error).__module__.startswith("torch._dynamo")
    return _root(inner) if of_compiler and isinstance(inner, Exception) else error


def _needs_values(error: Exception, replica: Replica) -> bool:
    fake = isinstance(replica.mode, FakeTensorMode)
    return fake and (isinstance(error, _NEEDS_VALUES) or _NEEDS_VALUES_TEXT.search(str(error)) is not None)


def _place(names: _Names) -> str:
    name = names.running[-1] if names.running else ""
    if name == LOSS:
        return "the loss"
    return f"module {name!r}" if name else "the model"


def _saved(tracker: StorageTracker, tensor: Tensor, names: _Names) -> Tensor:
    tracker.save(tensor, names.running[-1] if names.running else "")
    return tensor


def _with_state(make: MakeOptimizer | None, replica: Replica, tracker: StorageTracker) -> torch.optim.Optimizer | None:
    """Build the optimizer and let one step with zero gradients create its state."""
    if make is None:
        return None
    trained = [parameter for parameter in replica.model.parameters() if parameter.requires_grad]
    with _explained("making the optimizer", replica):
        optimizer = make(trained)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise MemoryPredictionError(
            f"the function given as optimizer returned {type(optimizer).__name__}: return a torch.optim.Optimizer"
        )
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    with _explained("the optimizer's step", replica):
        optimizer.step()
    optimizer.zero_grad()
    for leaf in tree_leaves([list(state.values()) for state in optimizer.state.values()]):
        if isinstance(leaf, Tensor):
            tracker.add(leaf, "optimizer_state")
    return optimizer


def _optimizer_maker(optimizer: str | MakeOptimizer | None) -> MakeOptimizer | None:
    if optimizer is None or callable(optimizer):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        raise MemoryPredictionError(
            f"optimizer is {type(optimizer).__name__} made for the model's own parameters, but the step is tried on a "
            f"copy: give a function from parameters to an optimizer, lambda p: {type(optimizer).__name__}(p, ...)"
        )
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise MemoryPredictionError(
            f"optimizer {optimizer!r} is not known: give one of {', '.join(map(repr, OPTIMIZERS))}, None, or a "
            "function from parameters to an optimizer"
        )
    return OPTIMIZERS[optimizer]
