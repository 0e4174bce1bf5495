"""Structures of tensors (inputs, targets, outputs): their leaves, and whether two structures are the same."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError


def children(node: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key, or None for a leaf.

    Containers are those that torch's pytree knows (tuple, list, dict, named tuple, types that libraries register),
    and any other mapping, ``SimpleNamespace`` or dataclass.
    """
    if isinstance(node, SimpleNamespace):
        return dict(vars(node))
    if isinstance(node, MutableMapping):
        return dict(node)
    if not pytree.tree_is_leaf(node):
        return dict(enumerate(_one_level(node)[0]))
    if is_record(node):
        fields = [f.name for f in dataclasses.fields(node) if hasattr(node, f.name)]
        return {name: getattr(node, name) for name in fields} | getattr(node, "__dict__", {})  # not only fields
    return None


def is_record(node: Any) -> bool:
    """Whether this is an instance of a dataclass."""
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def leaves(structure: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> list[Any]:
    """List the leaves of a structure; what ``is_leaf`` accepts is not opened."""
    parts = None if is_leaf(structure) else children(structure)
    return [structure] if parts is None else [leaf for part in parts.values() for leaf in leaves(part, is_leaf)]


def map_leaves(function: Callable[[Any], Any], structure: Any, is_leaf: Callable[[Any], bool] = lambda _: False) -> Any:
    """Return the same structure with a function applied to each leaf.

    Example:
        >>> map_leaves(lambda x: 2 * x, {"a": [1, 2], "b": 3})
        {'a': [2, 4], 'b': 6}
    """
    parts = None if is_leaf(structure) else children(structure)
    if parts is None:
        return function(structure)
    return rebuild(structure, {key: map_leaves(function, part, is_leaf) for key, part in parts.items()})


def map_tensors(function: Callable[[Tensor], Any], structure: Any) -> Any:
    """Return the same structure with a function applied to each tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, structure)


def rebuild(node: Any, parts: dict[Any, Any]) -> Any:
    """Return a container like another one with other parts."""
    if not pytree.tree_is_leaf(node):
        return pytree.tree_unflatten(list(parts.values()), _one_level(node)[1])
    new = copy.copy(node)
    if not isinstance(node, MutableMapping):
        for key, part in parts.items():
            object.__setattr__(new, key, part)  # a dataclass may be frozen
        return new
    if getattr(node, "__dict__", None) is node:  # a dict whose items are its attributes
        new.__dict__ = new
    for key, part in parts.items():
        new[key] = part
    return new


class Tree:
    """The structure of a model's output; messages call its micro-batch ``origin``."""

    def __init__(self, output: Any, origin: str):
        self.origin = origin
        self._paths = _by_path(output, "").keys()
        self._template = map_leaves(lambda _: None, output)

    def leaves(self, output: Any, where: str) -> list[Any]:
        """List the leaves of another output in the order of this one; raise if its structure differs.

        The keys of a dict may come in any order.
        """
        by_path = _by_path(output, "")
        missing, extra = self._paths - by_path.keys(), by_path.keys() - self._paths
        if missing or extra:
            has, lacks, path = (self.origin, where, min(missing)) if missing else (where, self.origin, min(extra))
            raise MicroBatchError(
                f"the model's output{path} is in {has}, but not in {lacks}: the output must have the same structure "
                "for each micro-batch"
            )
        return [by_path[path] for path in self._paths]

    def structure(self, leaves: list[Any]) -> Any:
        """Build an output of this structure from its leaves."""
        following = iter(leaves)
        return map_leaves(lambda _: next(following), self._template)


def _by_path(node: Any, path: str) -> dict[str, Any]:
    parts = children(node)
    if parts is None:
        return {path: node}
    return {p: leaf for key, part in parts.items() for p, leaf in _by_path(part, f"{path}[{key!r}]").items()}


def _one_level(node: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(node, is_leaf=lambda x: x is not node)
