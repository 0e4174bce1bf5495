"""Weight-mean layers: any convolution or linear class, centred in every forward.

``weight_mean_class(nn.Conv2d)`` is a subclass of ``nn.Conv2d`` with the same parameters under
the same names, plus an optional scalar ``residual_scale`` of shape (1,). Centring happens in
every forward and is never cached: optimizers and sharding change weights without a trace.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.layers.centring import Op, effective_weight, weight_mean
from mimicnorm.layers.reweight import Reweighted, reweighted_class


class WeightMean(Reweighted):
    """A layer whose weights are centred per output channel before use (Section "Weight Mean Operation").

    Attributes:
        weight: The parameter, as the optimizer sees it: not centred.
        residual_scale: The scalar that ends a residual branch, shape (1,), or None.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register_parameter("residual_scale", None)

    def apply_op(self, x: Tensor, weight: Tensor, bias: Tensor | None, op: Op) -> Tensor:
        """Apply the map with the centred, scaled weight."""
        return weight_mean(x, weight, bias, self.residual_scale, op)

    def effective_weight(self) -> Tensor:
        """What the layer multiplies its input with: ``residual_scale * centre(weight)``."""
        return effective_weight(self.weight, self.residual_scale, self.op()).to(self.weight.dtype)

    def extra_repr(self) -> str:
        """Say that the weights are centred, and whether a branch ends here."""
        base = super().extra_repr()  # pyrefly: ignore
        return f"{base}, weight_mean" + (", residual_scale" if self.residual_scale is not None else "")


@functools.cache
def weight_mean_class(base: type[nn.Module]) -> type[nn.Module]:
    """The weight-mean subclass of a convolution or linear class.

    Example:
        >>> layer = weight_mean_class(nn.Linear)(3, 2)
        >>> isinstance(layer, nn.Linear), list(layer.state_dict())
        (True, ['weight', 'bias'])
    """
    return reweighted_class(weight_mean_class, WeightMean, base, "WeightMean")


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
