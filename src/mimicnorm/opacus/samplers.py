"""Per-sample gradients of converted layers, for Opacus.

Opacus looks samplers up by exact class. It knows none of the classes that a conversion makes, and runs each such layer
again under ``vmap``: right, but slow, and an error where Poisson sampling draws no sample. Here are samplers for them.

A layer applies ``s (W - mean W)``. Opacus' sampler of the plain layer gives each sample's gradient G of that weight.
Centring is self-adjoint, so the gradient of W is ``s (G - mean G)``, and that of s is ``<G - mean G, W>``.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import MimicNormError
from mimicnorm.layers import Scale, ScaledWeight, Shift, WeightMean
from mimicnorm.layers.linear import CONVOLUTIONS, has_own_forward, plain_kind

Samples = dict[Tensor, Tensor]
KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose weights have their output channels first; a transposed convolution stays with ``vmap``."""


def prepare_(model: nn.Module) -> None:
    """Make a converted network ready for ``opacus.PrivacyEngine.make_private``, in place.

    Registers a sampler for each class of converted layers in it, and turns in-place activations off: the backward hooks
    of Opacus do not allow them. Classes with a forward of their own stay with Opacus' ``vmap``.

    Noise moves the row means of weights. Only ``centre="forward"`` (the default) takes no notice of that; with
    ``"backward"`` call ``mimicnorm.project_`` after each step, which costs no privacy.

    Raises:
        MimicNormError: A norm that sees the whole batch is left, or a layer for which Opacus' sampler is wrong.
    """
    from opacus.grad_sample import GradSampleModule, register_grad_sampler

    for name, module in model.named_modules():
        _refuse(name, module)
    register_grad_sampler(Shift)(_shift)
    register_grad_sampler(Scale)(_scale)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # pyrefly: ignore
        made = vars(type(module))  # not inherited: a subclass of a converted class may have another forward
        kind = plain_kind(type(module))
        known = kind in KINDS and kind in GradSampleModule.GRAD_SAMPLERS
        if known and made.get("mixin") in (WeightMean, ScaledWeight) and not has_own_forward(made["base"]):
            register_grad_sampler(type(module))(_layer)


def _refuse(name: str, module: Any) -> None:
    if isinstance(module, _BatchNorm) and module.training:
        raise MimicNormError(
            f"{name}: normalises over the batch, so no sample has a gradient of its own. Convert the whole network "
            "with MimicNorm(last_norm=False)"
        )
    if type(module) in CONVOLUTIONS and module.padding_mode != "zeros" and module.weight.requires_grad:
        raise MimicNormError(
            f"{name}: Opacus computes its gradients as if padded with zeros, not {module.padding_mode!r}. Pad by a "
            "module before it"
        )


def _layer(layer: Any, inputs: list[Tensor], grads: Tensor) -> Samples:
    """A centred or scaled layer."""
    from opacus.grad_sample import GradSampleModule

    plain, x = _plain(layer, inputs[0])
    sampled = GradSampleModule.GRAD_SAMPLERS[type(plain)](plain, [x], grads)
    weight, bias, scale = layer.weight.detach(), layer.bias, layer.residual_scale
    made = sampled[plain.weight].flatten(2)  # (sample, output, input): gradients of the weight that was applied
    samples = {}
    if layer.centring == "forward":
        made -= made.mean(2, keepdim=True)
    if scale is not None:
        samples[scale] = (made.flatten(1) @ weight.flatten().to(made.dtype)).unsqueeze(1)
        made *= scale.detach()
    if layer.centring == "backward":  # after the scalar's: W may have means
        made -= made.mean(2, keepdim=True)
    samples[layer.weight] = made.reshape(-1, *weight.shape)
    if bias is not None:
        samples[bias] = sampled[plain.bias]
        factor = layer.bias_scale()
        if factor is not None:
            samples[scale] += (samples[bias] @ bias.detach().to(made.dtype)).unsqueeze(1)
            samples[bias] = samples[bias] * factor.detach()
    return samples


def _plain(layer: Any, x: Tensor) -> tuple[Any, Tensor]:
    """The layer as PyTorch's class that it is derived from, and its input, padded where zeros are not the padding."""
    kind: Any = plain_kind(type(layer))
    plain = kind.__new__(kind)
    plain.__dict__.update(layer.__dict__)
    leaves = {name: getattr(layer, name) for name in ("weight", "bias")}
    plain._parameters = {n: None if p is None else nn.Parameter(p.detach()) for n, p in leaves.items()}
    if kind in CONVOLUTIONS and layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        plain.padding = (0,) * len(layer.stride)
    return plain, x


def _shift(layer: Shift, inputs: list[Tensor], grads: Tensor) -> Samples:
    del inputs
    return {} if layer.bias is None else {layer.bias: _by_channel(grads, layer.channel_dim)}


def _scale(layer: Scale, inputs: list[Tensor], grads: Tensor) -> Samples:
    inner = (inputs[0].to(grads.dtype) * grads).flatten(1).sum(1, keepdim=True)
    samples: Samples = {layer.residual_scale: inner * layer.factor}
    if layer.bias is not None:
        samples[layer.bias] = _by_channel(grads, layer.channel_dim)
    return samples


def _by_channel(grads: Tensor, channel_dim: int) -> Tensor:
    return grads.movedim(channel_dim, 1).flatten(2).sum(2) if grads.dim() > 2 else grads
