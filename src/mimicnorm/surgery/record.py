"""One forward pass on fake tensors: the data-flow graph of any model that runs.

Nothing is traced or compiled, so control flow, in-place updates and foreign layers are simply
seen happening. The model is left bit for bit as it was.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mimicnorm.errors import ExampleError
from mimicnorm.layers import LastNorm
from mimicnorm.surgery import code
from mimicnorm.surgery.example import call_arguments, describe, is_shape, tensors_in
from mimicnorm.surgery.graph import Graph
from mimicnorm.surgery.isolate import run
from mimicnorm.surgery.recorder import Recorder, is_batch_norm

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def record(model: nn.Module, example: Any) -> Graph:
    """Run the model once in training mode and note what read what.

    Models whose control flow reads values are run on real tensors. Should some BatchNorm not run (a block dropped at
    random, a path for evaluation only), or code around a BatchNorm ask for the mode, the model is recorded once more,
    in evaluation mode. The pass that saw more BatchNorms is returned, with the other one as its ``other_mode``.

    Args:
        model: Any module; left as it was.
        example: A tensor, a tuple of call arguments, a dict of keyword arguments, or a shape.

    Raises:
        ExampleError: The forward pass failed; the message quotes its error.
    """
    norms = {name for name, m in model.named_modules() if is_batch_norm(m) and not isinstance(m, LastNorm)}
    graph = record_in_mode(model, example, training=True)
    if norms - graph.norms() or any(map(code.names_mode, code.around(model, norms))):
        with contextlib.suppress(ExampleError, *_NEEDS_VALUES):  # the first recording is good without it
            evaluated = record_in_mode(model, example, training=False)
            graph.other_mode, evaluated.other_mode = evaluated, graph
            if len(evaluated.norms() & norms) > len(graph.norms() & norms):
                return evaluated
    return graph


def record_in_mode(model: nn.Module, example: Any, *, training: bool) -> Graph:
    """Record a model in one mode: on fake tensors, or on real ones if values steer it."""
    try:
        return repeat(model, example, Graph(fake=True, training=training))
    except _NEEDS_VALUES:
        return repeat(model, example, Graph(fake=False, training=training))


def repeat(
    model: nn.Module,
    example: Any,
    like: Graph,
    *,
    resize: Callable[[Tensor], Tensor] | None = None,
    watch: Callable[[Recorder], TorchDispatchMode] | None = None,
) -> Graph:
    """Record a model as another graph was recorded: in the same mode, on the same kind of tensors.

    Args:
        model: The network of that graph, perhaps converted since.
        example: As for ``record``.
        like: The other graph; only its mode and kind of tensors are read.
        resize: Makes of each (fake) input tensor one of another batch size.
        watch: Makes a dispatch mode that sees the same pass.
    """
    args, kwargs = call_arguments(model, example)
    if any(t.is_nested for t in tensors_in((args, kwargs))):
        raise ExampleError("the example holds a nested tensor, which cannot be recorded: give a padded one")

    def call(args: tuple, kwargs: dict) -> Graph:
        if resize is not None:
            args, kwargs = pytree.tree_map_only(Tensor, resize, (args, kwargs))
        recorder = Recorder(model, Graph(fake=like.fake, training=like.training), (args, kwargs))
        watching = watch(recorder) if watch is not None else contextlib.nullcontext()
        try:
            with watching, recorder.watching():
                output = model(*args, **kwargs)
        except (*_NEEDS_VALUES, ExampleError):
            raise
        except Exception as error:
            if like.fake and re.search("numpy|subclass|fake ?tensor", str(error), re.IGNORECASE):
                raise UnsupportedFakeTensorException(str(error)) from error  # .numpy() and its kind
            where = recorder.failed
            inside = f" inside {where!r}" if where else ""
            raise ExampleError(
                f"the model's forward raised on the example ({describe(args, kwargs)}){inside}: "
                f"{type(error).__name__}: {_first_line(error)}. {_advice(model, error, example)}",
                where,
            ) from error
        return recorder.finish(output)

    return run(model, call, (args, kwargs), fake=like.fake, training=like.training, seed=0, modes=(torch.no_grad(),))


def _advice(model: nn.Module, error: Exception, example: Any) -> str:
    if isinstance(error, TypeError) and isinstance(example, dict):
        return "A dict is taken as keyword arguments: write (example,) to pass it as one."
    if isinstance(error, TypeError) and isinstance(example, list) and not is_shape(example):
        return "A list is taken as positional arguments: write (example,) to pass it as one."
    if isinstance(error, TypeError):
        with contextlib.suppress(ValueError):  # no signature
            for p in inspect.signature(model.forward).parameters.values():
                if p.kind is p.KEYWORD_ONLY:
                    return f"Arguments by name go in a dict: example={{{p.name!r}: tensor}}."
    shape = " A shape stands for one float tensor: other inputs must be given themselves." if is_shape(example) else ""
    return f"Give an example the model runs on.{shape}"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
