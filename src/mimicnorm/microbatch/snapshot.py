"""Put the state of modules back: after a loss that was only probed, and after a batch that failed."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Generator, Tensor, nn

_LONGEST_LIST, _MOST_OBJECTS = 100, 1000
"""A longer list is data and holds no modules; no more objects than this are looked at."""


class Snapshot:
    """The state of modules at one moment: buffers, attributes, random generators of their own; not parameters.

    Args:
        modules: The modules; their children are not included.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        self._attributes = [(m, dict(m.__dict__)) for m in modules]
        values = [v for _, attributes in self._attributes for v in attributes.values()]
        self._containers = [(v, copy.copy(v)) for v in values if isinstance(v, (dict, list, set))]
        self._generators = [(g, g.get_state()) for g in values if isinstance(g, Generator)]
        self._tensors = [(m, k, t, t.detach().clone()) for m, _ in self._attributes for k, t in _tensors(m).items()]

    def restore(self) -> set[str]:
        """Put the state back, in place; return the classes of the modules whose tensors had changed."""
        changed = {
            type(m).__name__ for m, k, t, value in self._tensors if _tensors(m).get(k) is not t or not _equal(t, value)
        }
        for m, attributes in self._attributes:
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for container, content in self._containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for generator, state in self._generators:
            generator.set_state(state)
        for _, _, tensor, value in self._tensors:
            if not _equal(tensor, value):
                if tensor.shape != value.shape:
                    tensor.data = value
                tensor.data.copy_(value)
        return changed


@contextlib.contextmanager
def restored_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the state of modules back if anything raises inside."""
    snapshot = Snapshot(modules)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


def modules_in(loss_fn: Any) -> list[nn.Module]:
    """Find the modules that a loss can call: itself, or by a closure, a global name, a partial or an attribute.

    Children are included.
    """
    modules: dict[nn.Module, None] = {}
    objects, seen = [loss_fn], set()
    while objects and len(seen) < _MOST_OBJECTS:
        thing = objects.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.update(dict.fromkeys(thing.modules()))
        elif isinstance(thing, functools.partial):
            objects += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, MethodType):
            objects += [thing.__self__, *getattr(thing.__self__, "__dict__", {}).values(), thing.__func__]
        elif isinstance(thing, FunctionType):
            objects += _reachable(thing)
        elif isinstance(thing, (list, tuple, dict)) and len(thing) < _LONGEST_LIST:
            objects += thing.values() if isinstance(thing, dict) else thing
        elif callable(thing):
            objects += getattr(thing, "__dict__", {}).values()
    return list(modules)


def _reachable(function: FunctionType) -> list[Any]:
    """List what a function can refer to: closure, globals that it names, defaults, attributes."""
    if (function.__module__ or "").partition(".")[0] in ("torch", "numpy"):
        return []
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            cells.append(cell.cell_contents)
    names = _names(function.__code__)
    values = [value for name, value in function.__globals__.items() if name in names]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*cells, *values, *defaults, function.__dict__]


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(c) for c in code.co_consts if isinstance(c, CodeType)))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers, and the tensors among its attributes."""
    return {k: t for k, t in (module.__dict__ | module._buffers).items() if isinstance(t, Tensor)}


def _equal(a: Tensor, b: Tensor) -> bool:
    """By value: batch statistics are written without a count in the tensor's version. NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
