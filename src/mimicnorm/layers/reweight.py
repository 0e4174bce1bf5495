"""Layers that apply another weight than the one they hold: scaled, standardised; centred ones are in ``weight_mean``.

``standardised_class(nn.Conv2d)`` is a subclass of ``nn.Conv2d`` with the same parameters under the same names. Whatever
the class of a convolution or linear layer, its forward is brought to one method, ``reweighted(call)``. The weight is
made in every forward and never cached: optimizers and sharding change weights without a trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from mimicnorm.layers.derive import Derived, derive_, derived_class
from mimicnorm.layers.linear import (
    CONVOLUTIONS,
    LINEAR_CALLS,
    TRANSPOSED,
    Convolution,
    LinearCall,
    conv_call,
    conv_transpose_call,
    has_own_forward,
    linear_call,
    plain_kind,
)
from mimicnorm.layers.weight import Centring, apply_map, effective_weight, inverse_deviation

# -- the way of any forward to a made weight ---------------------------------------------------------------------


class Reweighted(Derived):
    """A layer whose weight is changed before use.

    Attributes:
        weight: The parameter, as the optimizer sees it.
        residual_scale: The scalar that ends a residual branch, shape (1,), or None.
        centring: What is centred per output channel: "forward" the weight, "backward" its gradient, None neither.
        added_parameters: The names of those that the layer has beside its base's.
        scales_output: Whether the scalar multiplies the output of a foreign forward, not its weight.
        weight_label: What the layer's repr says.
    """

    weight: Tensor
    bias: Tensor | None
    residual_scale: Tensor | None
    centring: Centring = None
    added_parameters: tuple[str, ...] = ("residual_scale",)
    scales_output = False
    weight_label: str

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name in self.added_parameters:
            self.register_parameter(name, None)  # pyrefly: ignore

    @classmethod
    def bases(cls, base: type[nn.Module]) -> tuple[type, ...]:
        """Put the forward that suits the base between mixin and base."""
        kind = plain_kind(base)
        if kind is None and base.__module__.startswith("torch.nn."):
            raise TypeError(f"{base.__qualname__} is not a convolution or linear class")
        if has_own_forward(base):
            return cls, _Routed, base
        return cls, _Conv if kind in CONVOLUTIONS else _ConvTranspose if kind in TRANSPOSED else _Linear, base

    def own_weight(self) -> Tensor | None:
        """Return the weight with which the forward of the layer's own class is right this time, or None."""
        return None

    def reweighted(self, call: LinearCall) -> Tensor:
        """Carry out a call with the changed weight; like ``nn.Conv*``, with or without a batch dimension."""
        x = F.pad(call.input, call.uneven) if call.uneven else call.input
        unbatched = isinstance(call.op, Convolution) and x.dim() == call.weight.dim() - 1
        x = x.unsqueeze(0) if unbatched else x
        scale, bias = self.scale_and_bias(call.weight, call.bias, call.op.weight_groups)
        y = apply_map(x, call.weight, bias, call.op, scale, self.centring)
        return y.squeeze(0) if unbatched else y

    def weight_scale(self, weight: Tensor, groups: int | None) -> Tensor | None:
        """What multiplies the weight: one number, or one per output channel; ``groups`` as in ``weight.by_output``."""
        del weight, groups
        return self.residual_scale

    def bias_scale(self) -> Tensor | None:
        """What multiplies the bias."""
        return None

    def scale_and_bias(
        self, weight: Tensor, bias: Tensor | None, groups: int | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """What multiplies the weight and what is added to the output, given the layer's weight and bias."""
        factor = self.bias_scale()
        bias = bias if bias is None or factor is None else bias * factor
        return self.weight_scale(weight, groups), bias

    def without_call(self, output: Any) -> Any:
        """Change the output of a forward in which no linear call took the weight itself."""
        return output

    def effective_weight(self) -> Tensor:
        """What the layer multiplies its input with."""
        weight, groups = self.weight, self.weight_groups
        scale, _ = self.scale_and_bias(weight, self.bias, groups)
        return effective_weight(weight, scale, groups, self.centring).to(weight.dtype)

    def effective_bias(self) -> Tensor | None:
        """What the layer adds to its output, or None."""
        _, bias = self.scale_and_bias(self.weight, self.bias, self.weight_groups)
        return None if bias is None else bias.to(self.weight.dtype)

    @property
    def weight_groups(self) -> Any:
        """See ``weight.by_output``."""
        return self.groups if getattr(self, "transposed", False) else None  # pyrefly: ignore

    def extra_repr(self) -> str:
        """Say what becomes of the weight, and which parameters that adds."""
        marks = [name for name in self.added_parameters if getattr(self, name) is not None]
        return ", ".join([super().extra_repr(), self.weight_label, *marks])  # pyrefly: ignore


class _Conv(Reweighted):
    padding: Any
    padding_mode: str
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    _reversed_padding_repeated_twice: list[int]

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        own = self.own_weight()
        if own is not None:
            return super()._conv_forward(input, own, bias)  # pyrefly: ignore
        padding = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0
        return self.reweighted(conv_call(input, weight, bias, self.stride, padding, self.dilation, self.groups))


class _ConvTranspose(_Conv):
    kernel_size: Any
    _output_padding: Any

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.own_weight() is self.weight:
            return super().forward(input, output_size)  # pyrefly: ignore
        if self.padding_mode != "zeros":
            raise ValueError(f"{type(self).__name__}: only zero padding is supported by transposed convolutions")
        shape = (self.stride, self.padding, self.kernel_size, len(self.stride), self.dilation)
        out = self._output_padding(input, output_size, *shape)
        layer = (self.weight, self.bias, self.stride, self.padding, out, self.groups, self.dilation)
        return self.reweighted(conv_transpose_call(input, *layer))


class _Linear(Reweighted):
    def forward(self, input: Tensor) -> Tensor:
        own = self.own_weight()
        if own is not None:
            return F.linear(input, own, self.bias)
        return self.reweighted(linear_call(input, self.weight, self.bias))


class _Routed(Reweighted):
    """For a class with a ``forward`` of its own: the call that takes ``self.weight`` is routed."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.own_weight() is self.weight:
            return super().forward(*args, **kwargs)  # pyrefly: ignore
        if self.scales_output:
            return self.without_call(super().forward(*args, **kwargs))  # pyrefly: ignore
        if parametrize.is_parametrized(self, "weight"):  # pyrefly: ignore
            with parametrize.cached():  # or the weight is another object at each access, and no call takes it
                return self._routed(*args, **kwargs)
        return self._routed(*args, **kwargs)

    def _routed(self, *args: Any, **kwargs: Any) -> Any:
        calls: list[LinearCall] = []
        with _Router(self, calls):
            output = super().forward(*args, **kwargs)  # pyrefly: ignore
        return output if calls else self.without_call(output)


class _Router(TorchFunctionMode):
    """Sends a linear operation on the layer's weight through the layer's ``reweighted``."""

    def __init__(self, layer: Reweighted, calls: list[LinearCall]):
        super().__init__()
        self.layer, self.calls = layer, calls

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        parse = LINEAR_CALLS.get(func)
        call = None if parse is None else parse(*args, **kwargs)
        if call is None or call.weight is not self.layer.weight:
            return func(*args, **kwargs)
        self.calls.append(call)
        return self.layer.reweighted(call)


# -- the layers --------------------------------------------------------------------------------------------------


class ScaledWeight(Reweighted):
    """A layer that ends a residual branch but is not centred: ``s * (W x) + b``.

    The scalar multiplies the weight: if it multiplied the output, the output would be saved for backward. Only where a
    foreign forward computes another weight from its own (a mask, a mirrored kernel), it multiplies the output.

    Attributes:
        scales_bias: Whether it is ``s * (W x + b)``.
    """

    weight_label = "scaled"
    scales_bias = False

    def bias_scale(self) -> Tensor | None:
        """The scalar, if it multiplies the bias, too."""
        return self.residual_scale if self.scales_bias else None

    def without_call(self, output: Any) -> Any:
        """Multiply the output."""
        return output if self.residual_scale is None else output * self.residual_scale.to(output.dtype)


def scale_weight_(
    layer: nn.Module, residual_scale: Parameter, scales_bias: bool = False, scales_output: bool = False
) -> nn.Module:
    """Let a layer multiply its weight by a scalar, in place: the same object, the same parameters."""
    derive_(layer, ScaledWeight, residual_scale=residual_scale)
    layer.scales_bias, layer.scales_output = scales_bias, scales_output  # pyrefly: ignore
    return layer


class FixupLayer(ScaledWeight):
    """A layer with a scalar bias before it, and a multiplier where it ends a branch by itself: ``s * (W (x + a) + b)``.

    Zhang, Dauphin and Ma (2019), rule 3: where BatchNorm has a beta per channel, Fixup has scalars.

    Attributes:
        input_bias: Added to the input, shape (1,); None for a layer that reads the network's input.
    """

    input_bias: Tensor | None
    added_parameters = ("input_bias", "residual_scale")
    weight_label = "fixup"
    scales_bias = True

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Add the bias, then run the layer."""
        if self.input_bias is not None:
            input = input + self.input_bias.to(input.dtype)
        return super().forward(input, *args, **kwargs)  # pyrefly: ignore


def fixup_(
    layer: nn.Module,
    input_bias: Parameter | None,
    residual_scale: Parameter | None = None,
    scales_output: bool = False,
) -> nn.Module:
    """Give a layer Fixup's scalars, in place: the same object, the same parameters."""
    derive_(layer, FixupLayer, input_bias=input_bias, residual_scale=residual_scale)
    layer.scales_output = scales_output  # pyrefly: ignore
    return layer


@dataclass(frozen=True, eq=False)
class Standardisation:
    """``factor * output_factor * gain * (W - mean W) / sqrt(var W + eps)`` per output channel.

    Attributes:
        factor: Fixed: 1 for plain standardisation (Qiao et al. 2019), gamma / sqrt(fan-in) for the scaled one (Brock et
            al. 2021).
        output_factor: Fixed, for weight and bias alike: the alpha of a residual branch that ends here.
        eps: Added to the variance.
    """

    factor: float = 1.0
    output_factor: float = 1.0
    eps: float = 1e-6


class Standardised(Reweighted):
    """A layer whose weights are standardised per output channel before use.

    Attributes:
        standardisation: Its constants.
        gain: One learnable factor per output channel, or None.
        residual_scale: The scalar that ends a residual branch, shape (1,), or None. It multiplies the bias, too.
    """

    gain: Tensor | None
    standardisation = Standardisation()
    centring = "forward"
    added_parameters = ("gain", "residual_scale")
    weight_label = "standardised"

    def weight_scale(self, weight: Tensor, groups: int | None) -> Tensor:
        """Divide by the standard deviation, multiply by all factors."""
        constants = self.standardisation
        scale = inverse_deviation(weight, constants.eps, groups) * (constants.factor * constants.output_factor)
        for learnt in (self.gain, self.residual_scale):
            scale = scale if learnt is None else scale * learnt
        return scale

    def bias_scale(self) -> Tensor | None:
        """The scalar and the fixed factor of a branch that ends here."""
        return None if self.residual_scale is None else self.residual_scale * self.standardisation.output_factor


def standardised_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a convolution or linear class that standardises its weight.

    Example:
        >>> layer = standardised_class(nn.Conv2d)(3, 8, 3)
        >>> isinstance(layer, nn.Conv2d), list(layer.state_dict())
        (True, ['weight', 'bias'])
    """
    return derived_class(Standardised, base)


def standardise_(
    layer: nn.Module,
    standardisation: Standardisation,
    gain: Parameter | None = None,
    residual_scale: Parameter | None = None,
) -> nn.Module:
    """Let a layer standardise its weight, in place: the same object, the same parameters."""
    derive_(layer, Standardised, gain=gain, residual_scale=residual_scale)
    layer.standardisation = standardisation  # pyrefly: ignore
    return layer
