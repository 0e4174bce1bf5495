"""Methods side by side: one network, one data set, several ways to do with or without BatchNorm.

    mimicnorm compare --model resnet18 --width 0.25 --data cifar100 --methods batchnorm,mimicnorm,nonorm --out runs/c

Start reading in ``stages.py``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Entry", "Job", "base_recipe", "entries", "run"]

if TYPE_CHECKING:
    from mimicnorm.compare.job import Entry, Job, base_recipe, entries
    from mimicnorm.compare.stages import run


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mimicnorm.compare' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mimicnorm.compare.{'stages' if name == 'run' else 'job'}"), name)
