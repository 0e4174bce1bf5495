"""Weight mean: the layer ``op(x, s * (W - mean(W)))`` at the memory of a plain layer.

The centred weight is a function of a parameter, so it need not be kept: in eager mode one
autograd function saves the layer's input and its parameters (and a sum per output channel)
and centres again in the backward pass. While compiling, the same is said to the partitioner
by a checkpoint; while exporting and inside functorch transforms the plain expression runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Convolution:
    """The linear map of a convolution, transposed or not, on a batched input."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0,)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x,
            weight,
            bias,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self._output_padding,
            self.groups,
        )

    def backward(
        self, grad: Tensor, x: Tensor | None, x_shape: torch.Size, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients for (x, weight, bias), each where ``mask`` asks for it."""
        if x is None:  # its values are not needed, only its shape
            x = grad.new_empty(1).expand(x_shape)
        bias_shape = [grad.shape[1]] if mask[2] else None
        return torch.ops.aten.convolution_backward.default(
            grad,
            x,
            weight,
            bias_shape,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self._output_padding,
            self.groups,
            list(mask),
        )

    @property
    def _output_padding(self) -> tuple[int, ...]:
        return self.output_padding if self.transposed else (0,) * len(self.stride)


@dataclass(frozen=True)
class Matrix:
    """The linear map of ``nn.Linear`` on an input of any rank."""

    groups: int = 1
    transposed: bool = False

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def backward(
        self, grad: Tensor, x: Tensor | None, x_shape: torch.Size, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients for (x, weight, bias), each where ``mask`` asks for it."""
        del x_shape
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if mask[0] else None
        grad_weight = rows.T @ x.reshape(-1, x.shape[-1]) if mask[1] and x is not None else None
        return grad_x, grad_weight, rows.sum(0) if mask[2] else None


Op = Convolution | Matrix


def centre(weight: Tensor, *, groups: int = 1, transposed: bool = False) -> Tensor:
    """Subtract from each output channel's weights their mean (the paper's weight mean).

    Args:
        weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) if transposed.
        groups: The convolution's groups; they matter only to a transposed one.
        transposed: Whether the output channels are the second dimension.

    Example:
        >>> centre(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[-2., -1.,  3.]])
    """
    if not transposed:
        return weight - weight.mean(tuple(range(1, weight.dim())), keepdim=True)
    grouped = weight.unflatten(0, (groups, -1))
    means = grouped.mean((1, *range(3, grouped.dim())), keepdim=True)
    return (grouped - means).flatten(0, 1)


def effective_weight(weight: Tensor, scale: Tensor | None, op: Op) -> Tensor:
    """The weight the layer applies, ``scale * centre(weight)``, as a plain differentiable expression."""
    centred = centre(widened(weight), groups=op.groups, transposed=op.transposed)
    return centred if scale is None else centred * scale


def weight_mean(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, op: Op) -> Tensor:
    """Apply ``op`` with the centred, scaled weight.

    Args:
        x: The input; a convolution's has a batch dimension.
        weight: The layer's own parameter, not centred.
        bias: Added after, untouched by ``scale``.
        scale: The residual branch's scalar, shape (1,), or None.
        op: The linear map.
    """
    make = functools.partial(effective_weight, op=op)
    return with_made_weight(x, bias, op, make, (weight, scale), lambda x: _WeightMean.apply(x, weight, bias, scale, op))


def with_made_weight(
    x: Tensor,
    bias: Tensor | None,
    op: Op,
    make: Callable[..., Tensor],
    params: tuple[Tensor | None, ...],
    eager: Callable[[Tensor], Tensor],
) -> Tensor:
    """``op(x, make(*params), bias)``, by the way to it that keeps least for the backward pass.

    Args:
        x: The input.
        bias: Added after.
        op: The linear map.
        make: The weight from the parameters.
        params: The layer's weight first.
        eager: The same as one autograd function of x, for eager mode.
    """
    weight = params[0]
    assert weight is not None
    x = cast_input(x, weight)
    if wants_plain_expression():
        return plain_call(x, make(*params), bias, op)
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
            # Without it the partitioner keeps the made weight for the backward pass.
            made = checkpoint(make, *params, use_reentrant=False, preserve_rng_state=False)
        else:
            made = make(*params)
        return plain_call(x, made, bias, op)
    return eager(x)


def cast_input(x: Tensor, weight: Tensor) -> Tensor:
    """The input as autocast would have it: aten's convolution is on no autocast list, so the cast is ours.

    It comes first, so that the narrow tensor is the one that is saved.
    """
    dtype = autocast_dtype(x)
    if dtype is not None and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(dtype)
    if x.dtype != weight.dtype:
        raise RuntimeError(f"input type {x.dtype} and weight type {weight.dtype} should be the same")
    return x


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type autocast would run a convolution of ``x`` in, or None where it is off."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def wants_plain_expression() -> bool:
    """Whether autograd functions of our own are out of place: exporting, functorch, dual numbers."""
    return (
        _is_exporting()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0  # dual numbers: the function below has no jvp
    )


def _is_exporting() -> bool:
    exporting = getattr(torch.compiler, "is_exporting", None)
    return bool(exporting is not None and exporting())


def plain_call(x: Tensor, weight: Tensor, bias: Tensor | None, op: Op) -> Tensor:
    """Apply the map with weight and bias in the input's type."""
    return op(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _WeightMean(torch.autograd.Function):
    """Saves x, W, s and the row sums; centres again in backward. Differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, op: Op) -> Tensor:
        sums = _sums(weight, op)
        _, needs_weight, _, needs_scale, _ = ctx.needs_input_grad
        ctx.op, ctx.x_shape = op, x.shape
        ctx.save_for_backward(x if needs_weight or needs_scale else None, weight, scale, sums)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return plain_call(x, _effective(weight, sums, scale, op), bias, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight, scale, sums = ctx.saved_tensors
        op: Op = ctx.op
        needs_x, needs_weight, needs_bias, needs_scale, _ = ctx.needs_input_grad
        twice = torch.is_grad_enabled()  # create_graph: the sums are part of the graph then
        effective = weight
        if needs_x:
            effective = effective_weight(weight, scale, op) if twice else _effective(weight, sums, scale, op)
        mask = (needs_x, needs_weight or needs_scale, needs_bias)
        grad_x, grad_w, grad_bias = op.backward(grad, x, ctx.x_shape, effective.to(grad.dtype), mask)
        grad_scale = grad_weight = None
        if grad_w is not None:
            grad_w = _centre_gradient(grad_w.to(sums.dtype), op, in_place=not twice)
            if needs_scale:  # <dL/dW_eff, centred W>: one centred factor is enough
                grad_scale = _inner(grad_w, widened(weight)).to(scale.dtype).reshape(scale.shape)
            if needs_weight:
                grad_weight = (_scaled(grad_w, scale) if twice or scale is None else grad_w.mul_(scale)).to(
                    weight.dtype
                )
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, grad_scale, None


def widened(weight: Tensor) -> Tensor:
    """A half-precision weight in float: a mean over thousands needs the digits."""
    return weight.float() if weight.dtype in (torch.float16, torch.bfloat16) else weight


def _rows(weight: Tensor) -> Tensor:
    """(out, n) without a copy for the two dense layouts; the order within a row does not matter to a mean."""
    if weight.dim() == 4 and not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last):
        weight = weight.permute(0, 2, 3, 1)
    return weight.reshape(weight.shape[0], -1)


def _grouped(weight: Tensor, op: Op) -> tuple[Tensor, tuple[int, ...]]:
    """The weight with its output channels apart, and the dimensions that an output channel sums over."""
    if not op.transposed:
        return weight, tuple(range(1, weight.dim()))
    grouped = weight.unflatten(0, (op.groups, -1))
    return grouped, (1, *range(3, grouped.dim()))


def _sums(weight: Tensor, op: Op) -> Tensor:
    """The sum of each output channel's weights, shaped to broadcast against their grouped view.

    Sums, not means: the division is a factor of what is done with them, where a mean takes seven calls to the kernels.
    """
    grouped, dims = _grouped(widened(weight), op)
    return grouped.sum(dims, keepdim=True)


def _effective(weight: Tensor, sums: Tensor, scale: Tensor | None, op: Op) -> Tensor:
    """``scale * centre(weight)`` in one pass over the weight."""
    grouped, _ = _grouped(weight, op)
    one_over_n = sums.numel() / weight.numel()
    if scale is None:
        centred = torch.sub(grouped, sums, alpha=one_over_n)
    else:
        centred = torch.addcmul((sums * -one_over_n) * scale, grouped, scale)
    return centred.flatten(0, 1) if op.transposed else centred


def _scaled(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight if scale is None else weight * scale


def _centre_gradient(grad: Tensor, op: Op, in_place: bool) -> Tensor:
    """The adjoint of ``centre``: centring is symmetric and idempotent."""
    if not in_place:
        return centre(grad, groups=op.groups, transposed=op.transposed)
    sums = _sums(grad, op)
    _grouped(grad, op)[0].sub_(sums, alpha=sums.numel() / grad.numel())
    return grad


def _inner(a: Tensor, b: Tensor) -> Tensor:
    if a.stride() == b.stride():  # in the order of memory: flattening channels-last kernels would copy both, slowly
        a, b = _rows(a), _rows(b)
    return torch.dot(a.reshape(-1), b.reshape(-1))


def fan_in(weight: Tensor, groups: int, transposed: bool, stride: tuple[int, ...]) -> int:
    """How many inputs one output sums: of a strided transposed convolution, the most that reach a pixel.

    Example:
        >>> fan_in(torch.empty(64, 32, 3, 3), groups=1, transposed=False, stride=(1, 1))
        288
    """
    kernel = weight.shape[2:]
    if not transposed:
        return weight.shape[1] * math.prod(kernel)
    taps = math.prod(math.ceil(k / s) for k, s in zip(kernel, stride, strict=True))
    return weight.shape[0] // groups * taps
