"""Where tables and JSON are printed."""

from __future__ import annotations

import json
from typing import Any

import rich.console


class Console(rich.console.Console):
    """Rich's console, but a closed pipe is left to ``main`` like that of a plain print."""

    def on_broken_pipe(self) -> None:
        """Raise the error of a plain print."""
        raise BrokenPipeError


def print_json(data: dict[str, Any]) -> None:
    """Print data as one line of JSON."""
    print(json.dumps(data))
