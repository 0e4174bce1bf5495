"""A stand-in for the user's model on which a training step can be tried out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mimicnorm.errors import ExampleError, MemoryPredictionError
from mimicnorm.surgery.example import call_arguments

# The decompositions and the partitioner of torch.compile's default backend, with its graphs run op by op.
_PARTITION_ONLY = "aot_eager_decomp_partition"


@dataclass
class Replica:
    """A deep copy of a model with call arguments, in training mode; of fake tensors, it holds no memory.

    A copy rather than the model itself, because modules may keep what passes through them in lists, caches and
    attributes of any kind.
    """

    model: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    mode: AbstractContextManager
    compiled: list[nn.Module]

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the call arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return next(self.model.parameters()).device


def replicate(model: nn.Module, example: Any, *, fake: bool = True, batch: int | None = None) -> Replica:
    """Copy a model and make its call arguments, with another batch size if one is given.

    A model in evaluation mode is put into training mode; in one that trains, each part keeps its own flag, so
    that a frozen BatchNorm stays frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise MemoryPredictionError(
            f"{type(model).__name__} has no parameter that requires a gradient, so there is no training step to "
            "predict: set requires_grad on the parameters that will be trained"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    copying = FakeCopyMode(mode) if isinstance(mode, FakeTensorMode) else nullcontext()
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise MemoryPredictionError(
                f"parameter {name!r} has no shape yet: run the lazy model once on real data first"
            )
    with copying:
        twin = _deep_copy(model)
    for parameter in twin.parameters():
        parameter.grad = None
    if not twin.training:
        twin.train()
    twin, compiled = _partition_what_was_compiled(model, twin)
    with mode:
        args, kwargs = call_arguments(twin, example)
        args, kwargs = _copy_tensors((args, kwargs), mode)
        if batch is not None:
            base = batch_size(args, kwargs)
            args, kwargs = tree_map_only(Tensor, lambda t: _with_batch(t, base, batch), (args, kwargs))
    return Replica(twin, args, kwargs, mode, compiled)


def _deep_copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        held = [
            f"attribute {attribute!r} of {f'module {name!r}' if name else 'the model'}"
            for name, module in model.named_modules()
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_leaf
        ]
        remedy = f": {held[0]} holds a result of a forward pass, delete it first" if held else ""
        raise MemoryPredictionError(
            f"{type(model).__name__} cannot be copied, and the step is tried on a copy "
            f"({type(error).__name__}: {first_line(error)}){remedy}"
        ) from error


def _copy_tensors(arguments: Any, mode: AbstractContextManager) -> Any:
    """Copy the tensors among call arguments, fake or real, so that the step cannot change the caller's."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            if not isinstance(mode, FakeTensorMode):
                twin = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            elif tensor.is_inference():
                twin = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            else:
                twin = mode.from_tensor(tensor)
            copies[id(tensor)] = twin
        return copies[id(tensor)]

    return tree_map_only(Tensor, copied, arguments)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, without a full stop."""
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def batch_size(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return the first dimension of the first tensor among call arguments."""
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise ExampleError("the example has no tensor with a batch dimension: give a tensor or a shape (batch, ...)")


def first_samples(example: Any, count: int) -> Any:
    """Cut an example of any form down to its first samples, at most that many.

    Example:
        >>> first_samples((256, 3, 32, 32), 2)
        (2, 3, 32, 32)
    """
    if isinstance(example, Sequence) and example and all(type(size) is int for size in example):
        return (min(example[0], count), *example[1:])
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(example)):
        return example
    base = batch_size((example,), {})
    return tree_map_only(Tensor, lambda t: t[:count] if t.dim() > 0 and t.shape[0] == base else t, example)


def _with_batch(tensor: Tensor, old: int, new: int) -> Tensor:
    if tensor.dim() == 0 or tensor.shape[0] != old:
        return tensor
    resized = tensor.detach()[torch.arange(new, device=tensor.device) % old]  # values stay valid, as indices must
    for memory_format, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
        if tensor.dim() == dims and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=memory_format):
            resized = resized.contiguous(memory_format=memory_format)
    return resized.requires_grad_(tensor.requires_grad)


def _partition_what_was_compiled(model: nn.Module, twin: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Compile in the twin what is compiled in the model, up to the partitioner and no further."""
    marked = [
        copied
        for original, copied in zip(model.modules(), twin.modules(), strict=True)
        # A deep copy forgets what ``module.compile()`` did; what ``torch.compile(module)`` wrapped it keeps.
        if original._compiled_call_impl is not None or isinstance(original, OptimizedModule)
    ]
    compiled = [module._orig_mod if isinstance(module, OptimizedModule) else module for module in marked]
    for parent in list(twin.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, OptimizedModule) and not isinstance(parent, OptimizedModule):
                parent._modules[name] = child._orig_mod
    for module in compiled:
        module._compiled_call_impl = _partitioned_call(module)
    return twin._orig_mod if isinstance(twin, OptimizedModule) else twin, compiled


def _partitioned_call(module: nn.Module) -> Callable[..., Any]:
    def call(*args, **kwargs):
        return module._call_impl(*args, **kwargs)

    # The compiler hangs its cache on the code object and gives up after eight entries. A code object of its own
    # keeps many predictions apart, and apart from what the user compiles.
    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=_PARTITION_ONLY, dynamic=False)
