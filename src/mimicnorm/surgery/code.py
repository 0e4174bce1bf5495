"""What a model's own code asks for: the mode, or the class and attributes of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_ASKS_FOR_CLASS = {"type", "__class__", "hasattr", "getattr", "running_mean", "running_var", "eps"}


def names_mode(module: nn.Module) -> bool:
    """Whether a module's forward, or a function that it calls, names the mode: for dropout, or to do something else."""
    return bool(_asking(module))


def names_mode_and_class(module: nn.Module) -> bool:
    """Whether a module's forward names the mode, and then what a conversion changes."""
    return any(_asks_for_class(_names(g.__code__)) for f in _asking(module) for g in _called(module, f))


def around(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Return the modules that have one of these inside, the model among them."""
    inside = {name.rsplit(".", i)[0] for name in names for i in range(1, name.count(".") + 1)} | {""}
    return [model.get_submodule(name) for name in inside]


def _asking(module: nn.Module) -> list[FunctionType]:
    return [f for f in _called(module, module.forward) if "training" in _names(f.__code__)]


def _asks_for_class(names: set[str]) -> bool:
    """Whether code may ask for the class or the attributes of a layer; not if it asks whether something is a tensor."""
    modules = {name for name in names if isinstance(getattr(nn, name, None), type)}
    return bool(names & _ASKS_FOR_CLASS) or ("isinstance" in names and ("Tensor" not in names or bool(modules)))


def _called(module: nn.Module, function: Any) -> list[FunctionType]:
    """A function and all that it calls: in the module's class and its file, and in what they import but PyTorch."""
    functions: list[FunctionType] = []
    waiting = [function]
    while waiting:
        f = waiting.pop()
        f = f.fget if isinstance(f, property) else getattr(f, "__func__", f)
        f = inspect.unwrap(f) if callable(f) else f
        if isinstance(f, FunctionType) and f not in functions and not (f.__module__ or "").startswith("torch."):
            functions.append(f)
            names = _names(f.__code__)
            waiting += [inspect.getattr_static(module, n, f.__globals__.get(n)) for n in names]
            named = (f.__globals__.get(n) for n in names)
            owners = [o for o in named if isinstance(o, (type, ModuleType)) and not o.__name__.startswith("torch")]
            waiting += [inspect.getattr_static(owner, n, None) for owner in owners for n in names]
    return functions


def _names(code: CodeType) -> set[str]:
    """The names in a function's code and in the functions inside it."""
    inner = (c for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*map(_names, inner))
