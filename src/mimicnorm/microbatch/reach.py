"""What a function can refer to: its modules, and tensors that it is not given as arguments."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_LONGEST_LIST, _MOST_OBJECTS = 100, 1000
"""A longer list is data and is not opened; no more objects than this are looked at, besides the roots."""


def modules_in(loss_fn: Any) -> list[nn.Module]:
    """Find the modules that a loss can call: itself, or by a closure, a global name, a partial or an attribute.

    Children are included.
    """
    modules: dict[nn.Module, None] = {}
    for _, thing in reached([("loss_fn", loss_fn)]):
        if isinstance(thing, nn.Module):
            modules.update(dict.fromkeys(thing.modules()))
    return list(modules)


def reached(roots: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield named objects and what they refer to, each once, with its name; modules are not opened.

    Example:
        >>> [name for name, _ in reached([("features", {"stem": [1.5]})])]
        ['features', "features['stem']", "features['stem'][0]"]
    """
    queue, seen = list(roots), set()
    for name, thing in queue:  # which grows, and keeps all alive: the id of a freed object may be another's
        if len(seen) == len(roots) + _MOST_OBJECTS:
            return
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        yield name, thing
        queue += _parts(name, thing)


def _parts(name: str, thing: Any) -> list[tuple[str, Any]]:
    """List what an object refers to, by name."""
    if isinstance(thing, nn.Module):
        return []
    if isinstance(thing, functools.partial):
        return [(name, thing.func), (f"{name}.args", thing.args), (f"{name}.keywords", thing.keywords)]
    if isinstance(thing, MethodType):
        attributes = getattr(thing.__self__, "__dict__", {})
        return [("self", thing.__self__), *attributes.items(), (name, thing.__func__)]
    if isinstance(thing, FunctionType):
        return _variables(thing)
    if isinstance(thing, (list, tuple, dict)):
        items = thing.items() if isinstance(thing, dict) else enumerate(thing)
        return [(f"{name}[{_shown(key)}]", part) for key, part in items] if len(thing) < _LONGEST_LIST else []
    return list(getattr(thing, "__dict__", {}).items()) if callable(thing) else []


def _variables(function: FunctionType) -> list[tuple[str, Any]]:
    """List what a function can refer to: closure, globals that it names, defaults, attributes."""
    if (function.__module__ or "").partition(".")[0] in ("torch", "numpy"):
        return []
    code = function.__code__
    cells = []
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append((name, cell.cell_contents))
    names = _names(code)
    variables = [(name, value) for name, value in function.__globals__.items() if name in names]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    of_function = [(f"{function.__name__}'s default {i}", value) for i, value in enumerate(defaults)]
    return [*cells, *variables, *of_function, *function.__dict__.items()]


def _shown(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int)) else type(key).__name__  # a module or a tensor fills the screen


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))
