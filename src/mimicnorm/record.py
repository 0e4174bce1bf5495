"""One forward pass on fake tensors: the data-flow graph of any model that runs.

Nothing is traced or compiled, so control flow, in-place updates and foreign layers are simply
seen happening. The model is left bit for bit as it was.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.nn.modules import module as module_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from mimicnorm.errors import ExampleError
from mimicnorm.isolate import silent, unsynchronised, untouched
from mimicnorm.layers import LINEAR_CALLS, WEIGHT_LAYERS, autocast_dtype
from mimicnorm.ops import FACTORIES, Kind, canonical, kind_of

_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)


@dataclass(eq=False)
class Node:
    """One tensor of the forward pass, and the operation that made it.

    Attributes:
        index: Position in execution order; an input comes before what reads it.
        op: Canonical function name, e.g. "conv2d", "add", "relu".
        inputs: The data-dependent operands, in argument order; constants and weights are left out.
        settings: Plain keyword settings of an activation (slope, approximation), for its formula.
        layer: Qualified name of the weight layer, if this is its output.
        inside_module: Whether that layer's own forward made the call (not ``F.conv2d(x, layer.weight)``).
        derived_weight: Whether the weight was computed from the layer's parameters first.
        norm: Qualified name of the BatchNorm, if this is its output.
        made_by: Modules that returned this very tensor, the innermost first.
        ancestors: Bit set over node indices, this one included.
    """

    index: int
    op: str
    kind: Kind
    inputs: tuple[Node, ...]
    shape: torch.Size
    dtype: torch.dtype
    where: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    layer: str | None = None
    inside_module: bool = True
    derived_weight: bool = False
    norm: str | None = None
    made_by: list[str] = field(default_factory=list)
    users: list[Node] = field(default_factory=list)
    ancestors: int = 0

    def __repr__(self) -> str:
        name = self.layer or self.norm or ""
        return f"<{self.index} {self.op} {name} {tuple(self.shape)} <- {[i.index for i in self.inputs]}>"


@dataclass
class Graph:
    """What happened in one forward pass.

    Attributes:
        nodes: In execution order.
        outputs: The model's tensor outputs, depth first through tuples and dicts.
        functional_norms: Modules that called ``F.batch_norm`` on data without being a BatchNorm.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    functional_norms: list[str] = field(default_factory=list)

    def calls(self, name: str) -> list[Node]:
        """The outputs of a weight layer or BatchNorm, one per use."""
        return [n for n in self.nodes if name in (n.layer, n.norm)]


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm, by class or (frozen variants) by its four tensors."""
    if isinstance(module, _BatchNorm):
        return True
    if isinstance(module, _InstanceNorm):
        return False
    own = {**module._parameters, **module._buffers}
    four = [own.get(k) for k in ("weight", "bias", "running_mean", "running_var")]
    return all(t is not None and t.dim() == 1 for t in four)


def record(model: nn.Module, example: Any) -> Graph:
    """Run the model once in training mode and note what read what.

    Args:
        model: Any module; left as it was.
        example: A tensor, a tuple of call arguments, a dict of keyword arguments, or a shape.

    Raises:
        ExampleError: The forward pass failed; the message carries its own words.
    """
    try:
        return _record(model, example, fake=True)
    except _NEEDS_VALUES:
        return _record(model, example, fake=False)  # control flow that reads values needs values


def call_arguments(model: nn.Module, example: Any) -> tuple[tuple, dict]:
    """Call arguments (positional, by name) from an example; a shape becomes normal noise of the model's type.

    Example:
        >>> args, kwargs = call_arguments(nn.Linear(3, 2), (5, 3))
        >>> args[0].shape
        torch.Size([5, 3])
    """
    is_shape = isinstance(example, (tuple, list, torch.Size)) and all(type(n) is int for n in example)
    if is_shape and example:
        if min(example) < 1:
            raise ExampleError(f"example shape {tuple(example)} has a size below 1: give (batch, channels, ...)")
        weights = [p for p in model.parameters() if p.is_floating_point()]
        like = weights[0] if weights else torch.empty(0)
        generator = torch.Generator().manual_seed(0)  # the caller's random numbers stay theirs
        x = torch.randn(*example, generator=generator, dtype=torch.float32)
        return (x.to(like.device, like.dtype),), {}
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, (tuple, list)) and any(isinstance(t, Tensor) for t in pytree.tree_leaves(example)):
        return tuple(example), {}
    raise ExampleError(
        f"example must be a tensor, a shape such as (2, 3, 224, 224), a tuple of call arguments or a dict of "
        f"keyword arguments; got {type(example).__name__}: {str(example)[:80]}"
    )


def _record(model: nn.Module, example: Any, fake: bool) -> Graph:
    args, kwargs = call_arguments(model, example)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    stand_in: dict[int, Tensor] = {}

    def substitute(t: Tensor) -> Tensor:
        if id(t) not in stand_in:
            value = t.detach()
            if fake:
                stand_in[id(t)] = mode.from_tensor(value)  # pyrefly: ignore
            else:
                stand_in[id(t)] = value.clone()
        return stand_in[id(t)]

    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    state = {name: substitute(t) for name, t in tensors.items()}
    args, kwargs = pytree.tree_map_only(Tensor, substitute, (args, kwargs))
    recorder = _Recorder(model, state)
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor):
            recorder.add(leaf, "input", Kind.INPUT, ())
    with untouched(model), unsynchronised(), silent(), torch.no_grad():
        model.train()
        with recorder.hooks(), mode, recorder:
            try:
                output = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
            except _NEEDS_VALUES:
                raise
            except ExampleError:
                raise
            except Exception as error:
                where = recorder.stack[-1] if recorder.stack else ""
                raise ExampleError(
                    f"the model's forward raised on the example ({describe(args, kwargs)})"
                    f"{f' inside {where!r}' if where else ''}: {type(error).__name__}: {_first_line(error)}. "
                    "Give an example the model runs on."
                ) from error
    return recorder.finish(output)


def describe(args: tuple, kwargs: dict) -> str:
    """Shapes and types of call arguments, for messages."""
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in leaves) or "no tensor"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")


class _Recorder(TorchFunctionMode):
    """Notes every function of the forward pass that touches data."""

    def __init__(self, model: nn.Module, state: dict[str, Tensor]):
        super().__init__()
        self.graph = Graph()
        self.names = {id(m): name for name, m in model.named_modules()}  # a shared module goes by its first name
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameter_names: dict[int, set[str]] = {}
        for name, t in state.items():
            self.parameter_names.setdefault(id(t), set()).add(name)
        self.sources: dict[int, set[str]] = dict(self.parameter_names)  # constants: the parameters behind them
        self.known: dict[int, tuple[Tensor, Node]] = {}
        self.kept: list[Tensor] = list(state.values())  # ids stay valid while objects live
        self.aliases: dict[int, list[Tensor]] = {}
        self.stack: list[str] = []
        self.frozen: list[tuple[str, Tensor]] = []  # open frozen BatchNorms and what they were given

    # -- nodes ---------------------------------------------------------------------------------

    def node(self, t: Any) -> Node | None:
        found = self.known.get(id(t))
        return found[1] if found is not None else None

    def add(self, t: Tensor, op: str, kind: Kind, inputs: tuple[Node, ...], **extra: Any) -> Node:
        where = self.stack[-1] if self.stack else ""
        node = Node(len(self.graph.nodes), op, kind, inputs, t.shape, t.dtype, where, **extra)
        node.ancestors = 1 << node.index
        for parent in dict.fromkeys(inputs):
            parent.users.append(node)
            node.ancestors |= parent.ancestors
        self.graph.nodes.append(node)
        self.bind(t, node)
        return node

    def bind(self, t: Tensor, node: Node) -> None:
        if id(t) not in self.known:
            self.aliases.setdefault(_storage(t), []).append(t)
        self.known[id(t)] = (t, node)

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self.batch_norm(func, args, kwargs)
        if func in LINEAR_CALLS:
            self.check_types(func, args, kwargs)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = [t._version for t in tensors]
        result = func(*args, **kwargs)
        name = canonical(getattr(func, "__name__", ""))
        if name in FACTORIES:
            return result
        operands = tensors[:1] if name.endswith("_as") else tensors  # x.view_as(y) reads only y's shape
        inputs = tuple(node for t in operands if (node := self.node(t)) is not None)
        mutated = [t for t, v in zip(tensors, versions, strict=True) if t._version != v]
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if not inputs:
            self.note_sources(tensors, outputs + mutated)
            return result
        kind = kind_of(name, len(inputs))
        extra = self.layer_call(func, args, kwargs) if kind is Kind.LAYER else {}
        if kind is Kind.ACTIVATION:
            extra = {"settings": _settings(args, kwargs)}
        if name == "setitem" and mutated:
            written = self.node(args[2])
            old = self.node(args[0])
            inputs = tuple(n for n in (old, written) if n is not None)
            name, kind = "overwrite", Kind.CONCAT if len(inputs) > 1 else Kind.VIEW
        for t in mutated:
            self.mutate(t, name, kind, inputs, extra)
        seen = {id(t) for t in mutated}
        for t in outputs:
            if id(t) not in seen and not (self.node(t) is not None and any(t is u for u in tensors)):
                self.add(t, name, kind, inputs, **extra)
        return result

    def batch_norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs["input"]
        source = self.node(x)
        if source is None:  # on weights (standardised convolutions): not ours
            result = func(*args, **kwargs)
            self.note_sources([t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)], [result])
            return result
        # Shape-preserving; not run, so that a batch of one passes and no statistics move.
        result = torch.empty_like(x)
        owner = self.norm_behind((*args, *kwargs.values()))
        if owner is None:
            self.graph.functional_norms.append(self.stack[-1] if self.stack else "")
            self.add(result, "batch_norm", Kind.OTHER_NORM, (source,))
        else:
            self.add(result, "batch_norm", Kind.NORM, (source,), norm=owner)
        return result

    def norm_behind(self, values: tuple) -> str | None:
        for t in values:
            for name in self.parameter_names.get(id(t), ()):
                module = name.rpartition(".")[0]
                if is_batch_norm(self.modules[module]):
                    return self.names[id(self.modules[module])]
        inner = self.stack[-1] if self.stack else None
        return inner if inner is not None and is_batch_norm(self.modules[inner]) else None

    def layer_call(self, func: Any, args: tuple, kwargs: dict) -> dict:
        """Attribute a linear call to the layer whose weight it takes, by identity; else to the layer running."""
        parse = LINEAR_CALLS.get(func)
        if parse is None:
            return {}
        weight = parse(*args, **kwargs).weight
        for name in self.parameter_names.get(id(weight), ()):
            module_name, _, attribute = name.rpartition(".")
            module = self.modules[module_name]
            if attribute == "weight" and isinstance(module, WEIGHT_LAYERS):
                first = self.names[id(module)]
                return {"layer": first, "inside_module": first in self.stack[-1:] or _runs_forward(module)}
        for running in reversed(self.stack):
            own = {f"{running}.{p}".lstrip(".") for p, _ in self.modules[running].named_parameters()}
            if isinstance(self.modules[running], WEIGHT_LAYERS) and own & self.sources.get(id(weight), set()):
                return {"layer": running, "derived_weight": True}
        return {}

    def check_types(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Fake kernels are lenient about types; the real ones are not, and a user should hear it now."""
        call = LINEAR_CALLS[func](*args, **kwargs)
        if not isinstance(call.input, Tensor) or autocast_dtype(call.input) is not None:
            return
        if call.input.dtype != call.weight.dtype:
            where = self.stack[-1] if self.stack else ""
            raise ExampleError(
                f"the example reaches layer {where!r} as {call.input.dtype}, but its weight is "
                f"{call.weight.dtype}: give the example in the model's own type."
            )

    def note_sources(self, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        behind = set().union(*(self.sources.get(id(t), set()) for t in tensors))
        if behind:
            for t in outputs:
                self.sources[id(t)] = self.sources.get(id(t), set()) | behind
                self.kept.append(t)

    def mutate(self, t: Tensor, name: str, kind: Kind, inputs: tuple[Node, ...], extra: dict) -> None:
        """An in-place operation: a new value for ``t`` and for every other view of its memory."""
        new = self.add(t, name, kind, inputs, **extra)
        for other in list(self.aliases.get(_storage(t), ())):
            if other is t or _disjoint(other, t):
                continue
            old = self.known[id(other)][1]
            if other.numel() <= t.numel():
                self.add(other, "view", Kind.VIEW, (new,))
            else:
                self.add(other, "overwrite", Kind.CONCAT, (old, new))

    # -- modules -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow which module runs. Global hooks, so the model itself is not touched."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self.enter),
            module_hooks.register_module_forward_hook(self.leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        if self.frozen and args and isinstance(args[0], Tensor):
            self.close_frozen(args[0])  # a child runs inside it: the normalising part is over
        self.stack.append(name)
        if is_batch_norm(module) and not isinstance(module, _BatchNorm) and args and isinstance(args[0], Tensor):
            self.frozen.append((name, args[0]))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if self.frozen and self.frozen[-1][0] == name and outputs:
            self.close_frozen(outputs[0])
        self.stack.pop()
        inputs = tuple(n for t in pytree.tree_leaves(args) if (n := self.node(t)) is not None)
        for t in outputs:
            if self.node(t) is None and inputs and id(t) not in self.sources:
                self.add(t, type(module).__name__, Kind.OPAQUE, inputs)  # made where no function is seen
        if len(outputs) == 1 and (node := self.node(outputs[0])) is not None:
            node.made_by.append(name)

    def close_frozen(self, result: Tensor) -> None:
        name, x = self.frozen.pop()
        source = self.node(x)
        if source is not None and self.node(result) is not source:
            self.add(result, "frozen_batch_norm", Kind.NORM, (source,), norm=name)

    def finish(self, output: Any) -> Graph:
        leaves = [t for t in _leaves(output) if isinstance(t, Tensor)]
        self.graph.outputs = [n for t in leaves if (n := self.node(t)) is not None]
        self._forget_dead_reads()
        return self.graph

    def _forget_dead_reads(self) -> None:
        """Drop readers that lead to no output and to no norm or layer (shape probes, unused statistics)."""
        alive: set[Node] = set(self.graph.outputs)
        for node in reversed(self.graph.nodes):
            if node in alive or node.layer or node.norm:
                alive.add(node)
                alive.update(node.inputs)
        for node in self.graph.nodes:
            node.users = [u for u in node.users if u in alive]


def _leaves(output: Any) -> list:
    """Depth first through containers, dataclasses and objects with tensor attributes."""
    flat = []
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) or not hasattr(leaf, "__dict__"):
            flat.append(leaf)
        else:
            flat += [t for t in pytree.tree_leaves(dict(vars(leaf))) if isinstance(t, Tensor)]
    return flat


def _storage(t: Tensor) -> int:
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage of their own
        return id(t)


def _disjoint(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one memory share no element, told for views of the same strides (chunks, slices)."""
    if a.stride() != b.stride() or a.dim() != b.dim():
        return False
    rest = abs(int(a.storage_offset()) - int(b.storage_offset()))
    lower = a if a.storage_offset() <= b.storage_offset() else b
    for stride, size in sorted(zip(lower.stride(), lower.shape, strict=True), reverse=True):
        if stride > 0:
            steps, rest = divmod(rest, int(stride))
            if steps >= size:
                return True
    return rest > 0


def _runs_forward(module: nn.Module) -> bool:
    """Whether a method of the module itself is running: ``layer.forward(x)`` fires no hook."""
    frame = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_locals.get("self") is module and frame.f_code.co_name in ("forward", "_conv_forward"):
            return True
        frame = frame.f_back  # pyrefly: ignore
    return False


def _settings(args: tuple, kwargs: dict) -> dict[str, Any]:
    positional = [a for a in args[1:] if not isinstance(a, Tensor)]
    named = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor) and k != "inplace"}
    return {"positional": positional, **named} if positional else named
