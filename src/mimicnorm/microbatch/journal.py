"""Put the state of modules back: after a loss that was only tried, and after a batch that failed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import Generator, Tensor, nn

from mimicnorm.surgery.isolate import snapshot

_MANY, _MOST = 100, 1000
"""Items of a list that may hold modules; things to look at in all."""


class Journal:
    """The state of some modules when they were noted: buffers, attributes, random generators of their own."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], set[str]]] = []

    def note(self, modules: list[nn.Module], model: nn.Module) -> None:
        """Note modules and their children; of the model, if that is among them, only the buffers."""
        for module in modules:
            (self.note_buffers if model in module.modules() else self._note)(module)

    def note_buffers(self, module: nn.Module) -> None:
        """Note the tensors of a module and its children, but for its parameters."""
        self._undo.append(_tensors_of(module))

    def _note(self, module: nn.Module) -> None:
        restore_attributes, restore_tensors = snapshot(module), _tensors_of(module)
        attributes = [v for m in module.modules() for v in m.__dict__.values()]
        generators = [(g, g.get_state()) for g in attributes if isinstance(g, Generator)]

        def undo() -> set[str]:
            changed = restore_tensors()
            restore_attributes()
            for generator, state in generators:
                generator.set_state(state)
            return changed

        self._undo.append(undo)

    def put_back(self) -> set[str]:
        """Give all noted modules the state they had; returns the classes of those whose tensors had changed."""
        changed = set().union(*(undo() for undo in reversed(self._undo)))
        self._undo.clear()
        return changed


@contextlib.contextmanager
def put_back_on_error() -> Iterator[Journal]:
    """A journal whose modules get their state back if anything raises inside."""
    journal = Journal()
    try:
        yield journal
    except BaseException:
        journal.put_back()
        raise


def modules_in(loss_fn: Any) -> list[nn.Module]:
    """The modules that a loss can call: itself, or by a closure, a global name, a partial or an attribute."""
    modules: list[nn.Module] = []
    things, seen = [loss_fn], set()
    while things and len(seen) < _MOST:
        thing = things.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            modules.append(thing)
        elif isinstance(thing, functools.partial):
            things += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, MethodType):
            things += [thing.__self__, *getattr(thing.__self__, "__dict__", {}).values(), thing.__func__]
        elif isinstance(thing, FunctionType):
            things += _reachable(thing)
        elif isinstance(thing, (list, tuple, dict)) and len(thing) < _MANY:  # else it is data
            things += thing.values() if isinstance(thing, dict) else thing
        elif callable(thing):
            things += getattr(thing, "__dict__", {}).values()
    inner = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inner]


def _reachable(function: FunctionType) -> list[Any]:
    if (function.__module__ or "").partition(".")[0] in ("torch", "numpy"):
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    names = _names(function.__code__)
    values = [value for name, value in function.__globals__.items() if name in names]
    return [
        *cells,
        *values,
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
        function.__dict__,
    ]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names(code: CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _tensors_of(module: nn.Module) -> Callable[[], set[str]]:
    noted = [(m, name, t, t.detach().clone()) for m in module.modules() for name, t in _tensors(m).items()]

    def undo() -> set[str]:
        changed = set()
        for owner, name, tensor, value in noted:
            if _tensors(owner).get(name) is not tensor:
                changed.add(type(owner).__name__)
                (owner._buffers if name in owner._buffers else owner.__dict__)[name] = tensor
            if not _equal(tensor, value):
                changed.add(type(owner).__name__)
                if tensor.shape != value.shape:
                    tensor.data = value
                tensor.data.copy_(value)
        return changed

    return undo


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers, and tensors among its attributes."""
    return {k: t for k, t in (module.__dict__ | module._buffers).items() if isinstance(t, Tensor)}


def _equal(a: Tensor, b: Tensor) -> bool:
    """By value: batch statistics are written without a count in the tensor's version."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())  # NaN is NaN
