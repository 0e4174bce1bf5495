from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from sample import LAYER, comparison

from mimicnorm.report import columns, page, rows

VOID = {"meta", "link"}


class Parsed(HTMLParser):
    """The tables, texts and links of a page; every tag must be closed in its turn."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.titles: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "title":
            self.titles.append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "title":
            self.titles[-1] += data


@pytest.fixture(scope="module")
def data():
    return comparison()


@pytest.fixture(scope="module")
def parsed(data):
    return Parsed(page(data))


def test_the_summary_table_is_that_of_the_terminal(parsed, data):
    head, *body = parsed.tables[0]
    assert head == [column.heading for column in columns(data)]
    assert body == rows(data)


def test_curves_carry_the_numbers_of_the_json(parsed, data):
    for m in data["methods"]:
        for epoch in (1, 2, 3):
            values = [line["top1"] for r in m["runs"] for line in r["history"] if line["epoch"] == epoch]
            hints = [t for t in parsed.titles if t.startswith(f"{m['label']}, epoch {epoch}: ")]
            if values:
                assert f"{m['label']}, epoch {epoch}: {100 * sum(values) / len(values):.4g}" in hints[0]
                assert len(hints) >= 2  # accuracy and training loss
            else:
                assert not hints


def test_bars_are_as_long_as_their_values(parsed, data):
    bars, inside = {}, None
    for tag, attributes in parsed.attributes:
        if tag == "svg":
            inside = (attributes["class"] or "").split()[0]
            bars[inside] = []
        elif tag == "rect":
            bars[inside].append(float(attributes["width"]))
    kept = [m["memory"]["saved_bytes_per_image"] for m in data["methods"][:2]]
    assert bars["kept"][1] / bars["kept"][0] == pytest.approx(kept[1] / kept[0], abs=0.002)
    assert bars["time"][1] / bars["time"][0] == pytest.approx(0.91, abs=0.002)
    assert len(bars["peak"]) == 2


def test_nothing_is_loaded_from_elsewhere(parsed, data):
    assert not re.search(r"https?://|@import|url\(", page(data))
    links = [attributes.get(key) for _, attributes in parsed.attributes for key in ("href", "src") if key in attributes]
    assert links == ["data:,"]


def test_plan_command_versions_and_states_are_shown(parsed, data):
    text = page(data)
    assert parsed.tables[1][1] == LAYER
    assert "mimicnorm compare --methods &#x27;a&lt;b&#x27;" in text
    assert "torch 2.13.0" in text
    assert "Not finished yet: 6 of 8 runs are in" in text
    assert "nonorm (diverged at step 17, 17)" in text
    assert text.count("✕</text>") >= 2
    assert "<linear>" not in text


def test_a_page_without_any_result_yet(data):
    fresh = comparison()
    for m in fresh["methods"]:
        m.update(runs=[], accuracy=None, time=None, memory=None, largest_lr=None)
    assert page(fresh).count("No epoch was finished.") == 3
    Parsed(page(fresh))


def test_more_methods_than_colours():
    many = comparison()
    many["methods"] = many["methods"][:1] * 12
    assert "c9" not in {c for _, a in Parsed(page(many)).attributes for c in (a.get("class") or "").split()}


def test_what_is_not_equal_is_said(data):
    assert "number of steps) is equal.</p>" in page(data)
    unequal = comparison()
    unequal["methods"][3]["plan"]["method"] = {"name": "fixup"}
    assert "(scalars) of fixup learn at 0.1 times the rate, as its authors prescribe.</p>" in page(unequal)
    unequal["settings"]["scalar_rate"] = 1.0
    assert "number of steps) is equal.</p>" in page(unequal)


def test_wide_tables_scroll_and_say_so(parsed, data):
    inside = [attributes.get("class") for tag, attributes in parsed.attributes if tag in ("div", "table", "p")]
    before_tables = [inside[at - 1] for at, name in enumerate(inside) if name is None and inside[at - 1] == "scroll"]
    assert len(before_tables) >= len(parsed.tables)
    assert "scroll it sideways" in page(data)
    assert "in the JSON file beside it" in page(data)
