"""One training step, tried out on a replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
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
from mimicnorm.memory.replica import Replica, batch_size, replicate
from mimicnorm.memory.tracker import StorageTracker

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

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


def measure(
    model: nn.Module,
    example: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | MakeOptimizer | None = "sgd-momentum",
    autocast: torch.dtype | None = None,
    fake: bool = True,
) -> Analysis:
    """Predict the memory of one training step without running it.

    The step is that of the usual loop once the optimizer has its state: gradients set to none, forward, loss,
    backward, ``optimizer.step()``; the input and the output are held to the end. It happens on a copy of fake
    tensors, which have sizes and lifetimes but no memory; the model and the random number generators are left
    as they were. What is compiled is partitioned as ``torch.compile`` does and then run operation by operation:
    ``saved_bytes`` is what the partitioner keeps, ``peak_bytes`` an upper bound, as nothing is fused. Active
    ``torch.autocast`` contexts and activation checkpointing count as they stand.

    Not counted: workspaces inside one kernel (convolution algorithms, layout copies and fused recurrent layers of
    oneDNN and cuDNN), the allocator's rounding, caching and fragmentation, the CUDA context and library handles,
    communication buffers, and what a custom operation keeps outside of tensors.

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

    Raises:
        MemoryPredictionError: The network cannot run on fake tensors, or nothing in it requires a gradient.
        ExampleError: The model does not run on the example.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        >>> analysis = measure(net, (1024, 3, 34, 34))
        >>> analysis.parameters
        928
    """
    return measure_batch(model, example, None, loss=loss, optimizer=optimizer, autocast=autocast, fake=fake)


def measure_batch(
    model: nn.Module,
    example: Any,
    batch: int | None,
    *,
    loss: Loss | None,
    optimizer: str | MakeOptimizer | None,
    autocast: torch.dtype | None,
    fake: bool = True,
) -> Analysis:
    """Do what ``measure`` does, with the example's batch size replaced by another one if given."""
    make_optimizer = _optimizer_maker(optimizer)
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        replica = replicate(model, example, fake=fake, batch=batch)
        names = _follow_modules(replica)
        with replica.mode:
            if replica.compiled:
                _compile(replica, names, loss or default_loss, autocast)
            return _tracked_step(replica, names, make_optimizer, loss or default_loss, autocast)


def _compile(replica: Replica, names: _Names, loss: Loss, autocast: torch.dtype | None) -> None:
    """Run once for the compiler, so that the tracker sees compiled code and not the compiler at work."""
    with warnings.catch_warnings():
        # The compiler looks at .grad of every input; fake intermediate results answer with a warning.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        _forward(replica, names, loss, autocast)[1].backward()
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
        optimizer = _with_state(make_optimizer, model, tracker)
        own_bytes = tracker.category_bytes("parameters")
        with tracker.during("forward"), saved_tensors_hooks(lambda t: _saved(tracker, t, names), lambda t: t):
            output, value = _forward(replica, names, loss, autocast)
        saved_by_module = tracker.saved_bytes_by_module()
        with tracker.during("backward"):
            value.backward()
        gradients_bytes = tracker.category_bytes("gradients")
        if optimizer is not None:
            with tracker.during("optimizer"):
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
    """Which module runs, for the attribution of what is saved and for messages."""

    def __init__(self) -> None:
        self.running: list[str] = []
        self.last_entered = ""

    def enter(self, name: str) -> None:
        self.running.append(name)
        self.last_entered = name

    def leave(self, *_: Any) -> None:
        self.running.pop()


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
            module.register_forward_hook(names.leave, always_call=True)
    return names


def _named(call: Callable[..., Any], name: str, names: _Names) -> Callable[..., Any]:
    def named(*args, **kwargs):
        names.enter(name)
        try:
            return call(*args, **kwargs)
        finally:
            names.leave()

    return named


def _forward(replica: Replica, names: _Names, loss: Loss, autocast: torch.dtype | None) -> tuple[Any, Tensor]:
    casting = torch.autocast(replica.device.type, autocast) if autocast is not None else nullcontext()
    try:
        with casting:
            output = replica.model(*replica.args, **replica.kwargs)
            names.enter(LOSS)
            value = loss(output)
            names.running.clear()
            return output, value
    except _NEEDS_VALUES as error:
        raise MemoryPredictionError(
            f"{_place(names)} cannot run on fake tensors, because it needs values, not only shapes "
            f"({type(error).__name__}: {error}). Measure it on real tensors: measure(..., fake=False) with real data "
            "as the example runs one step on a copy of the network"
        ) from error
    except MimicNormError:
        raise
    except Exception as error:
        raise ExampleError(
            f"{_place(names)} does not run on the example ({describe(replica.args, replica.kwargs)}): "
            f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        ) from error


def _place(names: _Names) -> str:
    if names.last_entered == LOSS:
        return "the loss"
    return f"module {names.last_entered!r}" if names.last_entered else "the model"


def _saved(tracker: StorageTracker, tensor: Tensor, names: _Names) -> Tensor:
    tracker.save(tensor, names.running[-1] if names.running else "")
    return tensor


def _with_state(make: MakeOptimizer | None, model: nn.Module, tracker: StorageTracker) -> torch.optim.Optimizer | None:
    """Build the optimizer and let one step with zero gradients create its state."""
    if make is None:
        return None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for leaf in tree_leaves([list(state.values()) for state in optimizer.state.values()]):
        if isinstance(leaf, Tensor):
            tracker.add(leaf, "optimizer_state")
    return optimizer


def _optimizer_maker(optimizer: str | MakeOptimizer | None) -> MakeOptimizer | None:
    if optimizer is None or callable(optimizer):
        return optimizer
    if optimizer not in OPTIMIZERS:
        raise MemoryPredictionError(
            f"optimizer {optimizer!r} is not known: give one of {', '.join(map(repr, OPTIMIZERS))}, None, or a "
            "function from parameters to an optimizer"
        )
    return OPTIMIZERS[optimizer]
