"""What each function of a forward pass means for what is saved: a role per function, no guess from sizes or values.

A mode sees the functions as they are called. Inputs of weight layers and norms and inputs or outputs of activations are
marked, and encoded when autograd saves them; activations whose output is enough, and pooling, run in functions of their
own. Everything else (parameters, row sums, softmax, gates, the last BN) is not in the table and is saved as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode

from mimicnorm.compress import pooling
from mimicnorm.compress.activations import Gate, gated
from mimicnorm.compress.codec import Code, Kind
from mimicnorm.compress.store import Store
from mimicnorm.layers.linear import LINEAR_CALLS
from mimicnorm.layers.weight import autocast_dtype

_Call = Callable[..., Any]

# -- activations whose output is enough --------------------------------------------------------------------------

_RELU = Gate(0.0)


def _hardtanh(min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Gate:
    del inplace
    return Gate(float(min_val), float(max_val))


def _leaky_relu(negative_slope: float = 0.01, inplace: bool = False) -> Gate | None:
    del inplace
    return Gate(0.0, outside=float(negative_slope)) if negative_slope >= 0 else None  # below 0, signs are lost


def _always(gate: Gate) -> Callable[..., Gate]:
    return lambda inplace=False: gate  # noqa: ARG005


GATES: dict[Any, Callable[..., Gate | None]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _always(_RELU)),
    F.relu6: _always(Gate(0.0, 6.0)),
    **dict.fromkeys((F.hardtanh, F.hardtanh_), _hardtanh),
    **dict.fromkeys((F.leaky_relu, F.leaky_relu_), _leaky_relu),
    F.hardsigmoid: _always(Gate(0.0, 1.0, inside=1 / 6)),
}
"""Activations whose gradient follows from their output, each with a function from its settings to its gate."""

# -- other activations -------------------------------------------------------------------------------------------

CURVED = (F.silu, F.gelu, F.hardswish, F.mish, F.elu, F.celu, F.selu, F.softplus)
"""Activations whose gradient bends with the input: it is saved in 8 bits at least, and their gradient is not exact."""
SLOPES = (F.prelu, torch.prelu, Tensor.prelu)
"""Activations of which only the sign of the input meets the gradient that passes through."""

# -- layers ------------------------------------------------------------------------------------------------------

WEIGHT_LAYERS = {*LINEAR_CALLS, torch.convolution}
NORMS = {F.batch_norm: 3, F.instance_norm: 3, F.group_norm: 2, F.layer_norm: 2}
"""Norms, each with the position of its weight. One without a parameter as its weight is left alone: as the last BN."""
MAX_POOLS = (F.max_pool2d, torch.max_pool2d)
AVG_POOLS = (F.avg_pool2d,)


class Roles(TorchFunctionMode):
    """Marks and replaces, while a forward pass runs.

    Args:
        store: Where marks go.
        bits: 8, 4 or 2; 32 marks nothing, and saves without loss what PyTorch saves twice.
        active: Whether our hooks are the ones that autograd calls now; inside a checkpoint they are not.
    """

    def __init__(self, store: Store, bits: int, active: Callable[[], bool]):
        super().__init__()
        self.store, self.bits, self.active = store, bits, active
        self.signed, self.at_least_8 = Code(Kind.SIGNED, min(bits, 8)), Code(Kind.SIGNED, 8)
        self.ran_compiled = False
        self._running, self._linear_input = False, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run a function in its role."""
        if torch.compiler.is_compiling():
            self.ran_compiled = True
            return func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):  # of a dispatch mode, between an autograd function and its hooks
            return func(*args, **(kwargs or {}))
        self._running = True
        if torch.is_grad_enabled():  # so no autograd function is at work
            self._linear_input = 0
        try:
            return self._run(func, args, kwargs or {})
        finally:
            self._running = False

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        rule = _RULES.get(func)
        x = args[0] if args else kwargs.get("input")
        differentiates = torch.is_grad_enabled() or rule is _weight_layer  # which may run in an autograd function
        if rule is None or not isinstance(x, Tensor) or not differentiates or not self.active():
            return func(*args, **kwargs)
        args, kwargs = args[1:], {k: v for k, v in kwargs.items() if k != "input"}
        return rule(self, func, x, args, kwargs)

    def saves_in_role(self, tensor: Tensor) -> bool:
        """Whether what saves a tensor is known: a function of torch, or an autograd function that is a weight layer.

        Any other autograd function may do anything with what it saves: a checkpoint runs again from it.
        """
        return self._running or tensor.untyped_storage()._cdata == self._linear_input

    def mark(self, x: Tensor, code: Code) -> None:
        """Mark what a graph computed; inputs of the network are the caller's, and stay in memory anyway."""
        if self.bits < 32 and x.requires_grad and not x.is_leaf and x.is_floating_point():
            self.store.mark(x, code)


# -- a rule per kind of function ---------------------------------------------------------------------------------


def _gate(mode: Roles, func: _Call, x: Tensor, args: tuple, kwargs: dict) -> Tensor:
    gate = GATES[func](*args, **kwargs)
    saves_output = gate is not None and x.requires_grad and x.is_floating_point()
    if not saves_output or (mode.bits == 32 and gate is _RELU):  # which saves its output anyway
        return func(x, *args, **kwargs)
    return gated(mode.store, mode.bits, gate, lambda t: func(t, *args, **kwargs), x)


def _activation(mode: Roles, func: _Call, x: Tensor, args: tuple, kwargs: dict) -> Tensor:
    mode.mark(x, mode.at_least_8 if func in CURVED else mode.signed)
    y = func(x, *args, **kwargs)
    mode.mark(y, mode.signed)
    return y


def _weight_layer(mode: Roles, func: _Call, x: Tensor, args: tuple, kwargs: dict) -> Tensor:
    dtype = autocast_dtype(x)
    if dtype is not None and x.dtype == torch.float32:  # autocast would cast below, and save what no mark is on
        x = x.to(dtype)
    mode.mark(x, mode.signed)
    if not torch.is_grad_enabled():
        mode._linear_input = x.untyped_storage()._cdata  # by its address: to hold it would keep it alive
    return func(x, *args, **kwargs)


def _norm(mode: Roles, func: _Call, x: Tensor, args: tuple, kwargs: dict) -> Tensor:
    position = NORMS[func] - 1  # x is gone from args
    weight = kwargs.get("weight", args[position] if len(args) > position else None)
    if weight is not None and weight.is_leaf:  # a last BN has none, or computes it from one scalar
        mode.mark(x, mode.signed)
    return func(x, *args, **kwargs)


def _pool(pool: Callable[..., Tensor | None], mode: Roles, func: _Call, x: Tensor, args: tuple, kwargs: dict) -> Any:
    y = pool(x, *args, **kwargs) if x.requires_grad else None
    if y is None:
        return func(x, *args, **kwargs)
    if mode.bits < 32 and mode.store.kind(x) is Kind.ABOVE:
        mode.mark(y, _RELU.code(mode.bits))  # maxima and means of numbers from 0 up
    return y


_RULES: dict[Any, Callable[[Roles, _Call, Tensor, tuple, dict], Any]] = {
    **dict.fromkeys(GATES, _gate),
    **dict.fromkeys((*CURVED, *SLOPES), _activation),
    **dict.fromkeys(WEIGHT_LAYERS, _weight_layer),
    **dict.fromkeys(NORMS, _norm),
    **dict.fromkeys(MAX_POOLS, partial(_pool, pooling.max_pool2d)),
    **dict.fromkeys(AVG_POOLS, partial(_pool, pooling.avg_pool2d)),
}
