"""One forward pass on fake tensors: the data-flow graph of any model that runs.

Nothing is traced or compiled, so control flow, in-place updates and foreign layers are simply
seen happening. The model is left bit for bit as it was.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable
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
from mimicnorm.surgery.example import call_arguments, describe, is_shape, tensors_in
from mimicnorm.surgery.graph import Graph
from mimicnorm.surgery.isolate import following, instead_of_forward, run
from mimicnorm.surgery.ops import Kind
from mimicnorm.surgery.recorder import Recorder, Taint, is_batch_norm

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


def record(model: nn.Module, example: Any) -> Graph:
    """Run the model once in training mode and note what read what.

    Should some BatchNorm not run (a branch dropped at random, a path for evaluation only), other seeds and eval
    mode are tried, and the pass that saw most of them is returned.

    Args:
        model: Any module; left as it was.
        example: A tensor, a tuple of call arguments, a dict of keyword arguments, or a shape.

    Raises:
        ExampleError: The forward pass failed; the message carries its own words.
    """
    norms = {name for name, m in model.named_modules() if is_batch_norm(m) and not isinstance(m, LastNorm)}
    best: Graph | None = None
    for number, training in ((0, True), (1, True), (2, True), (3, True), (0, False)):
        try:
            graph = repeat(model, example, Graph(fake=True, training=training, seed=number))
        except _NEEDS_VALUES:  # control flow that reads values needs values
            graph = repeat(model, example, Graph(fake=False, training=training, seed=number))
        except ExampleError:
            if best is None:
                raise
            continue
        if best is None or len(graph.norms() & norms) > len(best.norms() & norms):
            best = graph
        if norms <= best.norms():
            break
    assert best is not None
    return best


def repeat(
    model: nn.Module,
    example: Any,
    like: Graph,
    *,
    follow: Iterable[str] = (),
    resize: Callable[[Tensor], Tensor] | None = None,
    watch: TorchDispatchMode | None = None,
    norms_pass: bool = False,
) -> Graph:
    """Record a model as another graph was recorded: the same mode, seed and kind of tensors.

    Args:
        model: The network of that graph, perhaps converted since.
        example: As for ``record``.
        like: The other graph; of it, only mode, seed and kind of tensors are read.
        follow: Names of modules whose forward is called past their hooks, as in ``layer.forward(x)``.
        resize: Makes of each (fake) input tensor one of another batch size.
        watch: A dispatch mode that sees the same pass.
        norms_pass: Let BatchNorms pass on what they are given where values may steer the model.
    """
    args, kwargs = call_arguments(model, example)
    if any(t.is_nested for t in tensors_in((args, kwargs))):
        raise ExampleError("the example holds a nested tensor, which cannot be recorded: give a padded one")
    graph = Graph(fake=like.fake, training=like.training, seed=like.seed)

    def call(args: tuple, kwargs: dict) -> Graph:
        if resize is not None:
            args, kwargs = pytree.tree_map_only(Tensor, resize, (args, kwargs))
        recorder = Recorder(model, graph, norms_pass or like.fake)
        for tensor in tensors_in((args, kwargs)):
            recorder.add(tensor, "input", Kind.INPUT, ())
        called = instead_of_forward(map(model.get_submodule, follow), recorder.around)
        watching = watch if watch is not None else contextlib.nullcontext()
        with called, following(recorder.enter, recorder.leave), watching, Taint(recorder), recorder:
            try:
                output = model(*args, **kwargs)
            except (*_NEEDS_VALUES, ExampleError):
                raise
            except Exception as error:
                if like.fake and re.search("numpy|subclass|fake ?tensor", str(error), re.IGNORECASE):
                    raise UnsupportedFakeTensorException(str(error)) from error  # .numpy() and its kind
                where = recorder.stack[-1] if recorder.stack else ""
                inside = f" inside {where!r}" if where else ""
                raise ExampleError(
                    f"the model's forward raised on the example ({describe(args, kwargs)}){inside}: "
                    f"{type(error).__name__}: {_first_line(error)}. {_advice(model, error, example)}",
                    where,
                ) from error
            recorder.note_taps(model)
        return recorder.finish(output)

    modes = (torch.no_grad(),)
    return run(model, call, (args, kwargs), fake=like.fake, training=like.training, seed=like.seed, modes=modes)


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
