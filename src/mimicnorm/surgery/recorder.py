"""Watch a forward pass: a function mode notes each operation on data as a node of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from mimicnorm.layers import LINEAR_CALLS, WEIGHT_LAYERS, Reweighted, autocast_dtype, laid_out
from mimicnorm.layers.reweight import LinearCall
from mimicnorm.surgery.aliases import Aliases, storage_of
from mimicnorm.surgery.example import tensors_in
from mimicnorm.surgery.graph import Graph, Node
from mimicnorm.surgery.isolate import instead_of_forward
from mimicnorm.surgery.ops import FACTORIES, Kind, canonical, kind_of

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_PLAIN = (bool, int, float, complex, str, slice, type(None), type(...), torch.dtype)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm, by class or (frozen variants) by its four tensors."""
    if isinstance(module, _BatchNorm):
        return True
    if isinstance(module, _InstanceNorm):
        return False
    registered = {**module._parameters, **module._buffers}
    four = [registered.get(k) for k in ("weight", "bias", "running_mean", "running_var")]
    return all(t is not None and t.dim() == 1 for t in four)


class Recorder(TorchFunctionMode):
    """Notes every function of the forward pass that touches data.

    Args:
        model: The model, holding the tensors that it will run with.
        graph: Where the nodes go.
        inputs: The arguments of the call.
    """

    def __init__(self, model: nn.Module, graph: Graph, inputs: Any):
        super().__init__()
        self.model, self.graph = model, graph
        self.names = {id(m): name for name, m in model.named_modules()}  # a shared module goes by its first name
        self.modules = dict(model.named_modules(remove_duplicate=False))
        state = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        self.parameter_names: dict[int, list[str]] = {}  # in order: tied weights have several names
        for name, t in state.items():
            self.parameter_names.setdefault(id(t), []).append(name)
        self.storages = {name: storage_of(t) for name, t in state.items()}
        self.sources = {key: set(names) for key, names in self.parameter_names.items()}  # parameters in a constant
        self.tainted: dict[int, tuple[Tensor, tuple[Node, ...]]] = {}  # made from data where no function was seen
        self.known: dict[int, tuple[Tensor, Node]] = {}
        self.alive: list[Tensor] = list(state.values())  # ids stay valid while objects live
        self.aliases = Aliases()
        self.stack: list[str] = []
        self.failed = ""  # the innermost module that raised
        self.by_hand: list[tuple[str, Tensor, int]] = []  # open BatchNorms of other classes, their input, since when
        given = tensors_in(inputs)
        self.batch = next((len(t) for t in given if t.dim()), 1)
        for t in given:
            self.add(t, "input", Kind.INPUT, ())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs inside: modules, functions, and what no function shows."""
        with instead_of_forward(self.model.modules(), self.around), _Taint(self), self:
            yield

    # -- nodes ---------------------------------------------------------------------------------

    def node(self, t: Any) -> Node | None:
        known = self.known.get(id(t))
        if known is not None:
            return known[1]
        tainted = self.tainted.get(id(t))
        return self.add(t, "unseen", Kind.OPAQUE, tainted[1]) if tainted is not None else None

    def add(self, t: Tensor, op: str, kind: Kind, inputs: tuple[Node, ...], **extra: Any) -> Node:
        node = Node(len(self.graph.nodes), op, kind, inputs, t.shape, t.dtype, self.where, **extra)
        node.ancestors = 1 << node.index
        for parent in dict.fromkeys(inputs):
            parent.users.append(node)
            node.ancestors |= parent.ancestors
        self.graph.nodes.append(node)
        self.aliases.add(t)
        self.known[id(t)] = (t, node)
        return node

    @property
    def where(self) -> str:
        return self.stack[-1] if self.stack else ""

    # -- functions -----------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if "batch_norm" in getattr(func, "__name__", ""):
            return self.batch_norm(func, args, kwargs)
        linear = LINEAR_CALLS[func](*args, **kwargs) if func in LINEAR_CALLS else None
        if linear is not None and isinstance(linear.input, Tensor):
            self.before_linear(linear)
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = list(map(_version, tensors))
        result = func(*args, **kwargs)
        name = canonical(getattr(func, "__name__", ""))
        if name in FACTORIES:
            return result
        operands = tensors[:1] if name.endswith("_as") else tensors  # x.view_as(y) reads only y's shape
        inputs = tuple(node for t in operands if (node := self.node(t)) is not None)
        mutated = [t for t, v in zip(tensors, versions, strict=True) if _version(t) != v]
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if not inputs:
            self.note_sources(tensors, outputs + mutated)
            for t in (*tensors, *outputs):
                self.aliases.add(t)
            return result
        kind = kind_of(name, len(inputs), self.node(operands[0]) is not None, _numbers((args, kwargs)))
        extra: dict[str, Any] = {"arguments": self.arguments((args, kwargs))}
        if linear is not None:
            extra |= {"settings": {"op": linear.op}, **self.layer_call(linear)}
        self.note_other_uses(tensors)
        if kind in (Kind.ACTIVATION, Kind.SUM, Kind.PAD):
            extra["settings"] = _settings(args, kwargs)
        if kind in (Kind.ACTIVATION, Kind.CONSTANT):
            extra["constants"] = self.constants(pytree.tree_leaves((args, kwargs)))
        if kind is Kind.SUM and outputs:
            whole = [n for n in inputs if n.shape == outputs[0].shape]
            if len(whole) == 1:  # the others are spread over positions: they shift it (FiLM), and no branch ends here
                kind, inputs = Kind.CONSTANT, (whole[0], *(n for n in inputs if n is not whole[0]))
        if kind is Kind.CONCAT and outputs and not outputs[0].numel():
            kind = Kind.VIEW  # of nothing
        if name == "setitem" and mutated:
            inputs = tuple(n for n in (self.node(args[0]), self.node(args[2])) if n is not None)
            name, kind = "overwrite", Kind.CONCAT if len(inputs) > 1 else Kind.VIEW
        for t in mutated:
            self.mutate(t, name, kind, inputs, extra)
        written = {id(t) for t in mutated}
        for t in outputs:
            if id(t) not in written and not (any(t is u for u in tensors) and self.node(t) is not None):
                self.add(t, name, kind, inputs, **extra)
        return result

    def mutate(self, t: Tensor, name: str, kind: Kind, inputs: tuple[Node, ...], extra: dict) -> None:
        """Note an in-place operation: a new value for ``t`` and for every other view of its memory."""
        new = self.add(t, name, kind, inputs, in_place=True, **extra)
        for other in self.aliases.of(t):
            old = self.node(other)
            if other.numel() <= t.numel() or old is None:
                self.add(other, "view", Kind.VIEW, (new,))
            else:
                self.add(other, "overwrite", Kind.CONCAT, (old, new))

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
        return (*_numbers(operands), *views)

    def note_sources(self, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Note which parameters a constant was computed from."""
        sources = set().union(*(self.sources.get(id(t), set()) for t in tensors))
        if sources:
            for t in outputs:
                self.sources[id(t)] = self.sources.get(id(t), set()) | sources
                self.alive.append(t)

    # -- BatchNorms ----------------------------------------------------------------------------

    def batch_norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        x = args[0] if args else kwargs["input"]
        source, norm = self.node(x), self.norm_of((*args, *kwargs.values()))
        if source is None and norm is None:  # on weights (standardised convolutions)
            result = func(*args, **kwargs)
            leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
            self.note_sources([t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)], leaves)
            return result
        if source is None:  # a BatchNorm on something that does not come from the input
            source = self.add(x, "constant", Kind.OPAQUE, ())
        # F.batch_norm keeps the shape; it is not run, so that a batch of one passes and no statistics move.
        result = stand_in(x, self.graph.fake) if func is F.batch_norm else func(*args, **kwargs)
        output = next(t for t in pytree.tree_leaves(result) if isinstance(t, Tensor))
        if norm is not None:
            self.add(output, "batch_norm", Kind.NORM, (source,), norm=norm)
        elif len(x) == 1 < self.batch:  # all samples as channels of one: an instance norm
            self.add(output, "instance_norm", Kind.OTHER_NORM, (source,))
        else:
            self.graph.functional_norms.append(self.where)
            self.add(output, "batch_norm", Kind.OTHER_NORM, (source,))
        return result

    def norm_of(self, values: tuple) -> str | None:
        """The BatchNorm whose tensors a call takes, or that is running."""
        for t in values:
            for name in self.parameter_names.get(id(t), ()):
                module = self.modules[name.rpartition(".")[0]]
                if is_batch_norm(module):
                    return self.names[id(module)]
        return self.where if self.stack and is_batch_norm(self.modules[self.where]) else None

    def close_by_hand(self, result: Tensor) -> None:
        """End a BatchNorm that is written in other functions: what it made so far is its output."""
        name, x, since = self.by_hand.pop()
        source = self.node(x)
        seen = any(n.norm == name for n in self.graph.nodes[since:])  # it called F.batch_norm itself
        if source is not None and self.node(result) is not source and not seen:
            self.add(result, "frozen_batch_norm", Kind.NORM, (source,), norm=name)

    # -- weight layers -------------------------------------------------------------------------

    def before_linear(self, call: LinearCall) -> None:
        """Check the types, as fake kernels do not; begin at a learned constant or a grid of positions."""
        if autocast_dtype(call.input) is None and call.input.dtype != call.weight.dtype:
            raise ExampleError(
                f"the example reaches layer {self.where!r} as {call.input.dtype}, but its weight is "
                f"{call.weight.dtype}: give the example in the model's own type."
            )
        if self.node(call.input) is None and self.running_holder(call.weight):
            self.add(call.input, "constant", Kind.OPAQUE, ())

    def holders(self, weight: Tensor) -> list[str]:
        """The modules whose ``weight`` this very tensor is; several if it is tied."""
        split = (name.rpartition(".") for name in self.parameter_names.get(id(weight), ()))
        return [self.names[id(self.modules[name])] for name, _, attribute in split if attribute == "weight"]

    def running_holder(self, weight: Tensor) -> str | None:
        """The one of them whose own forward is running; of any class, if its weight is a matrix."""
        layers = (n for n in self.holders(weight) if isinstance(self.modules[n], WEIGHT_LAYERS) or weight.dim() == 2)
        return next((name for name in layers if self.stack and name == self.where), None)

    def layer_call(self, call: LinearCall) -> dict[str, Any]:
        """Attribute a linear call to the layer whose weight it takes, by identity; else to the layer running."""
        if (holder := self.running_holder(call.weight)) is not None:
            return {"layer": holder}
        for name in self.holders(call.weight):
            if isinstance(self.modules[name], WEIGHT_LAYERS):
                return {"layer": name, "inside_module": False}
        for running in reversed(self.stack):
            parameters = {f"{running}.{p}".lstrip(".") for p, _ in self.modules[running].named_parameters()}
            derived = parameters & self.sources.get(id(call.weight), set())
            if isinstance(self.modules[running], WEIGHT_LAYERS) and derived:
                return {"layer": running, "derived_weight": True}
        return {}

    def note_other_uses(self, operands: list[Tensor]) -> None:
        """Note the layers whose weight meets data outside their own forward, as it is or transposed, say."""
        for t in operands:
            split = [name.rpartition(".") for name in self.sources.get(id(t), ())]
            layers = {self.names[id(self.modules[name])] for name, _, attribute in split if attribute == "weight"}
            if layers.isdisjoint(self.stack):
                self.graph.used_elsewhere |= {n for n in layers if isinstance(self.modules[n], WEIGHT_LAYERS)}

    # -- modules -------------------------------------------------------------------------------

    def around(self, module: nn.Module, forward: Callable) -> Callable:
        """A forward that is noted, whether it is called as ``layer(x)`` or as ``layer.forward(x)``."""

        @functools.wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.enter(module, (*args, *kwargs.values()))
            try:
                output = forward(*args, **kwargs)
            except BaseException:
                self.failed = self.failed or self.where
                self.stack.pop()
                raise
            self.failed = ""
            self.leave(module, (args, kwargs), output)
            return output

        return noted

    def enter(self, module: nn.Module, args: tuple) -> None:
        name = self.names[id(module)]
        given = args[0] if args and isinstance(args[0], Tensor) else None
        if self.by_hand and given is not None:
            self.close_by_hand(given)  # a child runs inside it: the normalising part is over
        self.stack.append(name)
        if given is None:
            return
        if _is_hooked(module) and (node := self.node(given)) is not None:
            node.tapped = True  # a hook sees the input, too
        if isinstance(module, Reweighted) and self.node(given) is None:
            self.add(given, "constant", Kind.OPAQUE, ())  # its weight is made on the fly, and no holder is seen
        if is_batch_norm(module):
            self.graph.norm_inputs.setdefault(name, given.shape)
            if not isinstance(module, _BatchNorm):
                self.by_hand.append((name, given, len(self.graph.nodes)))

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        outputs = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        if self.by_hand and self.by_hand[-1][0] == self.where and outputs:
            self.close_by_hand(outputs[0])
        inputs = tuple(n for t in pytree.tree_leaves(args) if (n := self.node(t)) is not None)
        for t in outputs:
            if self.node(t) is None and inputs and id(t) not in self.sources:
                self.add(t, type(module).__name__, Kind.OPAQUE, inputs)  # made where no function is seen (numpy)
        name = self.stack.pop()
        if len(outputs) == 1 and (node := self.node(outputs[0])) is not None:
            node.made_by.append(name)
            node.tapped |= _is_hooked(module)

    # -- the end -------------------------------------------------------------------------------

    def finish(self, output: Any) -> Graph:
        """Note outputs and what modules keep; forget reads without consequence."""
        for t in tensors_in([v for m in self.model.modules() for k, v in m.__dict__.items() if k not in _REGISTRIES]):
            for view in (t, *self.aliases.of(t)):
                if id(view) in self.known:
                    self.known[id(view)][1].tapped = True
        returned = [self.node(t) for t in tensors_in(output)]
        self.graph.outputs = [n for n in returned if n is not None]
        self.graph.constants = returned.count(None)
        for node in self.graph.outputs:
            node.is_output = True
        alive = {*self.graph.outputs, *(n for n in self.graph.nodes if n.tapped)}
        for node in reversed(self.graph.nodes):  # shape probes and unused statistics lead to no output, norm or layer
            if node in alive or node.layer or node.norm:
                alive.add(node)
                alive.update(node.inputs)
        for node in self.graph.nodes:
            node.users = [u for u in node.users if u in alive]
        return self.graph


class _Taint(TorchDispatchMode):
    """Marks every tensor that is computed from data where no function shows it (scripted functions, custom kernels)."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known, tainted = self.recorder.known, self.recorder.tainted
        sources: dict[Node, None] = {}
        for t in pytree.tree_leaves((args, kwargs)):
            if id(t) in known:
                sources[known[id(t)][1]] = None
            elif id(t) in tainted:
                sources.update(dict.fromkeys(tainted[id(t)][1]))
        if sources and func.overloadpacket.__name__ not in FACTORIES:
            for t in pytree.tree_leaves(result):
                if isinstance(t, Tensor) and id(t) not in known:
                    tainted[id(t)] = (t, tuple(sources))
        return result


def stand_in(x: Tensor, fake: bool) -> Tensor:
    """What a BatchNorm returns: of fake tensors the format matters, of real ones the values may steer the model."""
    return laid_out(x.clone()) if fake or x.numel() <= x.shape[1] else F.batch_norm(x, None, None, training=True)


def _is_hooked(module: nn.Module) -> bool:
    """Whether hooks see what a module reads and returns; those of torch.nn.utils (weight norm, pruning) do not."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(not _module_of(hook).startswith("torch.nn.utils") for some in hooks for hook in some.values())


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or type(hook).__module__


def _numbers(call: Any) -> list[float]:
    return [float(leaf) for leaf in pytree.tree_leaves(call) if type(leaf) in (int, float)]


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _settings(args: tuple, kwargs: dict) -> dict[str, Any]:
    positional = [a for a in args[1:] if not isinstance(a, Tensor)]
    named = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor) and k != "inplace"}
    return {"positional": positional, **named} if positional else named
