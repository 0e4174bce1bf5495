"""Any model by a word: ``resnet18``, ``timm:resnet50``, ``torchvision:resnet50``, ``package.module:factory``.

timm and torchvision are the user's to install; nothing here imports them until asked for.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mimicnorm.errors import MimicNormError, NameNotFoundError
from mimicnorm.models.catalogue import Input, build, names


def find(
    spec: str,
    *,
    num_classes: int | None = None,
    input: Input | None = None,
    width: float | None = None,
    in_channels: int | None = None,
    image: int | None = None,
) -> Any:
    """Build the model that a spec names, with random weights.

    What is given is passed on: all of it to the networks of this package (see `build`), the number of classes and of
    channels to timm's, torchvision's and a factory of your own, as keywords. What a model cannot take is an error.

    Example:
        >>> find("torch.nn:Identity")
        Identity()
        >>> find("resnet10", input="cifar", num_classes=10).fc
        Linear(in_features=512, out_features=10, bias=True)
    """
    source, colon, name = spec.partition(":")
    if not colon and spec in names():
        own = {"input": input, "width": width, "in_channels": in_channels}
        given = {key: value for key, value in own.items() if value is not None}
        return build(spec, num_classes=num_classes, image=image, **given)  # pyrefly: ignore
    if not source or not name:
        ways = "use timm:NAME, torchvision:NAME, package.module:factory, or a name of this package's"
        raise NameNotFoundError(f"{spec!r} names no model: {ways}.", spec, names())
    if input == "cifar" or (width or 1.0) != 1.0:
        raise MimicNormError(f"{spec!r} has one stem and one width: leave input out and set width to 1 (--width 1)")
    arguments = {"num_classes": num_classes, "in_channels": in_channels}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    if source == "timm":
        timm = _import("timm")
        if "in_channels" in arguments:
            arguments["in_chans"] = arguments.pop("in_channels")
        return _named(spec, name, timm.list_models(), lambda: timm.create_model(name, **arguments))
    if source == "torchvision":
        models = _import("torchvision.models")
        if arguments.pop("in_channels", 3) != 3:
            raise MimicNormError(f"{spec!r} takes images of 3 channels, not {in_channels}: use timm:NAME or your own")
        return _named(spec, name, models.list_models(), lambda: models.get_model(name, weights=None, **arguments))
    return _from_factory(spec, source, name, arguments)


def input_shape(model: Any, *, batch: int, image: int | None, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of an example: all of it if given, else a batch of the images that the model takes."""
    if shape is not None and not shape:
        raise MimicNormError("the shape is empty: give the numbers, batch first, as in --shape 8 3 224 224")
    if shape is not None and image is not None and tuple(shape[-2:]) != (image, image):
        given = " ".join(map(str, shape))
        raise MimicNormError(f"--image {image} and --shape {given} are of different sizes: give one of them")
    return shape or (batch, *image_size(model, image))


def image_size(model: Any, given: int | None) -> tuple[int, int, int]:
    """(channels, height, width) of an input: what was asked for, else what the model says, else 3 x 224 x 224."""
    channels, height, width = (getattr(model, "default_cfg", None) or {}).get("input_size", (3, 224, 224))
    return (channels, given, given) if given is not None else (channels, height, width)


def _import(name: str) -> ModuleType:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise MimicNormError(f"{package} cannot be imported: it needs {error.name}") from error
        raise MimicNormError(f"{package} is not installed. Install it with: pip install {package}") from error
    except (ImportError, RuntimeError) as error:
        raise MimicNormError(
            f"{package} is installed but does not import ({error}). Its build must match that of torch."
        ) from error


def _named(spec: str, name: str, known: list[str], build: Any) -> Any:
    if name.partition(".")[0] not in known:
        raise NameNotFoundError(f"{spec.partition(':')[0]} has no model {name!r} among {len(known)}.", name, known)
    try:
        return build()
    except TypeError as error:
        raise MimicNormError(f"{spec!r} cannot be built so: {error}") from error


def _from_factory(spec: str, module_name: str, attribute: str, arguments: dict[str, int]) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # a module beside the user is found, but none of them hides one of Python's own
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NameNotFoundError(f"{spec!r}: there is no module {error.name!r} on the path") from error
    except Exception as error:  # the user's own module: whatever it raises is theirs to read
        raise MimicNormError(f"{spec!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        which = getattr(module, "__file__", None) or "built in"  # perhaps not the one that was meant
        public = [name for name in dir(module) if not name.startswith("_")]
        raise NameNotFoundError(f"{spec!r}: module {module_name} ({which}) has no {attribute!r}.", attribute, public)
    factory = getattr(module, attribute)
    if not isinstance(factory, type) and hasattr(factory, "parameters"):
        return copy.deepcopy(factory)  # a model that is there already; every call gives a fresh one
    if arguments.get("in_channels") == 3:
        arguments = _accepted(factory, arguments)  # three channels are what most networks take anyway
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(f"{key}={value}" for key, value in arguments.items())
        how = f"with {wanted}" if wanted else "without arguments"
        raise MimicNormError(
            f"{spec!r} cannot be called {how}: {error}. A factory takes the keywords num_classes and in_channels "
            "where it is to be trained, and needs nothing else"
        ) from error
    try:
        return factory(**arguments)
    except Exception as error:
        raise MimicNormError(f"{spec!r} raised {type(error).__name__}: {error}") from error


def _accepted(factory: Any, arguments: dict[str, int]) -> dict[str, int]:
    try:
        inspect.signature(factory).bind_partial(in_channels=3)
    except (TypeError, ValueError):
        return {key: value for key, value in arguments.items() if key != "in_channels"}
    return arguments
