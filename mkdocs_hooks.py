"""What the site needs beside mkdocs: links that leave ``docs/``, and examples of docstrings as code.

Links to results and source work on the site as they do in the repository. A linked file becomes a file of the site
under ``files/``, source code with ``.txt`` appended so that browsers show it. A link to a file that does not exist
stays as it is, and the strict build fails on it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent
_LINK = re.compile(r"(?<=\]\()\.\./([^)#\s]+)(?=[)#])")
_SHOWN = {".html", ".json", ".png", ".svg", ".txt"}


def _place(path: str) -> str:
    return f"files/{path}" if Path(path).suffix in _SHOWN else f"files/{path}.txt"


def on_files(files: Files, config: Any) -> Files:
    """Add every file of the repository that a page links to."""
    pages = [file.content_string for file in files.documentation_pages()]
    for path in sorted({path for text in pages for path in _LINK.findall(text) if (ROOT / path).is_file()}):
        files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point the links there."""
    return _LINK.sub(lambda link: _place(link[1]) if (ROOT / link[1]).is_file() else link[0], markdown)


class Examples(griffe.Extension):
    """Show "Example:" of a docstring as the section "Examples:", whose ``>>>`` lines are code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
