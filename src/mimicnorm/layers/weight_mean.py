"""Weight mean, the paper's first operation: centre the weights of each output channel, in one of two places.

``centring="forward"``: the layer applies ``W - mean W``, made in every forward. Right for every optimizer.
``centring="backward"``: W itself is centred once, the layer applies it as it is, and each gradient of W is centred
(the paper's Appendix C). Under SGD with momentum and weight decay W stays centred, so both take the same steps; the
second costs next to nothing. Adam, value clipping and added noise move the means: call ``project_`` after each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.errors import MimicNormError
from mimicnorm.layers.derive import derive_, derived_class
from mimicnorm.layers.reweight import Reweighted
from mimicnorm.layers.weight import Centring, by_output, centre_rows, wants_plain_expression, widened

OFF_CENTRE = 1e-3
"""Rows up to this far off centre (see ``off_centre``) count as centred: rounding moves them by 1e-5 in a long run."""

LARGE = 2**18
"""The autograd function centres gradients of more elements than this. It owns them and writes in place, where a hook
has to make a new tensor; with fewer elements, a hook takes less time than the function."""


class GradientCentred(Reweighted):
    """A layer that may apply W as it is and have its gradient centred, by a hook if W is small."""

    def own_weight(self) -> Tensor | None:
        """Return W if it is applied as it is; then a hook on it centres its gradient."""
        if self.centring == "forward" or self.residual_scale is not None:
            return None
        weight = self.weight
        differentiated = torch.is_grad_enabled() or torch.jit.is_tracing()  # a trace is checked without gradients
        if self.centring == "backward" and weight.requires_grad and differentiated:
            # A computed weight (parametrization, functional_call) may be another tensor at the next access.
            if weight.numel() > LARGE or not weight.is_leaf:
                return None
            if torch.compiler.is_compiling() or wants_plain_expression():
                return None
            _centre_gradient_of(weight, self.weight_groups)
        return weight


class WeightMean(GradientCentred):
    """A layer whose weights are centred per output channel (Section "Weight Mean Operation").

    Attributes:
        centring: "forward" or "backward": see above.
    """

    centring = "forward"

    @property
    def weight_label(self) -> str:  # pyrefly: ignore[bad-override]
        """What the layer's repr says."""
        return "weight_mean" if self.centring == "forward" else "weight_mean (backward)"

    @torch.no_grad()
    def project_(self) -> None:
        """Centre the weight itself, in place."""
        self.weight.copy_(centre_rows(self.weight, self.weight_groups))

    def off_centre(self) -> float:
        """Return how far the weight is off centre: the largest cosine between a row and the constant row."""
        rows, dims = by_output(widened(self.weight.detach()), self.weight_groups)
        lengths = torch.linalg.vector_norm(rows, dim=dims) * (rows.numel() / rows.sum(dims).numel()) ** 0.5
        cosines = rows.sum(dims).abs() / lengths
        return float(cosines.nan_to_num(0.0).max()) if cosines.numel() and not cosines.is_meta else 0.0

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict, *args: Any) -> None:
        """Load, and centre a weight that was trained with ``centring="forward"``, whose means are not 0."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # pyrefly: ignore
        # Centring a weight that is centred up to rounding would move it by rounding: a resumed run would differ.
        if self.centring == "backward" and self.off_centre() > OFF_CENTRE:
            if local_metadata.get("assign_to_params_buffers", False):  # the tensor is the caller's
                self.weight.data = self.weight.detach().clone()
            self.project_()


class _GradientCentring:
    """A hook on a weight. Out of place, so ``autograd.grad`` and second derivatives see it, too."""

    def __init__(self, groups: int | None):
        self.groups = groups

    def __call__(self, grad: Tensor) -> Tensor:
        return centre_rows(grad, self.groups)


def _centre_gradient_of(weight: Tensor, groups: int | None) -> None:
    """Hang the hook on a weight that does not have it; copies, pickles and assigned weights come without hooks."""
    hooks = weight._backward_hooks
    if not hooks or not any(type(hook) is _GradientCentring for hook in hooks.values()):
        weight.register_hook(_GradientCentring(groups))


def project_(model: nn.Module) -> None:
    """Centre the weights of every weight-mean layer, in place.

    Needed after each step for layers converted with ``centre="backward"`` under an optimizer that moves row means
    (Adam, value clipping, added noise) or with weights in half precision. By hand, or once and for all:
    ``optimizer.register_step_post_hook(lambda *_: mn.project_(model))``.

    Example:
        >>> layer = centre_(nn.Linear(4, 2), centring="backward")
        >>> project_(layer)
        >>> layer.off_centre() < 1e-6
        True
    """
    layers = [m for m in model.modules() if isinstance(m, WeightMean)]
    if not layers:
        raise MimicNormError(
            f"{type(model).__name__} has no weight-mean layer: convert it with MimicNorm first. (Weights of a trained "
            'network that was converted with init="keep" have means of their own, which stay.)'
        )
    for layer in layers:
        layer.project_()


def weight_mean_class(base: type[nn.Module]) -> type[nn.Module]:
    """The weight-mean subclass of a convolution or linear class.

    Example:
        >>> layer = weight_mean_class(nn.Linear)(3, 2)
        >>> isinstance(layer, nn.Linear), list(layer.state_dict())
        (True, ['weight', 'bias'])
    """
    return derived_class(WeightMean, base)


def centre_(layer: nn.Module, residual_scale: Parameter | None = None, centring: Centring = "forward") -> nn.Module:
    """Turn a layer into its weight-mean version, in place: the same object, the same parameters.

    No value changes: with ``centring="backward"``, call ``project_`` next.
    """
    derive_(layer, WeightMean, residual_scale=residual_scale)
    layer.centring = centring  # pyrefly: ignore
    return layer


WeightMeanConv1d = weight_mean_class(nn.Conv1d)
WeightMeanConv2d = weight_mean_class(nn.Conv2d)
WeightMeanConv3d = weight_mean_class(nn.Conv3d)
WeightMeanConvTranspose1d = weight_mean_class(nn.ConvTranspose1d)
WeightMeanConvTranspose2d = weight_mean_class(nn.ConvTranspose2d)
WeightMeanConvTranspose3d = weight_mean_class(nn.ConvTranspose3d)
WeightMeanLinear = weight_mean_class(nn.Linear)
