"""Models by name: ``timm:resnet50``, ``torchvision:resnet50``, ``package.module:factory``.

timm and torchvision are the user's to install; nothing here imports them until asked for.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mimicnorm.errors import MimicNormError, NameNotFoundError


def load(spec: str) -> Any:
    """Build the model that a spec names, with random weights.

    Example:
        >>> load("torch.nn:Identity")
        Identity()
    """
    source, colon, name = spec.partition(":")
    if not colon or not source or not name:
        raise NameNotFoundError(f"{spec!r} names no model: use timm:NAME, torchvision:NAME, or package.module:factory")
    if source == "timm":
        timm = _import("timm")
        return _named(spec, name, timm.list_models(), lambda: timm.create_model(name))
    if source == "torchvision":
        models = _import("torchvision.models")
        return _named(spec, name, models.list_models(), lambda: models.get_model(name, weights=None))
    return _from_factory(spec, source, name)


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
        near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
        hint = f"Near ones: {', '.join(near)}." if near else f"It has {len(known)} models, none near."
        raise NameNotFoundError(f"{spec.partition(':')[0]} has no model {name!r}. {hint}")
    return build()


def _from_factory(spec: str, module_name: str, attribute: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does: a module beside the user is found
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NameNotFoundError(f"{spec!r}: there is no module {error.name!r} on the path") from error
    except Exception as error:  # the user's own module: whatever it raises is theirs to read
        raise MimicNormError(f"{spec!r}: importing {module_name} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        hint = f" Near ones: {', '.join(near)}." if near else ""
        raise NameNotFoundError(f"{spec!r}: module {module_name} has no {attribute!r}.{hint}")
    factory = getattr(module, attribute)
    if not isinstance(factory, type) and hasattr(factory, "parameters"):
        return factory  # a model that is there already
    try:
        inspect.signature(factory).bind()
    except (TypeError, ValueError) as error:
        raise MimicNormError(f"{spec!r} cannot be called without arguments: {error}") from error
    try:
        return factory()
    except Exception as error:
        raise MimicNormError(f"{spec!r} raised {type(error).__name__}: {error}") from error
