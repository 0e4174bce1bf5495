"""Recipes: everything that decides a run's result, as plain data; one function per group of rows in the paper.

A recipe and a seed give the same weights bit for bit on the same machine and number of threads. What does not
change the result (where data lies, how often to save, what to print) is an argument of ``train`` instead.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from mimicnorm.errors import NameNotFoundError, RecipeError

INITS = ("auto", "theory", "calibrate", "none")
"""How starting weights are called on the command line."""
_WORDS = {
    "init": INITS,
    "precision": ("fp32", "bf16", "fp16"),
    "augment": ("standard", "light", "none"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result of a training run.

    Example:
        >>> recipe("cifar100-resnet18").lr
        0.1
    """

    model: str
    """A network of mimicnorm.models, timm:NAME, torchvision:NAME, or package.module:factory, a function of the keywords
    num_classes and in_channels."""
    data: str
    """digits, mnist, cifar10, cifar100, imagenet, or folder:PATH (folders train and val of class folders)."""
    method: str = "mimicnorm"
    """What to do with BatchNorm: mimicnorm, weight-mean, last-bn, nonorm, batchnorm, ..."""
    settings: tuple[str, ...] = ()
    """Settings of the method as NAME=VALUE, such as residual=linear min_fan_in=50."""
    init: str = "auto"
    """Starting weights of converted layers: auto, theory, calibrate, or none (as the network's maker drew them)."""
    width: float = 1.0
    """Multiplies the network's channels. Below 1, min_fan_in (of methods that centre weights, unless in settings) is
    multiplied, too: layers that are centred at full width stay so."""
    classifier_variance: float = 2.0
    """The classifier (the layer that makes the logits) starts as N(0, this / fan-in): 2 in the authors' code, 1/3 in
    PyTorch's own layers. Behind a last BN that scale only decides how fast it learns. Networks of other packages
    keep what their makers drew."""
    limit: int = 0
    """Train on this many images, a fixed subset; 0 is all."""
    test_limit: int = 0
    """Test on this many images; 0 is all."""
    augment: Literal["standard", "light", "none"] = "standard"
    """Augmentation of the training images."""
    batch: int = 256
    """Images per step, over all processes; the rest of an epoch that fills no batch is left out."""
    micro_batch: int = 0
    """Images to run at once (exact: see mimicnorm.microbatch); 0 is the whole batch."""
    epochs: int = 150
    """Passes over the training images."""
    lr: float = 0.1
    """Learning rate of SGD after the warm-up."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 5e-4
    """Weight decay of SGD."""
    decay_scalars: bool = True
    """Decay biases, residual scalars and BatchNorm's affine parameters, too, as the paper's authors do."""
    scalar_rate: float | None = None
    """Multiplies the learning rate of parameters that are single numbers; None is as the method's authors do: 0.1 for
    Fixup, 1 for the others."""
    warmup_epochs: float = 2.0
    """Epochs in which the learning rate rises linearly from 0."""
    milestones: tuple[int, ...] = (80, 110, 135)
    """Epochs at which the learning rate is multiplied by gamma."""
    gamma: float = 0.1
    """What the learning rate is multiplied by."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 run under autocast; fp16 with a gradient scaler."""
    channels_last: bool = True
    """Keep images and weights channels last in memory (but for very narrow networks on a CPU, where it crashes)."""
    compile: bool = False
    """Compile the network with torch.compile."""
    seed: int = 0
    """Decides the starting weights, the order of the images, their augmentation and dropout."""
    log_every: int = 20
    """Steps between two lines of training loss in metrics.jsonl."""

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        positive = ("lr", "width", "gamma", "scalar_rate", "classifier_variance")
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, bool) != (field.type == "bool"):  # "no" would pass as true, True as 1
                kind = "True or False" if field.type == "bool" else f"a value of type {field.type}"
                raise RecipeError(f"{name}={value!r}: it must be {kind}")
            if field.type in ("int", "float", "float | None") and value is not None:
                whole = field.type == "int"
                if not isinstance(value, int if whole else int | float):
                    raise RecipeError(f"{name}={value!r}: it must be a {'whole ' if whole else ''}number")
                least = 1 if name in ("batch", "epochs", "log_every") else 0
                most = 2**63 if whole else math.inf  # a seed has 64 bits
                if not least <= value < most or (name in positive and value == 0):
                    bound = "above 0" if name in positive else f"at least {least}"
                    top = "below 2^63" if whole else "finite"
                    raise RecipeError(f"{name}={value}: it must be {bound} and {top}")
        if self.momentum >= 1:
            raise RecipeError(f"momentum={self.momentum}: it must be below 1, or no gradient is ever forgotten")
        if any(epoch < 0 for epoch in self.milestones):
            raise RecipeError(f"milestones={self.milestones}: epochs are counted from 0")
        for name, known in _WORDS.items():
            if getattr(self, name) not in known:
                raise RecipeError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")

    @property
    def starting(self) -> str | None:
        """Its init as the converter takes it."""
        return None if self.init == "none" else self.init

    def as_dict(self) -> dict:
        """Plain data, as JSON gives it back."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}


def _cifar100(model: str, **changes: object) -> Recipe:
    """Table 1: batch 256, 150 epochs, 0.1 after two epochs of warm-up, times 0.1 at 80, 110 and 135."""
    return Recipe(model=model, data="cifar100", **changes)  # pyrefly: ignore


def _imagenet(model: str, **changes: object) -> Recipe:
    """Table 3: batch 256, 90 epochs, weight decay 1e-4, times 0.1 at 30, 60 and 85; the folder is the user's."""
    fixed = {"data": "imagenet", "weight_decay": 1e-4, "epochs": 90, "milestones": (30, 60, 85), "log_every": 100}
    return Recipe(model=model, **{**fixed, **changes})  # pyrefly: ignore


def adapted(base: Recipe, paper: Recipe, **changes: object) -> Recipe:
    """A recipe with some fields changed, and with what follows from them where it is not given.

    The schedule is that of ``paper``, its milestones in proportion to the epochs and its warm-up at most a quarter of
    them; networks of other packages have one width.
    """
    chosen = dataclasses.replace(base, **changes)  # pyrefly: ignore
    late = [epoch for epoch in chosen.milestones if epoch >= chosen.epochs]
    if "milestones" in changes and late:
        raise RecipeError(
            f"milestones={chosen.milestones}: the {chosen.epochs} epochs are counted from 0 and never reach {late[0]}. "
            "Give smaller ones, or none: then the recipe's own are taken, in proportion to the epochs"
        )
    scaled = (round(epoch * chosen.epochs / paper.epochs) for epoch in paper.milestones)
    follows = {
        "milestones": tuple(dict.fromkeys(epoch for epoch in scaled if 0 < epoch < chosen.epochs)),
        "warmup_epochs": min(paper.warmup_epochs, chosen.epochs / 4),
        "width": 1.0 if ":" in chosen.model else chosen.width,
    }
    return dataclasses.replace(chosen, **{k: v for k, v in follows.items() if k not in changes})  # pyrefly: ignore


def _desk(paper: Recipe) -> Recipe:
    """A narrow network and few epochs, the milestones in proportion: minutes on two cores."""
    return adapted(paper, paper, epochs=12, width=0.25, batch=128, classifier_variance=1 / 3)


def _digits(model: str) -> Recipe:
    """1,797 images of 8 x 8: half a minute."""
    small = {"width": 0.25, "batch": 64, "epochs": 12, "milestones": (8, 11), "classifier_variance": 1 / 3}
    return Recipe(model=model, data="digits", log_every=5, **small)  # pyrefly: ignore


def _all() -> dict[str, Recipe]:
    names = ("vgg11", "vgg16", "resnet18", "resnet50", "squeezenet", "shufflenetv2")
    known = {f"cifar100-{name}": _cifar100(name) for name in names}
    known["cifar100-resnet50"] = _cifar100("resnet50", batch=128)
    known |= {f"{name}-desk": _desk(paper) for name, paper in known.items()}
    # The authors train ShuffleNetV2 for 200 epochs; its milestones are not given and stand in proportion here.
    longer = {"epochs": 200, "milestones": (67, 133, 189), "augment": "light"}
    for name in ("vgg16", "resnet18", "resnet50", "resnet101"):
        known[f"imagenet-{name}"] = _imagenet(name)
    known["imagenet-shufflenetv2_x0_5"] = _imagenet("shufflenetv2_x0_5", **longer)
    known |= {f"digits-{name}": _digits(name) for name in ("resnet10", "mlp10")}
    return known


RECIPES: dict[str, Recipe] = _all()
"""Every recipe by its name."""


def recipe(name: str, **changes: object) -> Recipe:
    """A recipe by its name, with some fields changed; its schedule follows the epochs unless it is given, too.

    Example:
        >>> recipe("cifar100-resnet50", epochs=30).milestones
        (16, 22, 27)
    """
    if name not in RECIPES:
        raise NameNotFoundError(f"there is no recipe {name!r}.", name, RECIPES)
    return adapted(RECIPES[name], RECIPES[name.removesuffix("-desk")], **changes)
