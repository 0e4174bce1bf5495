"""Packages that only some data sets need."""

from __future__ import annotations

import importlib
from typing import Any

from mimicnorm.errors import DataError


def require(module: str) -> Any:
    """Import a package, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is not installed. Install it with: pip install 'mimicnorm[data]'") from error
