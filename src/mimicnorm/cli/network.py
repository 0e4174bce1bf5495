"""The flags that name a network and its input, the same for every verb that takes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro


@dataclass
class Network:
    """A network by its spec, and the shape of its input."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A network of this package (resnet18, vgg16, ...), timm:NAME, torchvision:NAME, or package.module:factory."""
    batch: int = 8
    """Samples in the batch."""
    image: int | None = None
    """Height and width of the input; the model's default if not given."""
    input: Literal["imagenet", "cifar"] | None = None
    """Stem of a network of this package: imagenet (224 px), or cifar (32 px), without stride."""
    width: float | None = None
    """Multiplies the channels of a network of this package."""
    shape: tuple[int, ...] | None = None
    """The whole input shape, batch first, for inputs that are not square images."""

    def check_names(self) -> None:
        """Raise an error for a mistyped model or method before torch is imported, which takes seconds."""
        from mimicnorm.methods import method
        from mimicnorm.models.lookup import check_spec

        check_spec(self.model)
        for name in getattr(self, "methods", getattr(self, "method", "")).split(","):
            if name.strip() not in ("", "all"):
                method(name.strip())

    def build(self) -> tuple[Any, tuple[int, ...]]:
        """Return the network and the shape of an example."""
        from mimicnorm.models.lookup import find, input_shape

        model = find(self.model, input=self.input, width=self.width, image=self.image)
        return model, input_shape(model, batch=self.batch, image=self.image, shape=self.shape)
