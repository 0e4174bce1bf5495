"""Examples: a tensor, call arguments, or a shape, made into the arguments of a call."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.errors import ExampleError

_NOISE_SAMPLES, _NOISE_POSITIONS = 64, 2**18
_NESTED_OBJECTS = 3  # an object may hold another, but should not lead to a trainer and its data set
_NO_CONTAINERS = (str, bytes, int, float, type, nn.Module, FunctionType, MethodType, ModuleType)


def call_arguments(model: nn.Module, example: Any) -> tuple[tuple, dict]:
    """Call arguments (positional, by name) from an example; a shape becomes normal noise of the model's type.

    Example:
        >>> args, kwargs = call_arguments(nn.Linear(3, 2), (5, 3))
        >>> args[0].shape
        torch.Size([5, 3])
    """
    if is_shape(example):
        if min(example) < 1:
            raise ExampleError(f"example shape {tuple(example)} has a size below 1: give (batch, channels, ...)")
        weights = [p for p in model.parameters() if p.is_floating_point()]
        like = weights[0] if weights else torch.empty(0, device="cpu")
        generator = torch.Generator("cpu").manual_seed(0)  # the caller's random numbers stay theirs
        try:
            x = torch.randn(*example, generator=generator, dtype=torch.float32, device="cpu")
            return (x.to(like.device, like.dtype),), {}
        except (RuntimeError, MemoryError) as error:
            raise ExampleError(f"an example of shape {tuple(example)} does not fit into memory") from error
    tensors = tensors_in(example)
    if tensors and all(t.numel() == 0 for t in tensors):
        raise ExampleError(f"the example {tuple(tensors[0].shape)} has no elements: give at least one sample")
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, (tuple, list)) and tensors:
        return tuple(example), {}
    raise ExampleError(
        f"example must be a tensor, a shape such as (2, 3, 224, 224), a tuple of call arguments or a dict of "
        f"keyword arguments; got {type(example).__name__}: {str(example)[:80]}"
    )


def with_more_samples(example: Any) -> tuple[int, ...] | None:
    """A shape with as many samples as estimate a variance well and fit a budget of input positions.

    Noise costs nothing to draw, and statistics of two samples are poor. None where the example is no shape, or is
    large enough.

    Example:
        >>> with_more_samples((2, 3, 96, 96)), with_more_samples((2, 3, 512, 512))
        ((28, 3, 96, 96), None)
    """
    if not is_shape(example):
        return None
    samples = min(_NOISE_SAMPLES, _NOISE_POSITIONS // math.prod(example[2:]))
    return (samples, *example[1:]) if samples > example[0] else None


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in containers, mappings, dataclasses and other objects, depth first.

    Example:
        >>> from types import SimpleNamespace
        >>> len(tensors_in({"a": torch.zeros(1), "b": [SimpleNamespace(c=torch.zeros(1))]}))
        2
    """
    flat: list[Tensor] = []
    seen: dict[int, Any] = {}
    waiting = [(values, 0)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, Tensor):
            flat.append(value)
        elif not isinstance(value, _NO_CONTAINERS) and id(value) not in seen:
            seen[id(value)] = value
            contents, deeper = _contents(value)
            if depth + deeper <= _NESTED_OBJECTS:
                waiting += [(inner, depth + deeper) for inner in reversed(contents)]
    return flat


def _contents(value: Any) -> tuple[list[Any], bool]:
    """What a container or an object holds, and whether it is an object."""
    if isinstance(value, Mapping) and value:  # a dataclass may be one, and hold all it has in attributes
        return list(value.values()), False
    if isinstance(value, (list, tuple, set, deque)):
        return list(value), False
    slots = [s for cls in type(value).__mro__ for s in _names(getattr(cls, "__slots__", ()))]
    return [*(getattr(value, s, None) for s in slots), *getattr(value, "__dict__", {}).values()], True


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def is_shape(example: Any) -> bool:
    """Whether an example is a shape: noise is to stand for it."""
    whole = isinstance(example, (tuple, list, torch.Size)) and all(type(n) is int for n in example)
    return whole and len(example) > 0


def float_shape(example: Any) -> tuple[int, ...] | None:
    """The shape that can stand for an example: it is one, or is a single float tensor; else None.

    Example:
        >>> float_shape(torch.zeros(2, 3)), float_shape({"ids": torch.zeros(2)})
        ((2, 3), None)
    """
    if isinstance(example, (tuple, list)) and len(example) == 1 and not is_shape(example):
        example = example[0]
    if isinstance(example, Tensor) and example.is_floating_point():
        return tuple(example.shape)
    return tuple(example) if is_shape(example) else None


def describe(args: tuple, kwargs: dict) -> str:
    """Shapes and types of call arguments, for messages."""
    shapes = (f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors_in((args, kwargs)))
    return ", ".join(shapes) or "no tensor"
