"""Recipes: everything that decides a run's result, as plain data.

A recipe gives the same weights bit for bit on the same machine and number of threads. What does not change the result
(where data lies, how often to save, what to print) is an argument of ``train`` instead. Nothing here imports torch, so
that the command line can check names and numbers before it loads.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from mimicnorm.arguments import finite, positive_int
from mimicnorm.errors import NameNotFoundError, RecipeError
from mimicnorm.models.lookup import check_spec

if TYPE_CHECKING:
    from mimicnorm.methods import Method

Init = Literal["auto", "theory", "calibrate", "keep", "none"]
"""How starting weights are called on the command line."""
DATA_SETS = ("digits", "mnist", "cifar10", "cifar100", "cifar100-coarse", "imagenet")
"""The names that `mimicnorm.data` knows, for checks before torch loads; a test compares them."""
_ABOVE_ZERO = ("lr", "width", "gamma", "scalar_rate", "classifier_variance")
_AT_LEAST_ONE = ("batch", "epochs", "log_every")


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
    """digits, mnist, cifar10, cifar100, cifar100-coarse (its 20 coarse labels), imagenet, or folder:PATH (folders train
    and val of class folders)."""
    method: str = "mimicnorm"
    """What to do with BatchNorm: mimicnorm, weight-mean, last-bn, nonorm, batchnorm, ..."""
    settings: tuple[str, ...] = ()
    """Settings of the method as NAME=VALUE, such as residual=linear min_fan_in=50."""
    init: Init = "auto"
    """Starting weights of converted layers: auto, theory, calibrate, keep (trained weights stay, and so does what the
    network computes), or none (as the network's maker drew them)."""
    init_from: str = ""
    """Trained weights to start from: a safetensors file with the state dict of the network before its conversion. Needs
    --init keep (or none). The classifier starts anew if the file has none or one for another number of classes."""
    width: float = 1.0
    """Multiplies the network's channels."""
    classifier_variance: float = 2.0
    """The classifier (the layer that makes the logits) starts as N(0, this / fan-in): 2 in the authors' code, 1/3 in
    PyTorch's own layers. Behind a last BN that scale only decides how fast it learns. Networks of other packages
    keep what their makers drew."""
    classes: str = ""
    """Use these classes only, such as 0-9 or 0-4,7; they are renumbered from 0 in this order. Empty is all."""
    validation: float = 0.0
    """Hold this fraction of the training images out (of each class, the same images for every seed and limit) and
    evaluate on them; the test set is not read. 0 evaluates on the test set."""
    limit: int = 0
    """Train on this many images, a fixed subset, taken after classes and validation; 0 is all."""
    test_limit: int = 0
    """Evaluate on this many images; 0 is all."""
    augment: Literal["standard", "light", "none"] = "standard"
    """Augmentation of the training images."""
    batch: int = 256
    """Images per step, over all processes; the rest of an epoch that fills no batch is left out."""
    micro_batch: int = 0
    """Images to run at once (exact: see mimicnorm.microbatch); 0 is the whole batch."""
    epochs: int = 150
    """Passes over the training images."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW; where a recipe is changed to adamw, lr is 0.001 and weight_decay 0.05 unless
    given."""
    lr: float = 0.1
    """Learning rate after the warm-up."""
    momentum: float = 0.9
    """Momentum of SGD; AdamW's first beta (the second is 0.999)."""
    weight_decay: float = 5e-4
    """Weight decay: added to the gradient by SGD; AdamW shrinks weights by this times the learning rate."""
    decay_scalars: bool = True
    """Decay biases, residual scalars and BatchNorm's affine parameters, too, as the paper's authors do. A logit scale
    is never decayed."""
    scalar_rate: float | None = None
    """Multiplies the learning rate of scalar parameters; None is what the method's authors use: 0.1 for Fixup, 1 for
    the others."""
    warmup: float = 2 / 150
    """Fraction of the run in which the learning rate rises linearly from 0."""
    schedule: Literal["steps", "cosine", "linear"] = "steps"
    """The learning rate after the warm-up: steps multiplies it by gamma at milestones; cosine and linear anneal it to 0
    at the last step."""
    milestones: tuple[float, ...] = (80 / 150, 110 / 150, 135 / 150)
    """Fractions of the run at which schedule=steps multiplies the learning rate by gamma, such as 0.5 0.75."""
    gamma: float = 0.1
    """Factor on the learning rate at each milestone."""
    precision: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """bf16 and fp16 run under autocast; fp16 with a gradient scaler. int8 is integer training (see mimicnorm.integer):
    SGD on the CPU, with momentum rounded to eighths."""
    channels_last: bool = True
    """Keep images and weights channels last in memory (except very narrow networks on a CPU, where oneDNN crashes)."""
    activation_bits: Literal[0, 2, 4, 8, 32] = 0
    """Save activations for backward in 8, 4 or 2 bits (see mimicnorm.compress), or without loss in 32; 0 is as PyTorch
    does."""
    compile: bool = False
    """Compile the network with torch.compile."""
    seed: int = 0
    """Decides the starting weights, the order of the images, their augmentation and dropout."""
    log_every: int = 20
    """Steps between two lines of training loss in metrics.jsonl."""

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        for name, kind in _kinds().items():
            value, known = getattr(self, name), get_args(kind)
            if get_origin(kind) is Literal and (type(value) is not type(known[0]) or value not in known):
                raise RecipeError(f"{name}={value!r}: use one of {', '.join(map(str, known))}")
            if kind is str and not isinstance(value, str):
                raise RecipeError(f"{name}={value!r}: use a name")
            if kind is bool and not isinstance(value, bool):  # "no" would pass as true
                raise RecipeError(f"{name}={value!r}: use True or False")
            if kind is int:
                positive_int(value, name, least=1 if name in _AT_LEAST_ONE else 0, error=RecipeError)
            if kind is float or (kind == float | None and value is not None):
                bound = {"above": 0} if name in _ABOVE_ZERO else {"least": 0}
                finite(value, name, **bound, error=RecipeError)
        if not isinstance(self.settings, tuple) or not all(isinstance(s, str) for s in self.settings):
            raise RecipeError(f"settings={self.settings!r}: use a tuple of texts NAME=VALUE")
        if self.seed >= 2**63:
            raise RecipeError(f"seed={self.seed}: use a whole number of at least 0 and below 2^63")
        if self.validation >= 1:
            raise RecipeError(f"validation={self.validation}: use a fraction of the training set, below 1")
        self.class_indices()
        if self.init_from and self.init not in ("keep", "none"):
            raise RecipeError(
                f'init_from with init={self.init!r} would draw new weights over the given ones: use "keep"'
            )
        if self.momentum >= 1:
            raise RecipeError(f"momentum={self.momentum}: use a number below 1, or no gradient is ever forgotten")
        if self.warmup > 1 or not all(0 < finite(m, "milestones", error=RecipeError) < 1 for m in self.milestones):
            raise RecipeError(
                f"warmup={self.warmup}, milestones={self.milestones}: use fractions of the run, between 0 and 1 (epoch "
                "80 of 150 is 0.5333)"
            )
        if self.precision == "int8" and (self.optimizer != "sgd" or self.activation_bits):
            raise RecipeError('precision="int8" has one optimizer, sgd, and takes no activation_bits')
        if self.activation_bits and self.compile:
            raise RecipeError(
                f"activation_bits={self.activation_bits} and compile=True: what compiled code saves cannot be "
                "compressed. Leave one of them out"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON gives it back; ``init_from`` only where it is given."""
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}
        return fields if self.init_from else {k: v for k, v in fields.items() if k != "init_from"}

    def weights_file(self) -> tuple[Path, str]:
        """Return the file that ``init_from`` names and the SHA-256 of its content, which a resolved recipe states."""
        stated = re.fullmatch(r"(.+)#([0-9a-f]{64})", self.init_from)
        if stated:
            return Path(stated[1]), stated[2]
        try:
            with open(self.init_from, "rb") as file:
                return Path(self.init_from), hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise RecipeError(f"init_from={self.init_from!r} cannot be read: {error.strerror}") from error

    def class_indices(self) -> tuple[int, ...] | None:
        """Return the indices that ``classes`` names; None is all.

        Example:
            >>> recipe("digits-mlp10", classes="7,0-2").class_indices()
            (7, 0, 1, 2)
        """
        if not self.classes:
            return None
        indices: list[int] = []
        for part in self.classes.split(","):
            ends = part.strip().split("-")
            if len(ends) > 2 or not all(end.isdecimal() for end in ends):
                raise RecipeError(f"classes={self.classes!r}: use class indices and ranges, such as 0-9 or 0-4,7")
            indices += range(int(ends[0]), int(ends[-1]) + 1)
        if len(indices) < 2 or len(set(indices)) < len(indices):
            raise RecipeError(f"classes={self.classes!r}: name at least two classes, each once")
        return tuple(indices)

    def check_names(self) -> None:
        """Check the names of network, data, method and settings without loading torch, which takes seconds."""
        check_spec(self.model)
        if self.data not in DATA_SETS and not self.data.startswith("folder:"):
            raise NameNotFoundError(f"there is no data set {self.data!r}.", self.data, (*DATA_SETS, "folder:PATH"))
        self.configured_method()

    def configured_method(self) -> Method:
        """Build the method with its settings. Under SGD, weights are centred in the backward pass.

        Example:
            >>> recipe("cifar100-resnet18").configured_method().centre
            'backward'
        """
        # Both take the same steps under SGD, and backward is faster.
        place = {"centre": "backward" if self.optimizer == "sgd" else "forward"}
        method = _method(self.method, self.settings, place)
        return method.resolved(trained=self.init == "keep")

    def resolved(self) -> Recipe:
        """Write out what the method decides by default, so that a changed default makes another recipe.

        Of trained weights to start from, the content is written out.

        Example:
            >>> recipe("digits-resnet10", method="weight_mean").resolved().settings
            ('centre="backward"', 'last_norm=false', 'logit_scale="auto"', 'min_fan_in=16', 'residual="sqrt"')
        """
        chosen = self.configured_method()
        settings = tuple(f"{k}={json.dumps(v)}" for k, v in sorted(dataclasses.asdict(chosen).items()))
        rate = chosen.scalar_rate if self.scalar_rate is None else self.scalar_rate
        weights = "{}#{}".format(*self.weights_file()) if self.init_from else ""
        return dataclasses.replace(self, method=chosen.name, settings=settings, scalar_rate=rate, init_from=weights)

    def key(self) -> str:
        """Hash the resolved recipe: what a sweep finds a run by. Trained weights count by content, not by place."""
        fields = self.resolved().as_dict()
        fields |= {"init_from": self.weights_file()[1]} if self.init_from else {}
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@functools.cache
def _kinds() -> dict[str, Any]:
    """Return the type of every field."""
    return get_type_hints(Recipe)


def _method(name: str, settings: tuple[str, ...], defaults: dict[str, Any]) -> Method:
    from mimicnorm.methods import method

    default = method(name)
    fields = {f.name for f in dataclasses.fields(default)}
    changes = {field: value for field, value in defaults.items() if field in fields}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals or field not in fields:
            raise RecipeError(
                f"settings: {setting!r} is not a NAME=VALUE that {default.name} has; it has {sorted(fields)}"
            )
        try:
            changes[field] = json.loads(value)
        except json.JSONDecodeError:
            changes[field] = {"None": None, "True": True, "False": False}.get(value, value)
    return dataclasses.replace(default, **changes)


def _all() -> dict[str, Recipe]:
    # Table 1: batch 256, 150 epochs, 0.1 after two epochs of warm-up, times 0.1 at 80, 110 and 135.
    networks = ("vgg11", "vgg16", "resnet18", "resnet50", "squeezenet", "shufflenetv2")
    known = {f"cifar100-{name}": Recipe(model=name, data="cifar100") for name in networks}
    known["cifar100-resnet50"] = Recipe(model="resnet50", data="cifar100", batch=128)
    # A narrow network and few epochs: minutes on two cores.
    desk: dict[str, Any] = {"epochs": 12, "warmup": 2 / 12, "width": 0.25, "batch": 128, "classifier_variance": 1 / 3}
    known |= {f"{name}-desk": dataclasses.replace(paper, **desk) for name, paper in known.items()}
    # Table 3: 90 epochs, weight decay 1e-4, times 0.1 at 30, 60 and 85; the folder is the user's.
    imagenet: dict[str, Any] = {"data": "imagenet", "weight_decay": 1e-4, "epochs": 90, "log_every": 100}
    imagenet |= {"warmup": 2 / 90, "milestones": (30 / 90, 60 / 90, 85 / 90)}
    for name in ("vgg16", "resnet18", "resnet50", "resnet101"):
        known[f"imagenet-{name}"] = Recipe(model=name, **imagenet)
    # The authors train ShuffleNetV2 for 200 epochs; its milestones are not given and stand in proportion here.
    imagenet |= {"epochs": 200, "warmup": 2 / 200, "augment": "light"}
    known["imagenet-shufflenetv2_x0_5"] = Recipe(model="shufflenetv2_x0_5", **imagenet)
    # Trained weights (--init-from) on images of one's own (--data folder:PATH).
    tuning: dict[str, Any] = {"init": "keep", "batch": 32, "epochs": 10, "lr": 0.01, "weight_decay": 1e-4}
    known["fine-tune"] = Recipe(model="resnet18", data="cifar100", warmup=0.1, schedule="cosine", **tuning)
    # 1,797 images of 8 x 8: half a minute.
    digits: dict[str, Any] = {**desk, "data": "digits", "batch": 64, "log_every": 5}
    return known | {f"digits-{name}": Recipe(model=name, **digits) for name in ("resnet10", "mlp10")}


RECIPES: dict[str, Recipe] = _all()
"""Every recipe by its name."""


def recipe(name: str, **changes: Any) -> Recipe:
    """Return a recipe by its name, or from a recipe.json that a run left, with some fields changed.

    Networks of other packages have one width, which is 1 unless ``width`` is given. A recipe of SGD that is changed to
    ``optimizer="adamw"`` gets lr 0.001 and weight_decay 0.05 unless they are given.

    Example:
        >>> recipe("cifar100-resnet50", epochs=30).batch
        128
    """
    if name.endswith(".json"):
        base = _from_file(Path(name))
    elif name in RECIPES:
        base = RECIPES[name]
    else:
        raise NameNotFoundError(f"there is no recipe {name!r}.", name, RECIPES)
    if ":" in str(changes.get("model")):
        changes.setdefault("width", 1.0)
    if changes.get("optimizer") == "adamw" != base.optimizer:
        changes = {"lr": 1e-3, "weight_decay": 0.05, **changes}
    return dataclasses.replace(base, **changes)


def _from_file(path: Path) -> Recipe:
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        return Recipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})  # pyrefly: ignore
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {error}") from error
