"""Apply a linear map with a weight that is made of parameters, at the memory of a plain layer.

Any weight of the form ``scale * W`` or ``scale * (W - mean W)``, per output channel: centring, standardisation (scale =
1 / std W), the scalar of a residual branch, a gain. A weight that is centred already may be applied as it is, with only
its gradient centred (``centring="backward"``). The made weight is not saved. In eager mode one autograd function
saves the layer's input, its parameters and a sum per output channel, and makes the weight again in the backward pass.
While compiling, a checkpoint tells the partitioner the same. While exporting or tracing, inside functorch transforms
and with dual numbers the plain expression runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from mimicnorm.layers.linear import Op

Centring = Literal["forward", "backward"] | None
"""What is centred per output channel: the weight and so its gradient, its gradient alone, or nothing."""
_NARROW = (torch.float16, torch.bfloat16)

# -- the weight that is applied ----------------------------------------------------------------------------------


def by_output(weight: Tensor, groups: int | None) -> tuple[Tensor, tuple[int, ...]]:
    """View a weight with its output channels in dimensions of their own.

    Args:
        weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) for a transposed convolution.
        groups: The groups of a transposed convolution; None for any other map, whose view is the weight itself.

    Returns:
        The view, and the dimensions that one output channel sums over.
    """
    if groups is None:
        return weight, tuple(range(1, weight.dim()))
    view = weight.unflatten(0, (groups, -1))
    return view, (1, *range(3, view.dim()))


def centre(weight: Tensor, *, groups: int = 1, transposed: bool = False) -> Tensor:
    """Subtract from each output channel's weights their mean (the paper's weight mean).

    Args:
        weight: (out, in / groups, *kernel), or (in, out / groups, *kernel) if transposed.
        groups: The convolution's groups; they matter only to a transposed one.
        transposed: Whether the output channels are the second dimension.

    Example:
        >>> centre(torch.tensor([[1.0, 2.0, 3.0, 6.0]]))
        tensor([[-2., -1.,  0.,  3.]])
    """
    return centre_rows(weight, groups if transposed else None)


def effective_weight(weight: Tensor, scale: Tensor | None, groups: int | None, centring: Centring) -> Tensor:
    """Make ``scale * W`` or ``scale * (W - mean W)``; ``groups`` as in ``by_output``, the rest as in ``apply_map``."""
    if centring == "backward":
        rows, dims = by_output(widened(weight), groups)
        mean = rows.mean(dims, keepdim=True)
        rows = rows - (mean - mean.detach())  # the same values; the gradient of the mean centres W's
        weight = rows if groups is None else rows.flatten(0, 1)
    return _made(weight, scale, groups, _sums(weight, groups) if centring == "forward" else None)


def centre_rows(weight: Tensor, groups: int | None) -> Tensor:
    """Subtract each output channel's mean from a weight or its gradient; ``groups`` as in ``by_output``."""
    rows, dims = by_output(weight, groups)
    narrow = weight.dtype in _NARROW
    sums = rows.sum(dims, keepdim=True, dtype=torch.float32 if narrow else None)
    centred = torch.sub(rows, sums, alpha=sums.numel() / rows.numel())
    centred = centred.to(weight.dtype) if narrow else centred
    return centred if groups is None else centred.flatten(0, 1)


def inverse_deviation(weight: Tensor, eps: float, groups: int | None) -> Tensor:
    """Compute 1 / sqrt(var W + eps) for each output channel, and save no centred weight for backward."""
    if wants_plain_expression() or torch.compiler.is_compiling():
        return _recomputed(functools.partial(_inverse_deviation, eps=eps, groups=groups), weight)
    return _InverseDeviation.apply(weight, eps, groups)


def widened(weight: Tensor) -> Tensor:
    """Convert half precision to float: a mean over thousands needs the digits."""
    return weight.float() if weight.dtype in _NARROW else weight


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert, unless it is of that type: ``to`` takes a microsecond to find that out, several times a layer."""
    return t if t.dtype == dtype else t.to(dtype)


def _sums(weight: Tensor, groups: int | None) -> Tensor:
    """Sum each output channel's weights.

    Sums, not means: the division is a factor of what is done with them, where a mean takes seven calls to the kernels.
    """
    rows, dims = by_output(widened(weight), groups)
    return rows.sum(dims, keepdim=True)


def _made(weight: Tensor, scale: Tensor | None, groups: int | None, sums: Tensor | None) -> Tensor:
    """Make the weight in one pass over it; centred if there are sums."""
    rows, dims = by_output(weight, groups)
    if scale is not None:
        scale = _along(scale, rows, dims)
    if sums is None:
        made = rows if scale is None else rows * scale
    elif scale is None:
        made = torch.sub(rows, sums, alpha=sums.numel() / rows.numel())
    else:
        made = torch.addcmul(sums * (-sums.numel() / rows.numel()) * scale, rows, scale)
    return made if groups is None else made.flatten(0, 1)


def _along(scale: Tensor, rows: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Shape one number per output channel to broadcast against the weight's view."""
    if scale.numel() == 1:
        return scale
    return scale.reshape([1 if d in dims else size for d, size in enumerate(rows.shape)])


def _inverse_deviation(weight: Tensor, eps: float, groups: int | None) -> Tensor:
    rows, dims = by_output(effective_weight(weight, None, groups, "forward"), groups)
    norm = torch.linalg.vector_norm(rows, dim=dims)  # five times as fast as var_mean on a CPU
    return torch.rsqrt(norm.square() * (norm.numel() / rows.numel()) + eps).flatten()


class _InverseDeviation(torch.autograd.Function):
    """Saves the weight alone; differentiable twice."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, eps: float, groups: int | None) -> Tensor:
        inverse = _inverse_deviation(weight, eps, groups)
        ctx.groups = groups
        ctx.save_for_backward(weight, inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        weight, inverse = ctx.saved_tensors
        factor = inverse**3 * grad * (-inverse.numel() / weight.numel())
        return effective_weight(weight, factor, ctx.groups, "forward").to(weight.dtype), None, None


# -- the linear map with that weight -----------------------------------------------------------------------------


def apply_map(
    x: Tensor, weight: Tensor, bias: Tensor | None, op: Op, scale: Tensor | None = None, centring: Centring = None
) -> Tensor:
    """Apply ``op`` with ``scale * W`` or ``scale * (W - mean W)``; saves no more for backward than a plain layer.

    Args:
        x: The input; a convolution's has a batch dimension.
        weight: The layer's parameter.
        bias: Added after, untouched by ``scale``.
        op: The linear map.
        scale: One number, or one per output channel; None for 1. It may depend on parameters.
        centring: Whether each output channel's mean is subtracted from its weights ("forward"), only from their
            gradient ("backward"), or not at all (None).
    """
    x = _cast_input(x, weight)
    if wants_plain_expression() or torch.compiler.is_compiling():
        make = functools.partial(effective_weight, groups=op.weight_groups, centring=centring)
        return _call(x, _recomputed(make, weight, scale), bias, op)
    return _ApplyMap.apply(x, weight, bias, scale, op, centring)


def _recomputed(make: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Compute ``make(*tensors)``; in a compiled graph, let the backward pass compute it again.

    Without the checkpoint the partitioner saves the result for backward.
    """
    if torch.is_grad_enabled() and torch.compiler.is_compiling() and not wants_plain_expression():
        return checkpoint(make, *tensors, use_reentrant=False, preserve_rng_state=False)
    return make(*tensors)


class _ApplyMap(torch.autograd.Function):
    """Saves x, the parameters and the sums; makes the weight again in backward. Differentiable twice."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, op: Op, centring: Centring
    ) -> Tensor:
        sums = _sums(weight, op.weight_groups) if centring == "forward" else None
        _, needs_weight, _, needs_scale, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight or needs_scale else None, weight, scale, sums)
        ctx.op, ctx.centring, ctx.x_shape = op, centring, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _call(x, _made(weight, scale, op.weight_groups, sums), bias, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, weight, scale, sums = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_scale, *_ = ctx.needs_input_grad
        op: Op = ctx.op
        twice = torch.is_grad_enabled()  # create_graph: the made weight is part of the graph
        made = weight
        if twice:
            made = effective_weight(weight, scale, op.weight_groups, ctx.centring)
        elif needs_x:
            made = _made(weight, scale, op.weight_groups, sums)
        mask = (needs_x, needs_weight or needs_scale, needs_bias)
        grad_x, grad_made, grad_bias = op.backward(grad, x, ctx.x_shape, _cast(made, grad.dtype), mask)
        grad_weight = grad_scale = None
        if grad_made is not None and twice:
            wanted = [t for t, needed in ((weight, needs_weight), (scale, needs_scale)) if needed]
            grads = torch.autograd.grad(made, wanted, grad_made.to(made.dtype), create_graph=True)
            grad_weight, grad_scale = grads[0], grads[-1]
        elif grad_made is not None:
            scratch = None if made is weight or made.dtype != widened(weight).dtype else made
            grad_weight, grad_scale = _made_backward(grad_made, weight, scale, op.weight_groups, ctx.centring, scratch)
        if grad_bias is not None:
            grad_bias = _cast(grad_bias, ctx.bias_dtype)
        grad_weight = grad_weight if needs_weight else None
        return grad_x, grad_weight, grad_bias, grad_scale if needs_scale else None, None, None


def _made_backward(
    grad: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    groups: int | None,
    centring: Centring,
    scratch: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of weight and scale from that of the made weight, which is overwritten, as is scratch."""
    rows, dims = by_output(_cast(grad, widened(weight).dtype), groups)
    if centring == "forward":
        _centre_(rows, dims)
    grad_scale = None
    if scale is not None:  # <dL/dW_made, W>: where the gradient is centred, W need not be
        room = None if scratch is None else by_output(scratch, groups)[0]
        grad_scale = _inner(rows, by_output(widened(weight), groups)[0], dims, scale, room)
        rows.mul_(_along(scale, rows, dims))
    if centring == "backward":  # after the scale's: W still has its means
        _centre_(rows, dims)
    return _cast(rows if groups is None else rows.flatten(0, 1), weight.dtype), grad_scale


def _centre_(rows: Tensor, dims: tuple[int, ...]) -> None:
    sums = rows.sum(dims, keepdim=True)
    rows.sub_(sums, alpha=sums.numel() / rows.numel())


def _inner(grad: Tensor, weight: Tensor, dims: tuple[int, ...], scale: Tensor, scratch: Tensor | None) -> Tensor:
    """The scale's gradient, one number or one per output channel."""
    if scale.numel() > 1:
        inner = torch.mul(grad, weight, out=scratch).sum(dims)  # large new tensors cost time on a CPU
    elif grad.stride() == weight.stride() and _is_dense(grad):  # as they lie: to flatten channels-last kernels copies
        inner = torch.dot(*(t.as_strided((t.numel(),), (1,)) for t in (grad, weight)))
    else:
        inner = torch.dot(grad.reshape(-1), weight.reshape(-1))
    return _cast(inner.reshape(scale.shape), scale.dtype)


def _is_dense(weight: Tensor) -> bool:
    return weight.is_contiguous() or (weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last))


def _call(x: Tensor, weight: Tensor, bias: Tensor | None, op: Op) -> Tensor:
    """Apply the map with weight and bias in the input's type."""
    return op(x, _cast(weight, x.dtype), None if bias is None else _cast(bias, x.dtype))


def _cast_input(x: Tensor, weight: Tensor) -> Tensor:
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
    """Whether an autograd function is out of place: exporting, tracing, functorch, dual numbers (it has no jvp)."""
    is_exporting = getattr(torch.compiler, "is_exporting", None)  # from torch 2.7 on
    return (
        (is_exporting is not None and is_exporting())
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
