"""From a converted model to a network of integer operations; what has no integer form is refused by name."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from mimicnorm.errors import IntegerError
from mimicnorm.integer import layers
from mimicnorm.integer.convolve import Geometry
from mimicnorm.integer.head import Head
from mimicnorm.integer.layers import Product
from mimicnorm.integer.matmul import ROWS
from mimicnorm.integer.network import Network, Node
from mimicnorm.integer.operation import Operation
from mimicnorm.integer.parameters import Parameter
from mimicnorm.integer.requantise import Requantise
from mimicnorm.layers import Derived, LastNorm, LastNormed, WeightMean
from mimicnorm.layers.reweight import ScaledWeight

_ADD = (operator.add, operator.iadd, torch.add)
_FLATTEN = (torch.flatten, "flatten")
_RELU = (torch.relu, torch.nn.functional.relu, "relu")
_DROPOUT = {0.5: 1, 0.75: 2}  # what is left counts 2 or 4 times


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
        self.relu_after_norm = self.pooled = self.flattened = False  # what follows the last BN

    def network(self) -> Network:
        self._refuse_hooks_and_devices()
        graph = self._traced()
        for node in graph.nodes:
            if node.op == "output":
                break
            self._read(node)
        self._refuse()
        if not isinstance(node.args[0], fx.Node):
            raise IntegerError("the output must be one tensor of logits, not a dict, list or tuple")
        end = self.where[node.args[0]]
        read = {i for entry in self.nodes for i in entry.inputs} | {end}
        unread = [entry.operation.name for i, entry in enumerate(self.nodes) if i not in read]
        self.refusals += [(name, "a layer whose output nobody reads") for name in unread]
        self._refuse()
        if end < 0 or self.kinds[end] == "codes":
            raise IntegerError("the output must be the logits of a convolution or linear layer, with a last BN or not")
        last = self.nodes[end].operation
        if isinstance(last, layers.Add):
            raise IntegerError(f"{last.name}: logits that are a sum of layers have no integer form")
        head = self._head(last)
        self._refuse()
        for number, entry in enumerate(self.nodes):
            entry.operation.place = f"{number}"
        return Network(self.nodes, head, list(self.parameters.values()))

    def _head(self, last: Operation) -> Head:
        norm = self.norm
        if norm is None:
            return Head(1, False, None, False, pooled=False, name=last.name)
        scale = None if norm.logit_scale is None else self._parameter(norm.logit_scale, decayed=False)
        average = round(1 / norm.momentum) if norm.momentum else 0
        if not average or abs(average * norm.momentum - 1) > 0.02:  # pyrefly: ignore
            self.refusals.append((last.name, f"a last BN with momentum={norm.momentum}; 1/n has one, such as 0.1"))
            average = 10
        head = Head(norm.num_features, True, scale, self.relu_after_norm, norm.eps, average, self.pooled, last.name)
        if norm.running_mean is not None and norm.running_var is not None:
            head.start_from(norm.running_mean, norm.running_var)
        return head

    def _traced(self) -> fx.Graph:
        try:
            return _Tracer().trace(self.model)
        except Exception as error:  # a forward may do anything with a traced value
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise IntegerError(
                f"{type(self.model).__name__} cannot be traced for integer training: {reason}"
            ) from error

    def _refuse(self) -> None:
        if self.refusals:
            listed = "; ".join(f"{name}: {why}" for name, why in self.refusals)
            raise IntegerError(f"there is no integer form of {listed}", self.refusals)

    def _refuse_hooks_and_devices(self) -> None:
        for name, module in self.model.named_modules():
            before, after = module._forward_pre_hooks, module._forward_hooks
            if before or after or module._backward_hooks or module._backward_pre_hooks:
                self.refusals.append((name or type(module).__name__, "a module with hooks"))
        for name, tensor in self.model.named_parameters():
            if tensor.device.type != "cpu":
                self.refusals.append((name, f"a parameter on {tensor.device}; integers are trained on the CPU"))
        self._refuse()

    # -- one node of the trace --------------------------------------------------------------------------------------

    def _read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if self.where and node.users:
                self.refusals.append((str(node.target), "a second input of the network"))
            self.where[node] = -1
            return
        if any(isinstance(a, fx.Node) for a in _flat(list(node.kwargs.values()))):
            self.refusals.append((_name(node) or type(self.model).__name__, "an input that is given by keyword"))
            return
        sources = [a for a in _flat(node.args) if isinstance(a, fx.Node)]
        if node.op == "get_attr" or any(a not in self.where for a in sources):
            if node.op == "get_attr":
                self.refusals.append((str(node.target), "a tensor that is used outside a layer"))
            return  # what reads something refused has been named there
        inputs = tuple(self.where[a] for a in sources)
        name = _name(node) or type(self.model).__name__
        if any(i >= 0 and self.kinds[i] == "logits" for i in inputs) and not self._behind_logits(node):
            why = "an operation behind the last BN"
        elif node.op == "call_module":
            why = self._module(node, name, self.model.get_submodule(name), inputs)
        else:
            why = self._function(node, name, inputs)
        if why:
            self.refusals.append((name, why))

    def _behind_logits(self, node: fx.Node) -> bool:
        """Whether the head can do it: a ReLU, the mean over positions, a view."""
        if node.op == "call_module":
            module = self.model.get_submodule(str(node.target))
            return isinstance(module, nn.ReLU | nn.AdaptiveAvgPool2d | nn.Flatten | nn.Identity)
        return node.target in (*_FLATTEN, *_RELU)

    def _module(self, node: fx.Node, name: str, module: nn.Module, inputs: tuple[int, ...]) -> str:
        if isinstance(module, nn.Conv2d | nn.Linear):
            why = _unfit(module)
            if not why and id(module.weight) not in self.names:
                why = "a weight that is made from other parameters"
            if not why:
                self._product(node, name, module, inputs)
            return why
        if isinstance(module, LastNorm):
            return self._last_norm(node, module, inputs)
        if isinstance(module, nn.ReLU):
            return self._relu(node, name, inputs)
        if self._is_alias(module):
            self.where[node] = inputs[0]
            return ""
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return self._flatten(node, name, inputs)
        if isinstance(module, nn.Dropout):
            if module.p not in _DROPOUT:
                return f"Dropout({module.p}); 0.5 and 0.75 have one, as what is left counts 2 or 4 times"
            self._on_codes(node, layers.Dropout(name, _DROPOUT[module.p]), inputs)
            return ""
        if isinstance(module, nn.MaxPool2d) and _pair(module.dilation) == (1, 1) and not module.return_indices:
            stride = _pair(module.stride or module.kernel_size)
            geometry = Geometry(_pair(module.kernel_size), stride, _pair(module.padding))
            if geometry.kernel[0] * geometry.kernel[1] > 256:
                return "max pooling over more than 256 positions"
            self._on_codes(node, layers.MaxPool(name, geometry, module.ceil_mode), inputs)
            return ""
        if isinstance(module, nn.AdaptiveAvgPool2d) and module.output_size in (1, (1, 1), [1, 1]):
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
        if self._readers(node) > 1:  # an error must reach a layer as one block
            self.where[node] = self._codes(self.where[node])

    def _readers(self, node: fx.Node) -> int:
        """Count who reads a value; an `nn.Identity` reads nothing, but those who read it do."""
        count = 0
        for user in node.users:
            times = sum(a is node for a in _flat(user.args))
            alias = user.op == "call_module" and self._is_alias(self.model.get_submodule(str(user.target)))
            count += self._readers(user) if alias else times
        return count

    def _is_alias(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Identity) or (isinstance(module, nn.Dropout) and module.p == 0)

    def _relu(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        if inputs[0] < 0:
            return "a ReLU on the network's input"
        if self.kinds[inputs[0]] == "logits":
            if self.pooled:
                return "a ReLU behind the mean of the last BN's output; before the mean it has one"
            self.relu_after_norm, self.where[node] = True, inputs[0]
            return ""
        self.where[node] = self._append(Requantise(name, relu=True), inputs, "codes")
        return ""

    def _flatten(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        if inputs[0] >= 0 and self.kinds[inputs[0]] == "logits":
            self.flattened, self.where[node] = True, inputs[0]
        elif inputs[0] >= 0 and self.kinds[inputs[0]] == "sum":
            self._sum(node, layers.Flatten(name), inputs)
        else:
            self.where[node] = self._append(layers.Flatten(name), inputs, "codes")
        return ""

    def _mean(self, node: fx.Node, name: str, inputs: tuple[int, ...]) -> str:
        if inputs[0] >= 0 and self.kinds[inputs[0]] == "logits":  # the head takes the mean over positions
            if self.flattened:
                return "a mean behind a view of the last BN's output"
            self.pooled, self.where[node] = True, inputs[0]
        else:
            self._sum(node, layers.MeanPool(name), (self._codes(inputs[0]),))
        return ""

    def _last_norm(self, node: fx.Node, module: LastNorm, inputs: tuple[int, ...]) -> str:
        if self.norm is not None or inputs[0] < 0 or self.kinds[inputs[0]] != "sum":
            return "a last BN that is not the only one, or not directly behind a layer"
        if isinstance(self.nodes[inputs[0]].operation, layers.Add):
            return "a last BN behind a sum"
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
    fan_in, fan_out = module.weight[0].numel(), module.weight.numel() // module.weight.shape[1]
    most = ROWS if module.bias is None else ROWS // 2
    if fan_in > most or fan_out > ROWS:
        return f"a layer with sums of {max(fan_in, fan_out)} products; {most} fit 32 bits"
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


def _name(node: fx.Node) -> str:
    """The qualified name of a module, or of the one whose forward called a function."""
    if node.op == "call_module":
        return str(node.target)
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(stack.values()))[0]) if stack else ""


def _flat(args: Any) -> list[Any]:
    return [a for arg in args for a in (_flat(arg) if isinstance(arg, list | tuple) else [arg])]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
