"""The tables of the pages are those that the benchmarks' results make."""

from __future__ import annotations

import importlib.util
import operator
import re
from pathlib import Path

import pytest

import mimicnorm

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location("pages", ROOT / "benchmarks" / "pages.py")
assert _spec is not None
assert _spec.loader is not None
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_page_has_what_the_results_say(page):
    text = (ROOT / page).read_text()
    assert pages.filled(text) == text, "run python benchmarks/pages.py"


def test_every_block_is_on_a_page():
    text = "".join((ROOT / page).read_text() for page in pages.PAGES)
    assert all(f"<!-- results: {name} -->" in text for name in pages.MAKERS)


def test_the_map_names_every_file():
    page = (ROOT / "docs/architecture.md").read_text()
    source = ROOT / "src/mimicnorm"
    files = {str(f.relative_to(source).with_suffix("")) for f in source.rglob("*.py") if not f.stem.startswith("__")}
    words = set(re.findall(r"\w+", page))
    assert not {name for name in files if not set(name.split("/")) <= words}


def test_every_name_on_a_page_exists():
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    names = {name for text in texts for name in re.findall(r"(?<![\w/.-])(?:mimicnorm|mn)((?:\.[A-Za-z_]\w*)+)", text)}
    assert {".compare.run", ".report.page"} <= names
    assert {name.split(".")[1] for name in names} <= {*mimicnorm.__all__}  # there without an import by somebody else
    for name in names:
        operator.attrgetter(name[1:])(mimicnorm)  # AttributeError names what is missing
