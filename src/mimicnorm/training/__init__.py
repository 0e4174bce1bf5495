"""Training to trust: recipes as data, a loop of one page, runs that a kill, a full disk or a lost process cannot spoil.

    result = mimicnorm.training.train(mimicnorm.training.recipe("digits-resnet10"), "runs/digits")

The same call on the same folder resumes, or returns the finished result. Start reading in ``loop.py``; all of resume is
in ``state.py``; many runs at once in ``sweep.py``. Names load on first use: the command line reads the recipes and must
not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "recipe": "recipes",
    "Result": "state",
    "finished": "finished_run",
    "network": "build",
    "run_all": "sweep",
    "train": "loop",
}

__all__ = ["RECIPES", "Recipe", "Result", "finished", "network", "recipe", "run_all", "train"]

if TYPE_CHECKING:
    from mimicnorm.training.build import network
    from mimicnorm.training.finished_run import finished
    from mimicnorm.training.loop import train
    from mimicnorm.training.recipes import RECIPES, Recipe, recipe
    from mimicnorm.training.state import Result
    from mimicnorm.training.sweep import run_all


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'mimicnorm.training' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mimicnorm.training.{_WHERE[name]}"), name)
