"""The networks of ``keep.py``: a narrow ResNet-18 and what else could be done with it once it is trained.

Each is a factory of the keywords num_classes and in_channels, as ``mimicnorm train --model`` takes them. All load the
same checkpoint, but for ``folded``, which loads ``fold_state`` of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimicnorm import models
from mimicnorm.layers import group_count
from mimicnorm.surgery.recorder import is_batch_norm


def batchnorm(num_classes: int = 50, in_channels: int = 3) -> nn.Module:
    """ResNet-18 for CIFAR at a quarter of its width; the classifier starts as PyTorch draws it."""
    model = models.find(
        "resnet18", num_classes=num_classes, in_channels=in_channels, width=0.25, input="cifar", image=32
    )
    model.fc.reset_parameters()  # pyrefly: ignore
    return model


class FrozenNorm(nn.BatchNorm2d):
    """A BatchNorm in evaluation mode for good; gamma and beta train."""

    def forward(self, input: Tensor) -> Tensor:
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def frozen(num_classes: int = 50, in_channels: int = 3) -> nn.Module:
    return freeze(batchnorm(num_classes, in_channels))


def freeze(model: nn.Module) -> nn.Module:
    for m in model.modules():
        if type(m) is nn.BatchNorm2d:
            m.__class__ = FrozenNorm
    return model


class GroupNorm(nn.GroupNorm):
    """A GroupNorm with the affine map of a BatchNorm; statistics in a checkpoint are loaded and not used."""

    def __init__(self, norm: nn.BatchNorm2d):
        channels = norm.num_features
        super().__init__(group_count(channels, 16, 32), channels)
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)


def groupnorm(num_classes: int = 50, in_channels: int = 3) -> nn.Module:
    model = batchnorm(num_classes, in_channels)
    for name, m in list(model.named_modules()):
        if isinstance(m, nn.BatchNorm2d):
            model.set_submodule(name, GroupNorm(m))
    return model


def folded(num_classes: int = 50, in_channels: int = 3) -> nn.Module:
    """Convolutions with biases and no BatchNorm: folded weights, trained directly."""
    model = batchnorm(num_classes, in_channels)
    for conv, norm in pairs(model):
        layer: Any = model.get_submodule(conv)
        layer.bias = nn.Parameter(torch.zeros(layer.out_channels))
        model.set_submodule(norm, nn.Identity())
    return model


def fold_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint for ``folded``: every BatchNorm in the weight and bias before it."""
    out = dict(state)
    for conv, norm in pairs(batchnorm()):
        gamma, beta, mean, var = (out.pop(f"{norm}.{k}") for k in ("weight", "bias", "running_mean", "running_var"))
        del out[f"{norm}.num_batches_tracked"]
        scale = gamma * torch.rsqrt(var + 1e-5)
        out[f"{conv}.weight"] = out[f"{conv}.weight"] * scale[:, None, None, None]
        out[f"{conv}.bias"] = beta - mean * scale
    return out


def pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return each convolution with the BatchNorm after it: in this network they are defined in turn."""
    convs = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    norms = [name for name, m in model.named_modules() if is_batch_norm(m)]
    assert len(convs) == len(norms)
    return list(zip(convs, norms, strict=True))
