"""The structure of outputs and targets: the same in every micro-batch, and every time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError

_LEAF = object()


class Tree:
    """How the tensors of one structure hang together.

    Args:
        structure: What the model returned, or targets.
        origin: Where that was, for messages.
        name: What it is, for messages.
        one_level: Whether everything right below the root is a leaf.
    """

    def __init__(self, structure: Any, origin: str, name: str = "the model's output", one_level: bool = False):
        self.origin, self.name = origin, name
        self._one_level = one_level
        is_leaf = (lambda x: x is not structure) if one_level else None
        leaves, self.spec = pytree.tree_flatten(structure, is_leaf=is_leaf)
        self._template = pytree.tree_unflatten([_LEAF] * len(leaves), self.spec)

    def leaves(self, structure: Any, where: str) -> list[Any]:
        """The leaves of another structure, in the order of this tree; raises for another structure.

        The keys of a dict may come in any order: their values are put into the order of this tree.
        """
        leaves: list[Any] = []
        self._collect(self._template, structure, self.name, where, leaves)
        return leaves

    def structure(self, leaves: list[Any]) -> Any:
        """The same with these leaves."""
        return pytree.tree_unflatten(leaves, self.spec)

    def _collect(self, template: Any, value: Any, path: str, where: str, leaves: list[Any]) -> None:
        if template is _LEAF and (self._one_level or pytree.tree_is_leaf(value)):
            leaves.append(value)
            return
        if template is _LEAF or type(value) is not type(template):
            raise self._differs(f"{path} is a {_kind(value)} in {where} and a {_kind(template)} in {self.origin}")
        here, there = _children(template), _children(value)
        only_here, only_there = here.keys() - there.keys(), there.keys() - here.keys()
        if only_here or only_there:
            has, lacks = (self.origin, where) if only_here else (where, self.origin)
            names = ", ".join(f"{path}[{key!r}]" for key in sorted(only_here or only_there, key=str))
            raise self._differs(f"{names} is in {has}, but not in {lacks}")
        for key, child in here.items():
            self._collect(child, there[key], f"{path}[{key!r}]", where, leaves)

    def _differs(self, what: str) -> MicroBatchError:
        return MicroBatchError(f"{what}: {self.name} must have the same structure in each")


def _children(node: Any) -> dict[Any, Any]:
    if isinstance(node, Mapping):
        return dict(node)
    return dict(enumerate(pytree.tree_leaves(node, is_leaf=lambda x: x is not node)))


def _kind(value: Any) -> str:
    return "single value" if value is _LEAF else type(value).__name__
