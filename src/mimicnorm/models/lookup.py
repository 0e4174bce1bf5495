"""Any model by a spec: ``resnet18``, ``timm:resnet50``, ``torchvision:resnet50``, ``package.module:factory``.

timm and torchvision are for the user to install; nothing here imports them, or torch, until a model needs it.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from mimicnorm.errors import MimicNormError, NameNotFoundError
from mimicnorm.models.catalogue import Input, build, names

_ZOOS = ("timm", "torchvision")


def check_spec(spec: str) -> None:
    """Raise an error if a spec has no known form, or is not in the catalogue. Quick: torch is not imported.

    Example:
        >>> check_spec("resnet_18")
        Traceback (most recent call last):
        ...
        mimicnorm.errors.NameNotFoundError: 'resnet_18' is not a model: ...
    """
    source, colon, name = spec.partition(":")
    if (colon and not (source and name)) or (not colon and spec not in names()):
        forms = "use timm:NAME, torchvision:NAME, package.module:factory, or a network of this package"
        raise NameNotFoundError(f"{spec!r} is not a model: {forms}.", spec, names())


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

    Arguments that are given are passed on: all of them to the networks of this package (see `build`), the number of
    classes and of channels to timm, torchvision and your own factory, as keywords. What a model does not take is an
    error.

    Example:
        >>> find("torch.nn:Identity")
        Identity()
        >>> find("resnet10", input="cifar", num_classes=10).fc
        Linear(in_features=512, out_features=10, bias=True)
    """
    check_spec(spec)
    source, colon, name = spec.partition(":")
    arguments = _given(num_classes=num_classes, in_channels=in_channels)
    if not colon:
        return build(spec, image=image, **arguments, **_given(input=input, width=width))
    if input == "cifar" or (width or 1.0) != 1.0:
        raise MimicNormError(f"{spec!r} has one stem and one width: leave input out and set width to 1 (--width 1)")
    if source == "timm":
        timm = _import(spec, "timm")
        _require_name(spec, name.partition(".")[0], timm.list_models())
        if "in_channels" in arguments:
            arguments["in_chans"] = arguments.pop("in_channels")
        return _call(spec, partial(timm.create_model, name), arguments)
    if source == "torchvision":
        models = _import(spec, "torchvision.models")
        _require_name(spec, name, models.list_models())
        if arguments.pop("in_channels", 3) != 3:
            raise MimicNormError(f"{spec!r} takes images of 3 channels, not {in_channels}: use timm:NAME or your own")
        return _call(spec, partial(models.get_model, name, weights=None), arguments)
    factory = _attribute(spec, source, name)
    if not isinstance(factory, type) and hasattr(factory, "parameters"):
        return copy.deepcopy(factory)  # a model, not a factory; every call gives a fresh one
    if arguments.get("in_channels") == 3 and not _accepts(factory, "in_channels"):
        del arguments["in_channels"]  # three channels are what most networks take anyway
    return _call(spec, factory, arguments)


def input_shape(model: Any, *, batch: int, image: int | None, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the shape of an example: ``shape`` if given, else a batch of the images that the model takes.

    That is (channels, image, image), with the channels and the default size of ``model.default_cfg``, or 3 x 224 x 224.
    """
    if shape is not None and not shape:
        raise MimicNormError("the shape is empty: give the numbers, batch first, as in --shape 8 3 224 224")
    if shape is not None and image is not None and tuple(shape[-2:]) != (image, image):
        given = " ".join(map(str, shape))
        raise MimicNormError(f"--image {image} and --shape {given} are of different sizes: give one of them")
    channels, height, width = (getattr(model, "default_cfg", None) or {}).get("input_size", (3, 224, 224))
    return shape or (batch, channels, *((height, width) if image is None else (image, image)))


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _import(spec: str, module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if package in _ZOOS and error.name == package:
            raise MimicNormError(f"{package} is not installed. Install it with: pip install {package}") from error
        raise NameNotFoundError(f"{spec!r}: there is no module {error.name!r} on the path") from error
    except Exception as error:  # a module of somebody else: whatever it raises is theirs to read
        hint = ". Its build must match that of torch" if package in _ZOOS else ""
        raise MimicNormError(f"{spec!r}: importing {module} raised {type(error).__name__}: {error}{hint}") from error


def _require_name(spec: str, name: str, known: Iterable[str]) -> None:
    known = list(known)
    if name not in known:
        raise NameNotFoundError(f"{spec.partition(':')[0]} has no model {name!r} among {len(known)}.", name, known)


def _attribute(spec: str, module_name: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # at the end: a file in the current folder must not hide a module of Python
    module = _import(spec, module_name)
    if not hasattr(module, attribute):
        which = getattr(module, "__file__", None) or "built in"  # perhaps not the one that was meant
        public = [name for name in dir(module) if not name.startswith("_")]
        raise NameNotFoundError(f"{spec!r}: module {module_name} ({which}) has no {attribute!r}.", attribute, public)
    return getattr(module, attribute)


def _accepts(factory: Callable[..., Any], keyword: str) -> bool:
    try:
        inspect.signature(factory).bind_partial(**{keyword: None})
    except (TypeError, ValueError):
        return False
    return True


def _call(spec: str, factory: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    try:
        inspect.signature(factory).bind(**arguments)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        raise MimicNormError(
            f"{spec!r} cannot be called {f'with {given}' if given else 'without arguments'}: {error}. A factory takes "
            "the keywords num_classes and in_channels if it is to be trained, and needs nothing else"
        ) from error
    try:
        return factory(**arguments)
    except Exception as error:
        raise MimicNormError(f"{spec!r} raised {type(error).__name__}: {error}") from error
