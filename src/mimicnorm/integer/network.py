"""From a converted model to a network of integer operations; what has no integer form is refused by name."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from mimicnorm.errors import IntegerError
from mimicnorm.integer import layers
from mimicnorm.integer.convolve import Geometry
from mimicnorm.integer.head import Head
from mimicnorm.integer.layers import Block, Operation, Pass, Product, Requantise, Value
from mimicnorm.integer.parameters import Parameter
from mimicnorm.layers import Derived, LastNorm, LastNormed, WeightMean
from mimicnorm.layers.reweight import ScaledWeight

_ADD = (operator.add, operator.iadd, torch.add)
_FLATTEN = (torch.flatten, "flatten")
_RELU = (torch.relu, torch.nn.functional.relu, "relu")
_DROPOUT = {0.5: 1, 0.75: 2}  # what is left counts 2 or 4 times


@dataclass
class Node:
    """An operation and the numbers of the nodes it reads; -1 is the network's input."""

    operation: Operation
    inputs: tuple[int, ...]


@dataclass
class Network:
    """Operations in the order of execution, and the head."""

    nodes: list[Node]
    head: Head
    parameters: list[Parameter] = field(default_factory=list)

    @property
    def products(self) -> list[Product]:
        """The layers with weights."""
        return [n.operation for n in self.nodes if isinstance(n.operation, Product)]

    @property
    def watches(self) -> list[layers.Watch]:
        """The exponents that follow from step to step."""
        found = [n.operation for n in self.nodes if isinstance(n.operation, Requantise)]
        return [watch for operation in found for watch in (operation.output, operation.error)]

    def forward(self, at: Pass, codes: Block, save: bool = True) -> tuple[Block, list[Any]]:
        """Return the logits, one block, and what `backward` needs; without ``save``, values are freed on the way."""
        values: list[Value | None] = []
        saved: list[Any] = []
        last = {i: number for number, node in enumerate(self.nodes) for i in node.inputs}
        for number, node in enumerate(self.nodes):
            inputs = [[codes] if i < 0 else values[i] for i in node.inputs]
            value, kept = node.operation.forward(at, *inputs)  # pyrefly: ignore
            values.append(value)
            saved.append(kept if save else None)
            for i in node.inputs:
                if i >= 0 and last[i] == number:
                    values[i] = None
        (logits,) = values[-1] or []
        return logits, saved

    def backward(self, at: Pass, saved: list[Any], error: Block) -> None:
        """Add the gradients of these samples to those of the layers."""
        errors: list[Value] = [[] for _ in self.nodes]
        errors[-1] = [error]
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            given = node.operation.backward(at, saved[number], errors[number])
            errors[number], saved[number] = [], None
            for i, terms in zip(node.inputs, given, strict=True):
                if i >= 0:
                    errors[i] += terms


def build(model: nn.Module, *, master_bits: int, decay_scalars: bool, scalar_rate: float) -> Network:
    """Read a converted model into integers.

    Raises:
        IntegerError: With every module and function that has no integer form, by qualified name.
    """
    return _Builder(model, master_bits, decay_scalars, scalar_rate).network()


class _Tracer(fx.Tracer):
    """Stops at convolutions, linear layers (converted ones have children) and all modules without children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return isinstance(m, nn.Conv2d | nn.Linear) or not any(True for _ in m.children())


class _Builder:
    def __init__(self, model: nn.Module, master_bits: int, decay_scalars: bool, scalar_rate: float):
        self.model, self.bits, self.decay_scalars, self.scalar_rate = model, master_bits, decay_scalars, scalar_rate
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.nodes: list[Node] = []
        self.kinds: list[str] = []  # of each node: codes, sum (to be requantised), logits (past the last BN)
        self.where: dict[fx.Node, int] = {}
        self.parameters: dict[int, Parameter] = {}
        self.refusals: list[tuple[str, str]] = []
        self.norm: LastNorm | None = None
        self.relu_after_norm = False

    def network(self) -> Network:
        try:
            graph = _Tracer().trace(self.model)
        except Exception as error:  # a forward may do anything with a traced value
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise IntegerError(
                f"{type(self.model).__name__} cannot be traced for integer training: {reason}"
            ) from error
        for node in graph.nodes:
            if node.op == "output":
                break
            self._read(node)
        if self.refusals:
            listed = "; ".join(f"{name}: {why}" for name, why in self.refusals)
            raise IntegerError(f"there is no integer form of {listed}", self.refusals)
        end = self.where[node.args[0]]  # pyrefly: ignore
        if self.kinds[end] == "codes" or end != len(self.nodes) - 1:
            raise IntegerError("the output must be the logits of a convolution or linear layer, with a last BN or not")
        last = self.nodes[end].operation
        while not isinstance(last, Product):  # a mean over positions, without a last BN
            end = self.nodes[end].inputs[0]
            last = self.nodes[end].operation
        norm = self.norm
        scale = None if norm is None else norm.logit_scale
        head = Head(
            len(last.weight.master),
            norm is not None,
            None if scale is None else self._parameter(scale, decayed=False),
            self.relu_after_norm,
            1e-5 if norm is None else norm.eps,
            10 if norm is None or not norm.momentum else round(1 / norm.momentum),
        )
        for number, entry in enumerate(self.nodes):
            entry.operation.place = f"{number}"
        return Network(self.nodes, head, list(self.parameters.values()))

    # -- one node of the trace --------------------------------------------------------------------------------------

    def _read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.where[node] = -1
            return
        sources = [a for a in _flat(node.args) if isinstance(a, fx.Node)]
        if node.op == "get_attr" or any(a not in self.where for a in sources):
            if node.op == "get_attr":
                self.refusals.append((str(node.target), "a tensor that is used outside a layer"))
            return  # what reads something refused has been named there
        inputs = tuple(self.where[a] for a in sources)
        name = str(node.target) if node.op == "call_module" else _inside(node)
        if any(i >= 0 and self.kinds[i] == "logits" for i in inputs) and not self._behind_logits(node):
            why = "an operation behind the last BN"
        elif node.op == "call_module":
            why = self._module(node, name, self.model.get_submodule(name), inputs)
        else:
            why = self._function(node, name, inputs)
        if why:
            self.refusals.append((name or type(self.model).__name__, why))

    def _behind_logits(self, node: fx.Node) -> bool:
        """Whether the head can do it: a ReLU, the mean over positions, a view."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            return isinstance(module, nn.ReLU | nn.AdaptiveAvgPool2d | nn.Flatten | nn.Identity)
        return node.target in (*_FLATTEN, *_RELU)

    def _module(self, node: fx.Node, name: str, module: nn.Module, inputs: tuple[int, ...]) -> str:
        if isinstance(module, nn.Conv2d | nn.Linear):
            why = _unfit(module)
            if not why:
                self._product(node, name, module, inputs)
            return why
        if isinstance(module, LastNorm):
            return self._last_norm(node, module, inputs)
        if isinstance(module, nn.ReLU):
            return self._relu(node, name, inputs)
        if isinstance(module, nn.Identity):
            self.where[node] = inputs[0]
            return ""
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return self._flatten(node, name, inputs)
        if isinstance(module, nn.Dropout):
            if module.p == 0:
                self.where[node] = inputs[0]
                return ""
            if module.p not in _DROPOUT:
                return f"Dropout({module.p}); 0.5 and 0.75 have one, as what is left counts 2 or 4 times"
            self._on_codes(node, layers.Dropout(name, _DROPOUT[module.p]), inputs)
            return ""
        if isinstance(module, nn.MaxPool2d) and _pair(module.dilation) == (1, 1) and not module.return_indices:
            stride = _pair(module.stride or module.kernel_size)
            geometry = Geometry(_pair(module.kernel_size), stride, _pair(module.padding))
            self._on_codes(node, layers.MaxPool(name, geometry, module.ceil_mode), inputs)
            return ""
        if isinstance(module, nn.AdaptiveAvgPool2d) and _pair(module.output_size) == (1, 1):
            return self._mean(node, name, inputs)
        return f"{type(module).__name__}{_advice(module)}"

    def _function(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        target = node.target
        if target in _ADD and len(inputs) == 2 and not node.kwargs:
            self._sum(node, layers.Add(name), inputs)
            return ""
        if target is torch.cat and (node.args[1:], node.kwargs) in (((1,), {}), ((), {"dim": 1})):
            self._on_codes(node, layers.Concat(name), inputs)
            return ""
        if target in _FLATTEN and node.args[1:] == (1,) and not node.kwargs:
            return self._flatten(node, name, inputs)
        if target in _RELU:
            return self._relu(node, name, inputs)
        return f"the function {getattr(target, '__name__', target)}"

    # -- operations -------------------------------------------------------------------------------------------------

    def _append(self, operation: Operation, inputs: tuple[int, ...], kind: str) -> int:
        self.nodes.append(Node(operation, inputs))
        self.kinds.append(kind)
        return len(self.nodes) - 1

    def _codes(self, number: int) -> int:
        """Return a node that gives the same as codes: a sum is requantised once, for all who read it."""
        if number < 0 or self.kinds[number] == "codes":
            return number
        for i, node in enumerate(self.nodes):
            if node.inputs == (number,) and isinstance(node.operation, Requantise) and not node.operation.relu:
                return i
        return self._append(Requantise(self.nodes[number].operation.name, relu=False), (number,), "codes")

    def _on_codes(self, node: fx.Node, operation: Operation, inputs: tuple[int, ...]) -> None:
        self.where[node] = self._append(operation, tuple(self._codes(i) for i in inputs), "codes")

    def _sum(self, node: fx.Node, operation: Operation, inputs: tuple[int, ...]) -> None:
        self.where[node] = self._append(operation, inputs, "sum")
        if len(node.users) > 1:  # an error must reach a layer as one block
            self.where[node] = self._codes(self.where[node])

    def _relu(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        if inputs[0] < 0 or self.kinds[inputs[0]] == "codes":
            return "a ReLU that is not directly behind a layer or a sum"
        if self.kinds[inputs[0]] == "logits":
            self.relu_after_norm, self.where[node] = True, inputs[0]
            return ""
        self.where[node] = self._append(Requantise(name, relu=True), inputs, "codes")
        return ""

    def _flatten(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        if inputs[0] >= 0 and self.kinds[inputs[0]] == "logits":
            self.where[node] = inputs[0]
        else:
            flat = self._append(layers.Flatten(name), inputs, self.kinds[inputs[0]] if inputs[0] >= 0 else "codes")
            self.where[node] = flat
        return ""

    def _mean(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        if inputs[0] >= 0 and self.kinds[inputs[0]] == "logits":  # the head takes the mean over positions
            self.where[node] = inputs[0]
        else:
            self._sum(node, layers.MeanPool(name), (self._codes(inputs[0]),))
        return ""

    def _last_norm(self, node: fx.Node, module: LastNorm, inputs: tuple[int, ...]) -> str:
        if self.norm is not None or inputs[0] < 0 or self.kinds[inputs[0]] != "sum":
            return "a last BN that is not the only one, or not directly behind a layer"
        self.norm, self.where[node] = module, inputs[0]
        self.kinds[inputs[0]] = "logits"
        return ""

    def _product(self, node: fx.Node, name: str, module: nn.Conv2d | nn.Linear, inputs: tuple[int, ...]) -> None:
        weight: Tensor = module.weight.detach()
        geometry = None
        if isinstance(module, nn.Conv2d):
            weight = weight.permute(0, 2, 3, 1)
            geometry = Geometry(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))
        centred = isinstance(module, WeightMean)
        if centred:
            weight = weight - weight.flatten(1).mean(1).view(-1, *[1] * (weight.dim() - 1))
        scale = getattr(module, "residual_scale", None)
        source = self._codes(inputs[0])
        product = Product(
            name,
            self._parameter(module.weight, weight.contiguous(), bits=self.bits, centred=centred),
            None if module.bias is None else self._parameter(module.bias, decayed=self.decay_scalars),
            None if scale is None else self._parameter(scale, decayed=self.decay_scalars),
            geometry,
            reads_input=source < 0 or (self.nodes[source].inputs == (-1,) and self._is_view(source)),
        )
        self._sum(node, product, (source,))
        norm = getattr(module, "last_norm", None)
        if norm is not None and self._last_norm(node, norm, (self.where[node],)):
            self.refusals.append((f"{name}.last_norm", "a second last BN"))

    def _is_view(self, number: int) -> bool:
        return isinstance(self.nodes[number].operation, layers.Flatten)

    def _parameter(self, own: Tensor, values: Tensor | None = None, **settings: Any) -> Parameter:
        name = self.names[id(own)]
        if id(own) in self.parameters:
            self.refusals.append((name, "a weight that several layers share"))
        if not own.requires_grad:
            self.refusals.append((name, "a frozen parameter"))
        speed = self.scalar_rate if own.numel() == 1 else 1.0
        made = Parameter(name, own.detach() if values is None else values, speed=speed, **settings)
        self.parameters[id(own)] = made
        return made


def _unfit(module: nn.Conv2d | nn.Linear) -> str:
    """Say why a layer has no integer form, or nothing."""
    base: Any = type(module)
    while issubclass(base, Derived) and "mixin" in base.__dict__:
        if not issubclass(base.mixin, WeightMean | LastNormed) and base.mixin is not ScaledWeight:
            return f"{type(module).__name__}, which makes its weight in floating point"
        base = base.base
    if getattr(module, "scales_bias", False) or getattr(module, "scales_output", False):
        return "a residual scalar on bias or output"
    if base not in (nn.Conv2d, nn.Linear):
        return f"{base.__name__}, a class of its own"
    if isinstance(module, nn.Linear):
        return ""
    if module.groups != 1:
        return f"a convolution of {module.groups} groups"
    kernel, padding = _pair(module.kernel_size), module.padding
    if _pair(module.dilation) != (1, 1) or isinstance(padding, str) or module.padding_mode != "zeros":
        return "a convolution with dilation, padding by name or padding other than zeros"
    if any(p >= k for p, k in zip(_pair(padding), kernel, strict=True)):
        return "a convolution with as much padding as its kernel is large"
    return ""


def _advice(module: nn.Module) -> str:
    return " (convert the network first: convert_(model, MimicNorm(), ...))" if "Norm" in type(module).__name__ else ""


def _inside(node: fx.Node) -> str:
    """The qualified name of the module whose forward called a function."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _flat(args: Any) -> list[Any]:
    return [a for arg in args for a in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
