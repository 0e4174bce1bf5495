"""Layers that apply another weight than the one they hold: centred, standardised, scaled.

Whatever the class of a convolution or linear layer, its forward is brought to one method,
``apply_op(x, weight, bias, op)``; what that does with the weight is the treatment's own affair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mimicnorm.layers.centring import Convolution, Matrix, Op
from mimicnorm.layers.derive import Derived, derive

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHT_LAYERS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)


class Reweighted(Derived):
    """A layer whose weight is changed before use, in every forward and never cached.

    Attributes:
        weight: The parameter, as the optimizer sees it.
        residual_scale: The scalar that ends a residual branch, shape (1,), or None.
    """

    weight: Tensor
    bias: Tensor | None
    residual_scale: Tensor | None
    register_parameter: Any  # what the base class brings, for the reader and the type checker
    stride: tuple[int, ...]
    padding: Any
    padding_mode: str
    dilation: tuple[int, ...]
    groups: int
    kernel_size: Any
    output_padding: tuple[int, ...]
    _output_padding: Any
    _reversed_padding_repeated_twice: Any

    def op(self) -> Op:
        """The layer's linear map, as plain data."""
        raise NotImplementedError

    def apply_op(self, x: Tensor, weight: Tensor, bias: Tensor | None, op: Op) -> Tensor:
        """Apply the map with the changed weight."""
        raise NotImplementedError

    def effective_weight(self) -> Tensor:
        """What the layer multiplies its input with."""
        raise NotImplementedError


class _Conv(Reweighted):
    def op(self) -> Op:
        padding = _symmetric(self)
        return Convolution(self.stride, padding or (0,) * len(self.stride), self.dilation, self.groups)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros" or _symmetric(self) is None:
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=mode)
            op = Convolution(self.stride, (0,) * len(self.stride), self.dilation, self.groups)
        else:
            op = self.op()
        return _batched(self, input, weight, bias, op)


class _ConvTranspose(Reweighted):
    def op(self) -> Op:
        return self._op(tuple(self.output_padding))

    def _op(self, output_padding: tuple[int, ...]) -> Op:
        return Convolution(self.stride, self.padding, self.dilation, self.groups, True, output_padding)

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError(f"{type(self).__name__}: only zero padding is supported by transposed convolutions")
        output_padding = self._output_padding(
            input,
            output_size,
            self.stride,
            self.padding,
            self.kernel_size,
            len(self.stride),
            self.dilation,
        )
        return _batched(self, input, self.weight, self.bias, self._op(tuple(output_padding)))


class _Linear(Reweighted):
    def op(self) -> Op:
        return Matrix()

    def forward(self, input: Tensor) -> Tensor:
        return self.apply_op(input, self.weight, self.bias, Matrix())


class _Routed(Reweighted):
    """For a class with a ``forward`` of its own: the one call that takes ``self.weight`` is routed."""

    def op(self) -> Op:
        kind = plain_kind(type(self).base)
        if kind is nn.Linear or kind is None:
            return Matrix()
        n = len(self.stride)
        if kind in TRANSPOSED:
            return Convolution(self.stride, (0,) * n, self.dilation, self.groups, True, (0,) * n)
        return Convolution(self.stride, (0,) * n, self.dilation, self.groups)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Router(self):
            return super().forward(*args, **kwargs)  # pyrefly: ignore


class _Router(TorchFunctionMode):
    """Sends a linear operation on the layer's own weight through the layer's ``apply_op``."""

    def __init__(self, layer: Reweighted):
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        parse = LINEAR_CALLS.get(func)
        if parse is None:
            return func(*args, **kwargs)
        call = parse(*args, **kwargs)
        if call.weight is not self.layer.weight:
            return func(*args, **kwargs)
        x, op = call.input, call.op
        if op is None:  # string or uneven padding: pad first
            x, op = call.padded()
        return _batched(self.layer, x, call.weight, call.bias, op)


class LinearCall:
    """One call of ``F.conv*``, ``F.conv_transpose*`` or ``F.linear``, its arguments by name."""

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None, op: Op | None, same: tuple | None = None):
        self.input, self.weight, self.bias, self.op, self._same = input, weight, bias, op, same

    def padded(self) -> tuple[Tensor, Op]:
        """Input and map of a call with ``padding="same"``, the padding done."""
        assert self._same is not None
        stride, dilation, groups = self._same
        sides: list[int] = []
        for d, k in zip(reversed(dilation), reversed(self.weight.shape[2:]), strict=True):
            total = d * (k - 1)
            sides += [total // 2, total - total // 2]
        return F.pad(self.input, sides), Convolution(stride, (0,) * len(stride), dilation, groups)


def _each(value: Any, n: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * n if len(values) == 1 else values


def _conv(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1) -> LinearCall:
    n = weight.dim() - 2
    stride, dilation = _each(stride, n), _each(dilation, n)
    if padding == "valid":
        padding = 0
    if isinstance(padding, str):
        return LinearCall(input, weight, bias, None, (stride, dilation, groups))
    return LinearCall(input, weight, bias, Convolution(stride, _each(padding, n), dilation, groups))


def _conv_transpose(
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> LinearCall:
    n = weight.dim() - 2
    op = Convolution(_each(stride, n), _each(padding, n), _each(dilation, n), groups, True, _each(output_padding, n))
    return LinearCall(input, weight, bias, op)


def _linear(input, weight, bias=None) -> LinearCall:
    return LinearCall(input, weight, bias, Matrix())


LINEAR_CALLS: dict[Any, Any] = {
    F.linear: _linear,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d), _conv),
    **dict.fromkeys(
        (
            F.conv_transpose1d,
            F.conv_transpose2d,
            F.conv_transpose3d,
            torch.conv_transpose1d,
            torch.conv_transpose2d,
            torch.conv_transpose3d,
        ),
        _conv_transpose,
    ),
}
"""The functions that apply a weight, each with the parser of its arguments."""


def _batched(layer: Reweighted, x: Tensor, weight: Tensor, bias: Tensor | None, op: Op) -> Tensor:
    """``apply_op`` for inputs with or without a batch dimension, as ``nn.Conv*`` takes both."""
    if isinstance(op, Convolution) and x.dim() == weight.dim() - 1:
        return layer.apply_op(x.unsqueeze(0), weight, bias, op).squeeze(0)
    return layer.apply_op(x, weight, bias, op)


def _symmetric(layer: Any) -> tuple[int, ...] | None:
    """Padding as numbers per dimension, or None where the two sides differ (an even kernel's "same")."""
    if not isinstance(layer.padding, str):
        return layer.padding
    sides = layer._reversed_padding_repeated_twice
    pairs = list(zip(sides[::2], sides[1::2], strict=True))[::-1]
    return tuple(a for a, _ in pairs) if all(a == b for a, b in pairs) else None


def plain_kind(cls: type) -> type | None:
    """Which of PyTorch's weight layers a class is derived from, or None."""
    return next((kind for kind in WEIGHT_LAYERS if issubclass(cls, kind)), None)


def has_own_forward(cls: type) -> bool:
    """Whether a class computes something else than PyTorch's weight layer does that it is derived from, if any."""
    kind = plain_kind(cls)
    if kind is None:
        return True
    names = ("forward", "_conv_forward") if kind in CONVOLUTIONS else ("forward",)
    return any(getattr(cls, name) is not getattr(kind, name) for name in names)


def reweighted_class(
    factory: Callable, treatment: type[Reweighted], base: type[nn.Module], prefix: str
) -> type[nn.Module]:
    """The subclass of a convolution or linear class that treats its weight so; for a factory."""
    kind = plain_kind(base)
    if kind is None and base.__module__.startswith("torch.nn."):
        raise TypeError(f"{base.__qualname__} is no convolution or linear class of PyTorch's")
    if has_own_forward(base):
        forward: type = _Routed
    else:
        forward = _Conv if kind in CONVOLUTIONS else _ConvTranspose if kind in TRANSPOSED else _Linear
    return derive(factory, prefix, base, treatment, forward)
