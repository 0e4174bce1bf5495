"""Weight-mean layers: any convolution or linear class, centred in every forward.

``weight_mean_class(nn.Conv2d)`` is a subclass of ``nn.Conv2d`` with the same parameters under
the same names, plus an optional scalar ``residual_scale`` of shape (1,). Centring happens in
every forward and is never cached: optimizers and sharding change weights without a trace.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from mimicnorm.layers.centring import Convolution, Matrix, Op, effective_weight, weight_mean
from mimicnorm.layers.derive import Derived, derive

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
WEIGHT_LAYERS = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)


class WeightMean(Derived):
    """A layer whose weights are centred per output channel before use (Section "Weight Mean Operation").

    Attributes:
        weight: The parameter, as the optimizer sees it: not centred.
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

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register_parameter("residual_scale", None)

    def op(self) -> Op:
        """The layer's linear map, as plain data."""
        raise NotImplementedError

    def effective_weight(self) -> Tensor:
        """What the layer multiplies its input with: ``residual_scale * centre(weight)``."""
        return effective_weight(self.weight, self.residual_scale, self.op()).to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Say that the weights are centred, and whether a branch ends here."""
        base = super().extra_repr()  # pyrefly: ignore
        return f"{base}, weight_mean" + (", residual_scale" if self.residual_scale is not None else "")


class _CentredConv(WeightMean):
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
        return _batched(input, weight, bias, self.residual_scale, op)


class _CentredConvTranspose(WeightMean):
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
        return _batched(input, self.weight, self.bias, self.residual_scale, self._op(tuple(output_padding)))


class _CentredLinear(WeightMean):
    def op(self) -> Op:
        return Matrix()

    def forward(self, input: Tensor) -> Tensor:
        return weight_mean(input, self.weight, self.bias, self.residual_scale, Matrix())


class _Routed(WeightMean):
    """For a class with a ``forward`` of its own: the one call that takes ``self.weight`` is routed."""

    def op(self) -> Op:
        kind = plain_kind(type(self).base)
        if kind is nn.Linear:
            return Matrix()
        n = len(self.stride)
        if kind in TRANSPOSED:
            return Convolution(self.stride, (0,) * n, self.dilation, self.groups, True, (0,) * n)
        return Convolution(self.stride, (0,) * n, self.dilation, self.groups)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Router(self):
            return super().forward(*args, **kwargs)  # pyrefly: ignore


class _Router(TorchFunctionMode):
    """Sends a linear operation on the layer's own weight through ``weight_mean``."""

    def __init__(self, layer: WeightMean):
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
        return _batched(x, call.weight, call.bias, self.layer.residual_scale, op)


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


def _batched(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, op: Op) -> Tensor:
    """``weight_mean`` for inputs with or without a batch dimension, as ``nn.Conv*`` takes both."""
    if isinstance(op, Convolution) and x.dim() == weight.dim() - 1:
        return weight_mean(x.unsqueeze(0), weight, bias, scale, op).squeeze(0)
    return weight_mean(x, weight, bias, scale, op)


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
    """Whether a weight-layer class computes something else than PyTorch's own."""
    kind = plain_kind(cls)
    names = ("forward", "_conv_forward") if kind in CONVOLUTIONS else ("forward",)
    return any(getattr(cls, name) is not getattr(kind, name) for name in names)


@functools.cache
def weight_mean_class(base: type[nn.Module]) -> type[nn.Module]:
    """The weight-mean subclass of a convolution or linear class.

    Example:
        >>> layer = weight_mean_class(nn.Linear)(3, 2)
        >>> isinstance(layer, nn.Linear), list(layer.state_dict())
        (True, ['weight', 'bias'])
    """
    kind = plain_kind(base)
    if kind is None:
        raise TypeError(f"{base.__qualname__} is no convolution or linear class of PyTorch's")
    if has_own_forward(base):
        mixin: type = _Routed
    elif kind in CONVOLUTIONS:
        mixin = _CentredConv
    elif kind in TRANSPOSED:
        mixin = _CentredConvTranspose
    else:
        mixin = _CentredLinear
    return derive(weight_mean_class, mixin, base, "WeightMean")


def centre_(layer: nn.Module, residual_scale: Parameter | None = None) -> nn.Module:
    """Turn a layer into its weight-mean version, in place: the same object, the same parameters."""
    layer.__class__ = weight_mean_class(type(layer))
    layer.register_parameter("residual_scale", residual_scale)
    return layer


WeightMeanConv1d = weight_mean_class(nn.Conv1d)
WeightMeanConv2d = weight_mean_class(nn.Conv2d)
WeightMeanConv3d = weight_mean_class(nn.Conv3d)
WeightMeanConvTranspose1d = weight_mean_class(nn.ConvTranspose1d)
WeightMeanConvTranspose2d = weight_mean_class(nn.ConvTranspose2d)
WeightMeanConvTranspose3d = weight_mean_class(nn.ConvTranspose3d)
WeightMeanLinear = weight_mean_class(nn.Linear)
