"""The page: what it shows, that every value is escaped, that nothing is loaded from elsewhere."""

from __future__ import annotations

import re
import sys
from xml.etree import ElementTree

import pytest
from sample import LAYER, comparison

from mimicnorm.report import columns, page, rows

SCRIPT = "<script>alert('\"&</script>"


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table. The page is well-formed XML, or this fails."""
    root = ElementTree.fromstring(text)
    return [[["".join(cell.itertext()) for cell in row] for row in t.iter("tr")] for t in root.iter("table")]


@pytest.fixture(scope="module")
def text():
    return page(comparison())


def test_the_summary_table_is_that_of_the_terminal(text):
    head, *body = tables(text)[0]
    assert head == [column.heading for column in columns(comparison())]
    assert body == rows(comparison())
    # on a phone each method is a card, and the head of the table is not shown
    cells = [c for c in ElementTree.fromstring(text).iter("td") if c.get("data-column")]
    assert [c.get("data-column") for c in cells] == [name.replace("\n", " ") for name in head[1:]] * len(body)


def leaves(value, path=()):
    """The path of every string and number in a JSON value."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    elif value is not None:
        yield path


def test_a_script_in_any_field_is_escaped(text, monkeypatch):
    """Fields that are formatted as numbers raise instead of printing; all others are shown as text."""
    # The figures' texts are in test_plots.
    monkeypatch.setattr(sys.modules["mimicnorm.report.page"], "element", lambda *_: "")
    rendered = set()
    for path in leaves(comparison()):
        data = target = comparison()
        for key in path[:-1]:
            target = target[key]
        target[path[-1]] = SCRIPT
        try:
            made = page(data)
        except (TypeError, ValueError):
            continue
        assert "<script" not in made, path
        tables(made)
        if "&lt;script&gt;" in made:
            rendered.add(path[-1])
    texts = {"label", "summary", "command", "model", "data", "torch", "system", "device", "why_not"}
    numbers = {"classes", "batch", "threads"}  # printed without a number format
    assert texts | numbers <= rendered
    data = comparison()
    data["settings"][SCRIPT] = data["provenance"]["versions"][SCRIPT] = "1"
    data["data"]["shape"] = [SCRIPT]
    made = page(data)
    assert made.count("&lt;script&gt;") == 3
    assert "<script" not in made


def test_nothing_is_loaded_from_elsewhere(text):
    assert not re.search(r"@import|url\((?!#)", text)
    elements = list(ElementTree.fromstring(text).iter())
    assert not {"script", "img", "iframe", "object", "embed"} & {element.tag for element in elements}
    links = {value for e in elements for key, value in e.items() if key.endswith(("href", "src", "srcset"))}
    inside = {link[1:] for link in links if link.startswith("#")}
    assert links - {f"#{name}" for name in inside} == {"data:,"}
    assert inside | set(re.findall(r"url\(#(\w+)\)", text)) <= {element.get("id") for element in elements}


def test_plan_command_versions_and_states_are_shown(text):
    assert page(comparison()) == text
    assert tables(text)[1][1] == LAYER
    assert "mimicnorm compare --methods &#39;a&lt;b&#39;" in text
    assert "torch 2.13.0" in text
    assert "Not finished yet: 6 of 8 runs are in" in text
    assert "nonorm diverged at step 17, 17." in text
    assert text.count("<svg") == 6
    assert text.count("<table") == text.count('<div class="scroll"><table') == 5


def test_a_page_without_any_result_yet():
    fresh = comparison()
    for m in fresh["methods"]:
        m.update(runs=[], accuracy=None, time=None, memory=None, largest_lr=None)
    text = page(fresh)
    assert text.count("No epoch was finished.") == 3
    assert text.count("Not measured.") == 3
    tables(text)


def test_without_matplotlib_the_page_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = page(comparison())
    assert text.count("No figure: figures need matplotlib: pip install matplotlib.") == 6
    tables(text)


def test_learning_rates_of_scalars_that_differ_are_shown(text):
    assert "number of steps) is equal.</p>" in text
    unequal = comparison()
    unequal["methods"][3]["plan"]["method"] = {"name": "fixup"}
    assert "equal, except that the scalars of fixup learn at 0.1 times the rate, as its authors" in page(unequal)
    unequal["settings"]["scalar_rate"] = 1.0
    assert "number of steps) is equal.</p>" in page(unequal)


def test_the_conclusion_stands_first_and_the_glossary_is_closed(text):
    said = "So far: mimicnorm+residual=&lt;linear&gt; against batchnorm: accuracy undecided (+2.5 points [-2.1, +7.1])"
    assert text.index(said) < text.index("The same network") < text.index("nonorm diverged")
    assert "<details open" not in text
    assert "So far" not in page(comparison() | {"status": "done"})


def test_a_tiny_network_says_nothing_about_the_speed_of_large_ones(text):
    assert "A step of this network takes 12 ms" in text
    slow = comparison()
    slow["methods"][0]["time"]["seconds"] = 1.0
    assert "A step of this network" not in page(slow)
    slow["methods"][0]["time"] = slow["methods"][1]["time"] = None
    assert "A step of this network" not in page(slow)
