"""Write the numbers of README and ``docs/`` from the result files.

    python benchmarks/pages.py

What stands between ``<!-- results: NAME -->`` and ``<!-- end -->`` on a page is made by the function of that name in
``blocks/``. A block whose result file does not exist yet says so.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import blocks
from blocks.text import ROOT

_FILES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.md")))
PAGES = tuple(str(path.relative_to(ROOT)) for path in _FILES)


def _makers() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {}
    for module in pkgutil.iter_modules(blocks.__path__):
        source = importlib.import_module(f"blocks.{module.name}")
        for name, function in inspect.getmembers(source, inspect.isfunction):
            if function.__module__ == source.__name__ != "blocks.text" and not name.startswith("_"):
                assert name not in found, f"two blocks are called {name}"
                found[name] = function
    return found


MAKERS = _makers()


def filled(text: str) -> str:
    """A page with every block as its result file has it."""
    return re.sub(
        r"(<!-- results: (\w+) -->\n\n).*?(\n*<!-- end -->)",
        lambda block: f"{block[1]}{_made(block[2])}\n\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def _made(name: str) -> str:
    try:
        return MAKERS[name]()
    except FileNotFoundError as missing:
        return f"Not measured yet: `{Path(missing.filename).relative_to(ROOT)}` does not exist."


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))
