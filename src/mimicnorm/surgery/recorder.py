"""What watches a forward pass: a function mode that notes each operation on data as a node of the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mimicnorm.errors import ExampleError
from mimicnorm.layers import LINEAR_CALLS, WEIGHT_LAYERS, Reweighted, autocast_dtype
from mimicnorm.surgery import flow
from mimicnorm.surgery.example import tensors_in
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.ops import FACTORIES, Kind, canonical, kind_of

_PLAIN = (bool, int, float, complex, str, slice, type(None), type(...), torch.dtype)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm, by class or (frozen variants) by its four tensors."""
    if isinstance(module, _BatchNorm):
        return True
    if isinstance(module, _InstanceNorm):
        return False
    own = {**module._parameters, **module._buffers}
    four = [own.get(k) for k in ("weight", "bias", "running_mean", "running_var")]
    return all(t is not None and t.dim() == 1 for t in four)


class Recorder(TorchFunctionMode):
    """Notes every function of the forward pass that touches data."""

    def __init__(self, model: nn.Module, graph: Graph, norms_pass: bool):
        super().__init__()
        state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.graph, self.norms_pass, self.layers = graph, norms_pass, 0  # bit set of the weight layers
        self.names = {id(m): name for name, m in model.named_modules()}  # a shared module goes by its first name
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameter_names: dict[int, list[str]] = {}  # in order: tied weights have several names
        for name, t in state.items():
            self.parameter_names.setdefault(id(t), []).append(name)
        self.storages = {name: storage_of(t) for name, t in state.items()}
        self.sources = {key: set(names) for key, names in self.parameter_names.items()}  # parameters behind a constant
        self.tainted: dict[int, tuple[Tensor, tuple[Node, ...]]] = {}  # made from data where no function was seen
        self.known: dict[int, tuple[Tensor, Node]] = {}
        self.kept: list[Tensor] = list(state.values())  # ids stay valid while objects live
        self.aliases: dict[int, list[Tensor]] = {}
        self.stack: list[str] = []
        self.frozen: list[tuple[str, Tensor, int]] = []  # open frozen BatchNorms, what they were given, since when

    # -- nodes ---------------------------------------------------------------------------------

    def node(self, t: Any) -> Node | None:
        found = self.known.get(id(t))
        if found is not None:
            return found[1]
        behind = self.tainted.get(id(t))
        return self.add(t, "unseen", Kind.OPAQUE, behind[1]) if behind is not None else None

    def add(self, t: Tensor, op: str, kind: Kind, inputs: tuple[Node, ...], **extra: Any) -> Node:
        where = self.stack[-1] if self.stack else ""
        node = Node(len(self.graph.nodes), op, kind, inputs, t.shape, t.dtype, where, **extra)
        node.ancestors = 1 << node.index
        for parent in dict.fromkeys(inputs):
            parent.users.append(node)
            node.ancestors |= parent.ancestors
        self.graph.nodes.append(node)
        self.layers |= (kind is Kind.LAYER) << node.index
        self.bind(t, node)
        return node

    def bind(self, t: Tensor, node: Node) -> None:
        self.alias(t)
        self.known[id(t)] = (t, node)

    def alias(self, t: Tensor) -> None:
        """Remember every view of a memory: a write to one is a write to all."""
        views = self.aliases.setdefault(storage_of(t), [])
        if not any(t is v for v in views):
            views.append(t)

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "batch_norm" in getattr(func, "__name__", ""):
            return self.batch_norm(func, args, kwargs)
        if func in LINEAR_CALLS:
            self.check_types(func, args, kwargs)
            self.begin_at_constant(func, args, kwargs)
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
            for t in (*tensors, *outputs):
                self.alias(t)
            return result
        kind = kind_of(name, len(inputs))
        extra: dict[str, Any] = self.layer_call(func, args, kwargs) if kind is Kind.LAYER else {}
        if kind is Kind.LAYER and func in LINEAR_CALLS:
            extra["settings"] = {"op": LINEAR_CALLS[func](*args, **kwargs).op}
        if kind in (Kind.ACTIVATION, Kind.SUM, Kind.PAD):
            extra = {"settings": _settings(args, kwargs)}
        if kind in (Kind.ACTIVATION, Kind.CONSTANT):
            extra["constants"] = self.constants(pytree.tree_leaves((args, kwargs)))
        extra["arguments"] = self.arguments((args, kwargs))
        if kind is Kind.SUM and (first := flow.shifted(inputs, outputs[0].shape, self.layers)) is not None:
            kind, inputs = Kind.CONSTANT, (first, *(n for n in inputs if n is not first))
        if name == "setitem" and mutated:
            written = self.node(args[2])
            old = self.node(args[0])
            inputs = tuple(n for n in (old, written) if n is not None)
            name, kind = "overwrite", Kind.CONCAT if len(inputs) > 1 else Kind.VIEW
        for t in mutated:
            self.mutate(t, name, kind, inputs, extra)
        seen = {id(t) for t in mutated}
        for t in outputs:
            if id(t) not in seen and not (any(t is u for u in tensors) and self.node(t) is not None):
                self.add(t, name, kind, inputs, **extra)
        return result

    def arguments(self, call: Any) -> tuple[str, ...]:
        """What a call was given beside data, such that two calls can be compared."""
        words = []
        for leaf in pytree.tree_leaves(call):
            if not isinstance(leaf, Tensor):
                words.append(repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__)
            elif id(leaf) not in self.known and id(leaf) not in self.tainted:
                words.append(" ".join(sorted(self.sources.get(id(leaf), ()))))
        return tuple(words)

    def constants(self, operands: list[Any]) -> tuple[float | str | None, ...]:
        """The numbers among a call's operands, and the parameter or buffer that each tensor beside the data shows."""
        tensors = [t for t in operands if isinstance(t, Tensor) and self.node(t) is None]
        first = {id(t): next((n for n in self.storages if n in self.sources.get(id(t), ())), "") for t in tensors}
        views = [n if self.storages.get(n := first[id(t)]) == storage_of(t) else None for t in tensors]
        return (*(float(c) for c in operands if type(c) in (int, float)), *views)

    def batch_norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs["input"]
        source = self.node(x)
        owner = self.norm_behind((*args, *kwargs.values()))
        if source is None and owner is None:  # on weights (standardised convolutions): not ours
            result = func(*args, **kwargs)
            leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
            self.note_sources([t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)], leaves)
            return result
        if source is None:  # a BatchNorm on something that does not come from the input
            source = self.add(x, "constant", Kind.OPAQUE, ())
        # F.batch_norm keeps the shape; it is not run, so that a batch of one passes and no statistics move.
        result = self.stand_in(x) if func is F.batch_norm else func(*args, **kwargs)
        output = next(t for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        if owner is None:
            self.graph.functional_norms.append(self.stack[-1] if self.stack else "")
            self.add(output, "batch_norm", Kind.OTHER_NORM, (source,))
        else:
            self.add(output, "batch_norm", Kind.NORM, (source,), norm=owner)
        return result

    def stand_in(self, x: Tensor) -> Tensor:
        """What a BatchNorm returns: of fake tensors the shape matters, of real ones the values may steer the model."""
        if self.norms_pass or x.numel() <= x.shape[1]:
            return x.clone()
        return F.batch_norm(x, None, None, training=True)

    def begin_at_constant(self, func: Any, args: tuple, kwargs: dict) -> None:
        """A layer fed by a learned constant or a grid of positions begins a flow of data of its own."""
        call = LINEAR_CALLS[func](*args, **kwargs)
        if isinstance(call.input, Tensor) and self.node(call.input) is None and self.running_holder(call.weight):
            self.add(call.input, "constant", Kind.OPAQUE, ())

    def holders(self, weight: Tensor) -> list[str]:
        """The weight layers whose weight this very tensor is; several if it is tied."""
        split = (name.rpartition(".") for name in self.parameter_names.get(id(weight), ()))
        modules = (self.modules[name] for name, _, attribute in split if attribute == "weight")
        return [self.names[id(m)] for m in modules if isinstance(m, WEIGHT_LAYERS)]

    def running_holder(self, weight: Tensor) -> str | None:
        """The one of them whose own forward is running."""
        for name in self.holders(weight):
            if name in self.stack[-1:] or _runs_forward(self.modules[name]):
                return name
        return None

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
        holder = self.running_holder(weight)
        if holder is not None:
            return {"layer": holder}
        for name in self.holders(weight):
            return {"layer": name, "inside_module": False}
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
        for other in list(self.aliases.get(storage_of(t), ())):
            if other is t or _disjoint(other, t):
                continue
            old = self.node(other)
            if other.numel() <= t.numel() or old is None:
                self.add(other, "view", Kind.VIEW, (new,))
            else:
                self.add(other, "overwrite", Kind.CONCAT, (old, new))

    # -- modules -------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        if self.frozen and args and isinstance(args[0], Tensor):
            self.close_frozen(args[0])  # a child runs inside it: the normalising part is over
        self.stack.append(name)
        if isinstance(module, Reweighted) and args and isinstance(args[0], Tensor) and self.node(args[0]) is None:
            self.add(args[0], "constant", Kind.OPAQUE, ())  # its weight is made on the fly, and no holder is seen
        if is_batch_norm(module) and args and isinstance(args[0], Tensor):
            self.graph.norm_inputs.setdefault(name, args[0].shape)
            if not isinstance(module, _BatchNorm):
                self.frozen.append((name, args[0], len(self.graph.nodes)))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if self.frozen and self.frozen[-1][0] == name and outputs:
            self.close_frozen(outputs[0])
        inputs = tuple(n for t in pytree.tree_leaves(args) if (n := self.node(t)) is not None)
        for t in outputs:
            if self.node(t) is None and inputs and id(t) not in self.sources:
                self.add(t, type(module).__name__, Kind.OPAQUE, inputs)  # made where no function is seen
        self.stack.pop()
        if len(outputs) == 1 and (node := self.node(outputs[0])) is not None:
            node.made_by.append(name)
            node.tapped |= bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)

    def around(self, module: nn.Module, forward: Callable) -> Callable:
        """A forward that shows that it runs even if it is called past the module's hooks."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(self.names[id(module)])
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.pop()

        return run

    def note_taps(self, model: nn.Module) -> None:
        """Tensors that a module keeps as attributes, or views of them, may be read after the pass."""
        for kept in (v for m in model.modules() for v in m.__dict__.values()):
            held = vars(kept).values() if hasattr(kept, "__dict__") and not isinstance(kept, Tensor) else ()
            several = kept.values() if isinstance(kept, dict) else kept if isinstance(kept, (list, tuple)) else held
            for t in (t for t in (kept, *several) if isinstance(t, Tensor)):
                for view in self.aliases.get(storage_of(t), ()):
                    if id(view) in self.known:
                        self.known[id(view)][1].tapped = True

    def close_frozen(self, result: Tensor) -> None:
        name, x, since = self.frozen.pop()
        source = self.node(x)
        seen = any(n.norm == name for n in self.graph.nodes[since:])  # it called F.batch_norm itself
        if source is not None and self.node(result) is not source and not seen:
            self.add(result, "frozen_batch_norm", Kind.NORM, (source,), norm=name)

    def finish(self, output: Any) -> Graph:
        self.graph.outputs = [n for t in tensors_in(output) if (n := self.node(t)) is not None]
        for node in self.graph.outputs:
            node.is_output = True
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


class Taint(TorchDispatchMode):
    """Marks every tensor that is computed from data where no function shows it (scripted functions, custom kernels)."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known, tainted = self.recorder.known, self.recorder.tainted
        behind: dict[Node, None] = {}
        for t in pytree.tree_leaves((args, kwargs)):
            if id(t) in known:
                behind[known[id(t)][1]] = None
            elif id(t) in tainted:
                behind.update(dict.fromkeys(tainted[id(t)][1]))
        if behind and func.overloadpacket.__name__ not in FACTORIES:
            for t in pytree.tree_leaves(result):
                if isinstance(t, Tensor) and id(t) not in known:
                    tainted[id(t)] = (t, tuple(behind))
        return result


def storage_of(t: Tensor) -> int:
    """What is equal for two tensors that share memory, while they live."""
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
