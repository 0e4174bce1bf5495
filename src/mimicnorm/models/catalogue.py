"""The networks of this package by name. torch is imported when one is built, not for its name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Literal

from mimicnorm.arguments import finite, positive_int
from mimicnorm.errors import MimicNormError, NameNotFoundError

if TYPE_CHECKING:
    from torch import nn

Input = Literal["imagenet", "cifar"]
SIZES = {"imagenet": (224, 1000), "cifar": (32, 100)}  # pixels and classes, if not given

# The module and the name of the network, and what tells it from the others of its family.
_NETWORKS: dict[str, tuple[Any, ...]] = {
    "vgg11": ("vgg", "VGG", (1, 1, 2, 2, 2)),
    "vgg13": ("vgg", "VGG", (2, 2, 2, 2, 2)),
    "vgg16": ("vgg", "VGG", (2, 2, 3, 3, 3)),
    "vgg19": ("vgg", "VGG", (2, 2, 4, 4, 4)),
    "resnet10": ("resnet", "ResNet", "basic", (1, 1, 1, 1)),
    "resnet18": ("resnet", "ResNet", "basic", (2, 2, 2, 2)),
    "resnet34": ("resnet", "ResNet", "basic", (3, 4, 6, 3)),
    "resnet50": ("resnet", "ResNet", "bottleneck", (3, 4, 6, 3)),
    "resnet101": ("resnet", "ResNet", "bottleneck", (3, 4, 23, 3)),
    "resnet152": ("resnet", "ResNet", "bottleneck", (3, 8, 36, 3)),
    "squeezenet": ("squeezenet", "SqueezeNet", "bypass"),
    "squeezenet1_0": ("squeezenet", "SqueezeNet", "1_0"),
    "squeezenet1_1": ("squeezenet", "SqueezeNet", "1_1"),
    "shufflenetv2": ("shufflenet", "ShuffleNetV2", "x1_0"),
    "shufflenetv2_x0_5": ("shufflenet", "ShuffleNetV2", "x0_5"),
    "shufflenetv2_x1_0": ("shufflenet", "ShuffleNetV2", "x1_0"),
    "shufflenetv2_x1_5": ("shufflenet", "ShuffleNetV2", "x1_5"),
    "shufflenetv2_x2_0": ("shufflenet", "ShuffleNetV2", "x2_0"),
    "mlp10": ("mlp", "mlp", 10),
    "mlp30": ("mlp", "mlp", 30),
}


def names() -> list[str]:
    """Return the networks that `build` knows."""
    return [*_NETWORKS]


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
    if name not in _NETWORKS:
        raise NameNotFoundError(f"there is no network {name!r} here.", name, names())
    if input not in SIZES:
        raise MimicNormError(f"input must be 'imagenet' or 'cifar', not {input!r}")
    usual_pixels, usual_classes = SIZES[input]
    finite(width, "width", above=0)
    pixels = positive_int(usual_pixels if image is None else image, "image")
    classes = positive_int(usual_classes if num_classes is None else num_classes, "num_classes")
    in_channels = positive_int(in_channels, "in_channels")
    from mimicnorm.models.parts import draw_weights

    family, attribute, *variant = _NETWORKS[name]
    network = getattr(importlib.import_module(f"mimicnorm.models.{family}"), attribute)
    inputs: dict[str, Any] = {"in_channels": in_channels, "small": input == "cifar"}
    if family == "mlp":
        inputs = {"features": in_channels * pixels**2}
    model = network(*variant, num_classes=classes, width=width, **inputs)
    draw_weights(model)
    model.default_cfg = {"input_size": (in_channels, pixels, pixels)}  # where timm's models have it, too
    return model
