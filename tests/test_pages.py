"""The tables of the pages are those that the benchmarks' results make."""

from __future__ import annotations

import ast
import importlib
import json
import operator
import re
import sys
from pathlib import Path

import pytest

import mimicnorm

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
pages = importlib.import_module("pages")


@pytest.mark.parametrize("page", pages.PAGES)
def test_a_page_has_what_the_results_say(page):
    text = (ROOT / page).read_text()
    assert pages.filled(text) == text, "run python benchmarks/pages.py"


def test_a_page_that_says_something_else_is_noticed():
    text = (ROOT / "README.md").read_text()
    number = json.loads((ROOT / "results/coverage.json").read_text())["outcomes"]["converted"]
    assert pages.filled(text.replace(str(number), "1")) == text


def test_the_picture_has_what_the_results_say():
    overview = importlib.import_module("overview")
    for name, columns in overview.FILES.items():
        assert (overview.FIGURES / name).read_text() == overview.drawing(columns), "run python benchmarks/overview.py"


def test_every_block_is_on_a_page():
    text = "".join((ROOT / page).read_text() for page in pages.PAGES)
    assert all(f"<!-- results: {name} -->" in text for name in pages.MAKERS)


def test_the_map_names_every_file():
    """The table of docs/architecture.md lists the files of each package: all of them, and no others."""
    mapped: dict[str, set[str]] = {}
    package = ""
    for line in (ROOT / "docs/architecture.md").read_text().splitlines():
        row = re.fullmatch(r"\| (`(\w+)/`)? ?\|.*\| (`.+`) \|", line)
        if row is not None:
            package = row[2] or package
            mapped.setdefault(package, set()).update(re.findall(r"`(\w+)`", row[3]))
    source = ROOT / "src/mimicnorm"
    files = {
        folder.name: {f.stem for f in folder.glob("*.py") if not f.stem.startswith("__")}
        for folder in source.iterdir()
        if (folder / "__init__.py").exists()
    }
    assert mapped == files


def test_every_link_leads_to_a_file():
    broken = [
        (page.name, link)
        for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
        for link in re.findall(r"(?:\]\(|src(?:set)?=\")([^)#\s\"]+)", page.read_text())
        if not link.startswith("http") and not (page.parent / link).exists()
    ]
    assert not broken


def test_every_name_on_a_page_exists():
    texts = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    plain = re.sub("^:::.*", "", "\n".join(texts), flags=re.MULTILINE)  # those are for the site, which checks them
    names = set(re.findall(r"(?<![\w/.-])(?:mimicnorm|mn)((?:\.[A-Za-z_]\w*)+)", plain))
    assert {".compare.run", ".report.page"} <= names
    assert {name.split(".")[1] for name in names} <= {*mimicnorm.__all__}  # there without an import by somebody else
    for name in names:
        operator.attrgetter(name[1:])(mimicnorm)  # AttributeError names what is missing


def _literals(path: Path) -> list[str]:
    """Every text of a source file, a formatted value as an ellipsis."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    formatted = [n for n in nodes if isinstance(n, ast.JoinedStr)]
    inside = {id(part) for n in formatted for part in n.values}
    plain = [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in inside]
    return plain + ["".join(p.value if isinstance(p, ast.Constant) else "…" for p in n.values) for n in formatted]


def test_every_quoted_message_is_one_of_the_library():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("### ")]
    quoted = [message for line in headings for message in re.findall(r"`([^`]+)`", line)]
    texts = [text for path in (ROOT / "src").rglob("*.py") for text in _literals(path)]
    assert len(quoted) > 30
    assert not [message for message in quoted if not any(message in text for text in texts)]


def test_every_method_has_a_card():
    cards = re.findall(r"^## (\w+)$", (ROOT / "docs/methods.md").read_text(), flags=re.MULTILINE)
    assert set(cards) == {type(method()).__name__ for method in mimicnorm.methods.METHODS.values()}
