"""The paper's tables and figures, run again: published numbers, recipes per item, a verdict per claim.

Start reading in ``items.py``: each item lists its recipes, its reducer, its claims and its figure. Names load on first
use: the command line checks an item's name before torch is imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {"ITEMS": "items", "SCALES": "scales", "Item": "items", "Judgement": "verdicts", "reproduce": "run"}

__all__ = ["ITEMS", "SCALES", "Item", "Judgement", "reproduce"]

if TYPE_CHECKING:
    from mimicnorm.paper.items import ITEMS, Item
    from mimicnorm.paper.run import reproduce
    from mimicnorm.paper.scales import SCALES
    from mimicnorm.paper.verdicts import Judgement


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mimicnorm.paper' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mimicnorm.paper.{_WHERE[name]}"), name)
