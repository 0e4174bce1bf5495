"""Converted networks that take a moment to train, and data for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm import models
from mimicnorm.integer import Trainer
from mimicnorm.models.squeezenet import Fire

NETWORKS = ("mlp10", "vgg11", "resnet10", "squeezenet", "squeezenet1_1")


def network(name: str, method: mn.Method | None = None, pixels: int = 8) -> nn.Module:
    torch.manual_seed(0)
    model = models.build(name, input="cifar", width=0.125, image=pixels, num_classes=10)
    mn.convert_(model, method or mn.MimicNorm(min_fan_in=12), example=(2, 3, pixels, pixels))
    return model


def fires() -> nn.Module:
    """A concat and a bypass, and few layers: rounding has not added up yet."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(Fire(16, 16, 16, False), nn.MaxPool2d(2), Fire(32, 16, 16, True), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )
    mn.convert_(model, mn.MimicNorm(min_fan_in=12), example=(2, 3, 8, 8))
    return model


def batch(samples: int = 20, pixels: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (samples,), generator=generator)
    return torch.randn(samples, 3, pixels, pixels, generator=generator), labels


def gradients(trainer: Trainer, samples: int) -> dict[str, Tensor]:
    """The gradients of the last step's mean loss, in floating point and in the shapes of the model's parameters."""
    pairs = [pair for product in trainer.network.products for pair in product.gradients()]
    head = trainer.network.head
    pairs += [(head.scale, head.scale_grad)] if head.scale is not None else []
    values = {p.name: data.double() * 2.0**exponent / samples for p, (data, exponent) in pairs}
    return {name: value.permute(0, 3, 1, 2) if value.dim() == 4 else value for name, value in values.items()}


def dry(model: nn.Module) -> nn.Module:
    """Switch dropout off."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model
