"""Weight standardisation: any convolution or linear class, its weights brought to mean 0 and variance 1 before use.

Plain (Qiao et al. 2019) it goes with GroupNorm; scaled by gamma / sqrt(fan-in) and a learnable gain per output
channel (Brock et al. 2021) it makes normalizer-free networks. As with centring, the weight that is applied is a
function of parameters and is computed again in the backward pass rather than kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.layers.centring import Op, plain_call, widened, with_made_weight
from mimicnorm.layers.reweight import Reweighted, reweighted_class


@dataclass(frozen=True)
class Standardisation:
    """``factor * gain * (W - mean W) / sqrt(var W + eps)`` per output channel.

    Attributes:
        factor: Fixed: 1 for plain standardisation, gamma / sqrt(fan-in) for the scaled one.
        output_factor: Fixed, for weight and bias alike: the alpha of a residual branch that ends here.
        eps: Added to the variance.

    Example:
        >>> from mimicnorm.layers.centring import Matrix
        >>> Standardisation(eps=0.0)(torch.tensor([[1.0, 2.0, 3.0, 2.0]]), None, None, Matrix())
        tensor([[-1.4142,  0.0000,  1.4142,  0.0000]])
    """

    factor: float = 1.0
    output_factor: float = 1.0
    eps: float = 1e-6

    def __call__(self, weight: Tensor, gain: Tensor | None, scale: Tensor | None, op: Op) -> Tensor:
        wide = widened(weight)
        rows = wide.unflatten(0, (op.groups, -1)) if op.transposed else wide
        dims = (1, *range(3, rows.dim())) if op.transposed else tuple(range(1, rows.dim()))
        centred = rows - rows.mean(dims, keepdim=True)
        norm = torch.linalg.vector_norm(centred, dim=dims, keepdim=True)  # five times as fast as var_mean on a CPU
        variance = norm.square() * (norm.numel() / rows.numel())
        multiplier = torch.rsqrt(variance + self.eps) * (self.factor * self.output_factor)
        if gain is not None:
            multiplier = multiplier * gain.reshape(variance.shape)
        if scale is not None:
            multiplier = multiplier * scale
        standardised = centred * multiplier
        return standardised.flatten(0, 1) if op.transposed else standardised


class Standardised(Reweighted):
    """A layer whose weights are standardised per output channel before use.

    Attributes:
        weight: The parameter, as the optimizer sees it.
        gain: One learnable factor per output channel, or None.
        residual_scale: The scalar that ends a residual branch, shape (1,), or None. It multiplies the bias, too.
    """

    gain: Tensor | None
    standardisation: Standardisation = Standardisation()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register_parameter("gain", None)
        self.register_parameter("residual_scale", None)

    def apply_op(self, x: Tensor, weight: Tensor, bias: Tensor | None, op: Op) -> Tensor:
        """Apply the map with the standardised weight."""
        if bias is not None and self.residual_scale is not None:
            bias = bias * (self.residual_scale * self.standardisation.output_factor)
        make = functools.partial(self.standardisation, op=op)
        params = (weight, self.gain, self.residual_scale)
        return with_made_weight(x, bias, op, make, params, lambda x: _MadeWeight.apply(x, bias, op, make, *params))

    def effective_weight(self) -> Tensor:
        """What the layer multiplies its input with."""
        return self.standardisation(self.weight, self.gain, self.residual_scale, self.op()).to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Say that the weights are standardised, and whether a branch ends here."""
        marks = [name for name in ("gain", "residual_scale") if getattr(self, name) is not None]
        return ", ".join([super().extra_repr(), "standardised", *marks])  # pyrefly: ignore


@functools.cache
def standardised_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a convolution or linear class that standardises its weight.

    Example:
        >>> layer = standardised_class(nn.Conv2d)(3, 8, 3)
        >>> isinstance(layer, nn.Conv2d), list(layer.state_dict())
        (True, ['weight', 'bias'])
    """
    return reweighted_class(standardised_class, Standardised, base, "Standardised")


def standardise_(
    layer: nn.Module,
    standardisation: Standardisation,
    gain: Parameter | None = None,
    residual_scale: Parameter | None = None,
) -> nn.Module:
    """Let a layer standardise its weight, in place: the same object, the same parameters."""
    layer.__class__ = standardised_class(type(layer))
    layer.standardisation = standardisation  # pyrefly: ignore
    layer.register_parameter("gain", gain)
    layer.register_parameter("residual_scale", residual_scale)
    return layer


class _MadeWeight(torch.autograd.Function):
    """Makes the weight in the forward pass and again in the backward pass. Differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, op: Op, make: Callable, *params: Tensor | None) -> Tensor:
        ctx.op, ctx.make, ctx.x_shape = op, make, x.shape
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None, *params)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return plain_call(x, make(*params), bias, op)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x, *params = ctx.saved_tensors
        needs_x, needs_bias, _, _, *needs = ctx.needs_input_grad
        twice = torch.is_grad_enabled()  # create_graph: the weight is part of the graph then
        if not twice:
            params = [p if p is None else p.detach().requires_grad_(n) for p, n in zip(params, needs, strict=True)]
        with torch.enable_grad():
            weight = ctx.make(*params)
        used = (weight if twice else weight.detach()).to(grad.dtype)
        grad_x, grad_w, grad_bias = ctx.op.backward(grad, x, ctx.x_shape, used, (needs_x, any(needs), needs_bias))
        wanted = [p for p, n in zip(params, needs, strict=True) if p is not None and n]
        grads = iter(torch.autograd.grad(weight, wanted, grad_w.to(weight.dtype), create_graph=twice) if wanted else ())
        if grad_bias is not None:
            grad_bias = grad_bias.to(ctx.bias_dtype)
        return grad_x, grad_bias, None, None, *(next(grads) if n else None for n in needs)
