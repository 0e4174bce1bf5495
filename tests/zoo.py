"""torchvision and timm for the tests: models that nobody here wrote.

torchvision's wheels are built for CUDA and do not import with a CPU build of PyTorch unless two
operators they expect are declared first.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

_KEPT: list = []  # a library's definitions live as long as the object


def _declare_operators() -> None:
    if torch.version.cuda is None and not _KEPT:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


@functools.cache
def torchvision() -> ModuleType:
    """The imported torchvision."""
    _declare_operators()
    return importlib.import_module("torchvision")


@functools.cache
def timm() -> ModuleType:
    """The imported timm."""
    torchvision()
    return importlib.import_module("timm")
