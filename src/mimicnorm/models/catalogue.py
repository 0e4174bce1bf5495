"""The networks of this package by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from mimicnorm.errors import MimicNormError, NameNotFoundError
from mimicnorm.models.mlp import mlp
from mimicnorm.models.parts import draw_weights
from mimicnorm.models.resnet import Basic, Bottleneck, ResNet
from mimicnorm.models.shufflenet import CHANNELS, ShuffleNetV2
from mimicnorm.models.squeezenet import SqueezeNet
from mimicnorm.models.vgg import VGG

Input = Literal["imagenet", "cifar"]
SIZES = {"imagenet": (224, 1000), "cifar": (32, 100)}

_CONVOLUTIONAL: dict[str, Callable[..., nn.Module]] = {
    "vgg11": partial(VGG, (1, 1, 2, 2, 2)),
    "vgg13": partial(VGG, (2, 2, 2, 2, 2)),
    "vgg16": partial(VGG, (2, 2, 3, 3, 3)),
    "vgg19": partial(VGG, (2, 2, 4, 4, 4)),
    "resnet10": partial(ResNet, Basic, (1, 1, 1, 1)),
    "resnet18": partial(ResNet, Basic, (2, 2, 2, 2)),
    "resnet34": partial(ResNet, Basic, (3, 4, 6, 3)),
    "resnet50": partial(ResNet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(ResNet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(ResNet, Bottleneck, (3, 8, 36, 3)),
    "squeezenet": partial(SqueezeNet, "bypass"),
    "squeezenet1_0": partial(SqueezeNet, "1_0"),
    "squeezenet1_1": partial(SqueezeNet, "1_1"),
    "shufflenetv2": partial(ShuffleNetV2, "x1_0"),
    **{f"shufflenetv2_{size}": partial(ShuffleNetV2, size) for size in CHANNELS},
}
_CONNECTED: dict[str, Callable[..., nn.Module]] = {"mlp10": partial(mlp, 10), "mlp30": partial(mlp, 30)}


def names() -> list[str]:
    """The networks that `build` knows."""
    return [*_CONVOLUTIONAL, *_CONNECTED]


def build(
    name: str,
    *,
    num_classes: int | None = None,
    input: Input = "imagenet",
    width: float = 1.0,
    in_channels: int = 3,
    image: int | None = None,
) -> nn.Module:
    """Build one of the paper's networks, with BatchNorm and random weights N(0, 2 / fan-in).

    Args:
        name: one of `names`.
        num_classes: of the classifier; 1000 for ``input="imagenet"``, 100 for ``"cifar"`` if not given.
        input: "imagenet" for large images (224 px), "cifar" for small ones (32 px): stems without stride.
        width: multiplies the channels, to multiples of 8.
        in_channels: channels of the images.
        image: their height and width, which shape the fully connected networks; 224 or 32 if not given.

    Example:
        >>> net = build("resnet18", input="cifar", width=0.25)
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 100])
    """
    if name not in names():
        raise NameNotFoundError(f"there is no network {name!r} here.", name, names())
    if input not in SIZES:
        raise MimicNormError(f"input must be 'imagenet' or 'cifar', not {input!r}")
    if not (isinstance(width, int | float) and math.isfinite(width) and width > 0):
        raise MimicNormError(f"width must be a positive number, not {width!r}")
    usual_pixels, usual_classes = SIZES[input]
    pixels = usual_pixels if image is None else image
    classes = usual_classes if num_classes is None else num_classes
    for what, given in (("num_classes", classes), ("in_channels", in_channels), ("image", pixels)):
        if not isinstance(given, int) or given < 1:
            raise MimicNormError(f"{what} must be a whole number, at least 1, not {given!r}")
    if name in _CONNECTED:
        model = _CONNECTED[name](num_classes=classes, features=in_channels * pixels**2, width=width)
    else:
        small = input == "cifar"
        model = _CONVOLUTIONAL[name](num_classes=classes, small=small, width=width, in_channels=in_channels)
    draw_weights(model)
    size = (in_channels, pixels, pixels)
    model.default_cfg = {"input_size": size}  # pyrefly: ignore  # where timm's models say it, too
    return model
