"""From a converted model to a network of integer operations; what has no integer form is refused by name."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from mimicnorm.errors import IntegerError
from mimicnorm.integer import layers
from mimicnorm.integer.convolve import Geometry
from mimicnorm.integer.head import Head
from mimicnorm.integer.matmul import ROWS
from mimicnorm.integer.network import Network
from mimicnorm.integer.operation import Operation
from mimicnorm.integer.parameters import Parameter
from mimicnorm.integer.requantise import Requantise
from mimicnorm.layers import Derived, LastNorm, LastNormed, WeightMean
from mimicnorm.layers.reweight import ScaledWeight

_ADD = (operator.add, operator.iadd, torch.add)
_MODULES: dict[Any, Callable[..., nn.Module]] = {
    **dict.fromkeys((torch.relu, torch.nn.functional.relu, "relu"), nn.ReLU),
    **dict.fromkeys((torch.flatten, "flatten"), lambda start_dim=0, end_dim=-1: nn.Flatten(start_dim, end_dim)),
}
"""Functions, and the modules that do the same."""
_BY_KIND: dict[str, Callable[[str], Operation]] = {
    "relu": functools.partial(Requantise, relu=True),
    "mean": layers.MeanPool,
    "view": layers.Flatten,
}
"""What the head can do, too, if it follows the last BN in this order."""
_LAST_BN = (
    "a last BN that is not between the last layer and the output: only a ReLU, the mean over positions and a view may "
    "follow it, in this order"
)


def build(model: nn.Module, *, master_bits: int, decay_scalars: bool, scalar_rate: float) -> Network:
    """Read a converted model into integers.

    Raises:
        IntegerError: With every module and function that has no integer form, by qualified name.
    """
    return _Builder(model, master_bits, decay_scalars, scalar_rate).network()


class _NoForm(Exception):
    """Says why a module or function has no integer form."""


class _Tracer(fx.Tracer):
    """Stops at convolutions, linear layers (converted ones have children) and all modules without children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        return isinstance(m, nn.Conv2d | nn.Linear) or not any(True for _ in m.children())


class _Builder:
    def __init__(self, model: nn.Module, master_bits: int, decay_scalars: bool, scalar_rate: float):
        self.model, self.bits, self.decay_scalars, self.scalar_rate = model, master_bits, decay_scalars, scalar_rate
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.operations: list[Operation] = []
        self.where: dict[fx.Node, int] = {}  # which operation makes a node's value; -1 is the network's input
        self.parameters: dict[int, Parameter] = {}
        self.refusals: list[tuple[str, str]] = []

    def network(self) -> Network:
        self._refuse_hooks_and_devices()
        *nodes, output = self._traced().nodes
        if not isinstance(output.args[0], fx.Node):
            raise IntegerError("the output must be one tensor of logits, not a dict, list or tuple")
        self.logits, norm, tail = self._tail(output.args[0])
        for node in nodes:
            try:
                if node not in tail:
                    self._read(node)
            except _NoForm as why:
                self.refusals.append((self._name(node), str(why)))
        self._raise_refusals()
        if self._makes(self.where[self.logits]) != "product":
            raise IntegerError(
                "the output must be the logits of one convolution or linear layer, with a last BN or not; logits that "
                "are a sum of layers have no integer form"
            )
        head = self._head(norm, [tail[node] for node in nodes if node in tail])
        self._raise_refusals()
        return Network(self.operations, head, list(self.parameters.values()))

    def _refuse_hooks_and_devices(self) -> None:
        for name, module in self.model.named_modules():
            before, after = module._forward_pre_hooks, module._forward_hooks
            if before or after or module._backward_hooks or module._backward_pre_hooks:
                self.refusals.append((name or type(module).__name__, "a module with hooks"))
        for name, tensor in self.model.named_parameters():
            if tensor.device.type != "cpu":
                self.refusals.append((name, f"a parameter on {tensor.device}; integers are trained on the CPU"))
        self._raise_refusals()

    def _raise_refusals(self) -> None:
        if self.refusals:
            listed = "; ".join(f"{name}: {why}" for name, why in self.refusals)
            raise IntegerError(f"there is no integer form of {listed}", self.refusals)

    def _traced(self) -> fx.Graph:
        """Return the graph without what only passes its input on."""
        try:
            graph = _Tracer().trace(self.model)
        except Exception as error:  # a forward may do anything with a traced value
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise IntegerError(
                f"{type(self.model).__name__} cannot be traced for integer training: {reason}"
            ) from error
        for node in list(graph.nodes):
            if isinstance(module := self._module(node), nn.Identity | nn.Dropout) and getattr(module, "p", 0) == 0:
                node.replace_all_uses_with(node.all_input_nodes[0])
                graph.erase_node(node)
        return graph

    def _tail(self, output: fx.Node) -> tuple[fx.Node, LastNorm | None, dict[fx.Node, str]]:
        """Walk back from the output to the last BN.

        Returns:
            The node that makes the logits, the last BN, and the nodes whose work the head does, each with its kind.
            Without a last BN: the output, None and no nodes.
        """
        node, tail = output, {}
        while kind := _kind(self._module(node)):
            tail[node] = kind
            node = node.all_input_nodes[0]
        module = self._module(node)
        if isinstance(module, LastNorm):
            return node.all_input_nodes[0], module, {**tail, node: "norm"}
        norm = getattr(module, "last_norm", None)
        return (output, None, {}) if norm is None else (node, norm, tail)

    def _head(self, norm: LastNorm | None, tail: list[str]) -> Head:
        name = self._name(self.logits)
        if norm is None:
            return Head(None, name=name, pooled=False)
        if tail != sorted(tail, key=["norm", *_BY_KIND].index):
            self.refusals.append((name, _LAST_BN))
        if not norm.momentum or abs(round(1 / norm.momentum) * norm.momentum - 1) > 0.02:
            self.refusals.append((name, f"a last BN with momentum={norm.momentum}; 1/n has one, such as 0.1"))
            self._raise_refusals()
        scale = None if norm.logit_scale is None else self._parameter(norm.logit_scale, decayed=False)
        return Head(norm, scale, relu="relu" in tail, pooled="mean" in tail, name=name)

    # -- one node of the trace --------------------------------------------------------------------------------------

    def _name(self, node: fx.Node) -> str:
        """Return the qualified name of a module, or of the one whose forward called a function."""
        if node.op in ("placeholder", "get_attr", "call_module"):
            return str(node.target)
        stack = node.meta.get("nn_module_stack") or {"": [""]}
        return str(next(reversed(stack.values()))[0]) or type(self.model).__name__

    def _module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls, or one that does the same as its function."""
        if node.op == "call_module":
            return self.model.get_submodule(str(node.target))
        known = node.op in ("call_function", "call_method") and node.target in _MODULES
        return _MODULES[node.target](*node.args[1:], **node.kwargs) if known and not _tensors(node.kwargs) else None

    def _read(self, node: fx.Node) -> None:
        """Append the integer form of a node."""
        if node.op == "placeholder":
            if self.where and node.users:
                raise _NoForm("a second input of the network")
            self.where[node] = -1
            return
        if not node.users:
            raise _NoForm("a layer whose output nobody reads")
        if node.op == "get_attr":
            raise _NoForm("a tensor that is used outside a layer")
        if _tensors(node.kwargs):
            raise _NoForm("an input that is given by keyword")
        sources = _tensors(node.args)
        if any(source not in self.where for source in sources):
            return  # what reads something refused cannot be judged
        inputs = [self.where[source] for source in sources]
        operation = self._operation(node, inputs)
        number = self._append(operation, inputs if operation.reads_sums else [self._codes(i) for i in inputs])
        readers = sum(_tensors(user.args).count(node) for user in node.users)
        self.where[node] = number if readers == 1 else self._codes(number)  # an error reaches a layer as one block

    def _operation(self, node: fx.Node, inputs: list[int]) -> Operation:
        name, module = self._name(node), self._module(node)
        if kind := _kind(module):
            return _BY_KIND[kind](name)
        if node.target in _ADD and len(inputs) == 2 and not node.kwargs:
            return layers.Add(name)
        if node.target is torch.cat and (node.args[1:], node.kwargs) in (((1,), {}), ((), {"dim": 1})):
            return layers.Concat(name)
        match module:
            case nn.Conv2d() | nn.Linear():
                return self._product(node, module, inputs[0])
            case nn.MaxPool2d(dilation=1 | (1, 1), return_indices=False):
                kernel, stride = _pair(module.kernel_size), _pair(module.stride or module.kernel_size)
                return layers.MaxPool(name, Geometry(kernel, stride, _pair(module.padding)), module.ceil_mode)
            case nn.Dropout(p=0.5 | 0.75):
                return layers.Dropout(name, {0.5: 1, 0.75: 2}[module.p])
            case nn.Dropout():
                raise _NoForm(f"Dropout({module.p}); 0.5 and 0.75 have one, as what is left counts 2 or 4 times")
            case LastNorm():
                raise _NoForm(_LAST_BN)
            case None:
                raise _NoForm(f"the function {getattr(node.target, '__name__', node.target)}")
        called = type(module).__name__
        advice = " (convert the network first: convert_(model, MimicNorm(), ...))" if "Norm" in called else ""
        raise _NoForm(f"{called}{advice}")

    # -- operations -------------------------------------------------------------------------------------------------

    def _append(self, operation: Operation, inputs: list[int]) -> int:
        operation.inputs, operation.place = tuple(inputs), str(len(self.operations))
        self.operations.append(operation)
        return len(self.operations) - 1

    def _codes(self, number: int) -> int:
        """Return the operation that makes the same values as codes; append it if there is none."""
        if self._makes(number) == "codes":
            return number
        return self._append(Requantise(self.operations[number].name, relu=False), [number])

    def _makes(self, number: int) -> str:
        """Return what an operation makes, seen through views: "codes", a "product" or a "sum"."""
        viewed = self._viewed(number)
        return "codes" if viewed < 0 else self.operations[viewed].makes

    def _viewed(self, number: int) -> int:
        """Return the operation whose values a view shows."""
        while number >= 0 and self.operations[number].makes == "view":
            (number,) = self.operations[number].inputs
        return number

    def _product(self, node: fx.Node, module: nn.Conv2d | nn.Linear, source: int) -> layers.Product:
        _require_form(module)
        if id(module.weight) not in self.names:
            raise _NoForm("a weight that is made from other parameters")
        if isinstance(module, LastNormed) and node is not self.logits:
            raise _NoForm(_LAST_BN)
        weight: Tensor = module.weight.detach()
        geometry = Geometry()
        if isinstance(module, nn.Conv2d):
            weight = weight.permute(0, 2, 3, 1)
            geometry = Geometry(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))
        centred = isinstance(module, WeightMean)
        if centred:
            weight = weight - weight.flatten(1).mean(1).view(-1, *[1] * (weight.dim() - 1))
        scale = getattr(module, "residual_scale", None)
        return layers.Product(
            self._name(node),
            self._parameter(module.weight, weight.contiguous(), bits=self.bits, centred=centred),
            None if module.bias is None else self._parameter(module.bias, decayed=self.decay_scalars),
            None if scale is None else self._parameter(scale, decayed=self.decay_scalars),
            geometry,
            reads_input=self._viewed(source) < 0,
        )

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


def _kind(module: nn.Module | None) -> str | None:
    """Return which of `_BY_KIND` a module is."""
    match module:
        case nn.ReLU():
            return "relu"
        case nn.AdaptiveAvgPool2d(output_size=1 | (1, 1)):
            return "mean"
        case nn.Flatten(start_dim=1, end_dim=-1):
            return "view"
    return None


def _require_form(module: nn.Conv2d | nn.Linear) -> None:
    """Raise if a layer has no integer form."""
    base: Any = type(module)
    while issubclass(base, Derived) and "mixin" in base.__dict__:
        if not issubclass(base.mixin, WeightMean | LastNormed) and base.mixin is not ScaledWeight:
            raise _NoForm(f"{type(module).__name__}, which makes its weight in floating point")
        base = base.base
    if getattr(module, "scales_bias", False) or getattr(module, "scales_output", False):
        raise _NoForm("a residual scalar on bias or output")
    if base not in (nn.Conv2d, nn.Linear):
        raise _NoForm(f"{base.__name__}, a class of its own")
    fan_in, fan_out = module.weight[0].numel(), module.weight.numel() // module.weight.shape[1]
    most = ROWS if module.bias is None else ROWS // 2
    if fan_in > most or fan_out > ROWS:
        raise _NoForm(f"a layer with sums of {max(fan_in, fan_out)} products; {most} fit 32 bits")
    if isinstance(module, nn.Linear):
        return
    if module.groups != 1:
        raise _NoForm(f"a convolution of {module.groups} groups")
    kernel, padding = _pair(module.kernel_size), module.padding
    if _pair(module.dilation) != (1, 1) or isinstance(padding, str) or module.padding_mode != "zeros":
        raise _NoForm("a convolution with dilation, padding by name or padding other than zeros")
    if any(p >= k for p, k in zip(_pair(padding), kernel, strict=True)):
        raise _NoForm("a convolution with as much padding as its kernel is large")


def _tensors(args: Any) -> list[fx.Node]:
    """Return the tensors among a call's arguments, as often as they are given."""
    found: list[fx.Node] = []
    fx.node.map_arg(args, found.append)
    return found


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
