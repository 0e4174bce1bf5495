"""The figures: the numbers of the JSON, texts inside the picture and escaped, the page's colours."""

from __future__ import annotations

import math
import re

import pytest
from sample import comparison

from mimicnorm.pictures import canvas
from mimicnorm.report.plots import WIDTH, Bar, bars, curves, element


def drawn(draw, height=3.4):
    figure, (axis,) = canvas(1, 1, WIDTH, height)
    draw(axis)
    figure.draw_without_rendering()
    return figure, axis


def test_curves_have_the_numbers_of_the_json():
    methods = comparison()["methods"]
    _, axis = drawn(lambda axis: curves(axis, methods, "top1", 100))
    means = {line.get_label(): line.get_xydata().tolist() for line in axis.lines if line.get_label()[0] != "_"}
    for m in methods:
        expected = []
        for epoch in (1, 2, 3):
            values = [line["top1"] for run in m["runs"] for line in run["history"] if line["epoch"] == epoch]
            expected += [[epoch, pytest.approx(100 * sum(values) / len(values))]] if values else []
        assert means[m["label"]] == expected
    runs = [line for line in axis.lines if line.get_alpha()]
    assert len(runs) == 6
    assert [line.get_xydata().tolist() for line in axis.lines if line.get_marker() == "x"] == 2 * [[[1, 20.0]]]


@pytest.mark.parametrize(
    ("values", "scale"),
    [((0.5, 0.5), "linear"), ((0.0, 0.0), "linear"), ((-3.0, 400.0), "linear"), ((0.1, 1.9), "linear"),
     ((0.05, 2.0), "log"), ((1e-6, 1e6), "log")],
)  # fmt: skip
def test_scales_and_ticks(values, scale):
    history = [{"epoch": epoch, "loss": value} for epoch, value in enumerate((*values, None, math.inf), 1)]
    method = {"label": "a", "runs": [{"history": history, "status": "done"}]}
    _, axis = drawn(lambda axis: curves(axis, [method], "loss"))
    assert axis.get_yscale() == scale
    bottom, top = axis.get_ylim()
    assert bottom <= min(values) <= max(values) <= top
    labels = [t.get_text() for t in axis.get_yticklabels() if bottom <= t.get_position()[1] <= top]
    assert 2 <= len(labels) <= 14
    assert not any("$" in label for label in labels)


def test_bars_have_values_names_and_whiskers():
    items = [Bar(0, "a", 2.0, "2 s"), Bar(1, "b", 3.0, "3 s", 2.5, 3.25)]
    _, axis = drawn(lambda axis: bars(axis, items))
    assert [patch.get_width() for patch in axis.patches] == [2.0, 3.0]
    (whisker,) = axis.containers[1].lines[2]
    assert whisker.get_segments()[0].tolist() == [[2.5, 1.0], [3.25, 1.0]]
    right = axis.figure.axes[1]
    assert [t.get_text() for t in (*axis.get_yticklabels(), *right.get_yticklabels())] == ["a", "b", "2 s", "3 s"]


@pytest.mark.parametrize("name", ["a", "mimicnorm+residual=linear", "x" * 60])
def test_names_and_texts_of_bars_are_inside_the_picture(name):
    figure, axis = drawn(lambda axis: bars(axis, [Bar(0, name, 2.0, "1.132 [0.922, 1.360]", 1.5, 3.0)]), 0.7)
    (shown,), (text,) = (a.get_yticklabels() for a in figure.axes)
    assert shown.get_window_extent().x0 >= 0
    assert text.get_window_extent().x1 <= figure.bbox.x1
    assert axis.get_window_extent().width > 60
    assert shown.get_text() == name or shown.get_text().endswith("…")


def test_texts_are_escaped_and_colours_are_those_of_the_page():
    text = element(lambda axis: bars(axis, [Bar(7, "<b>$x$&", 1.0, "<script>")]), 0.7)
    assert "&lt;b&gt;$x$&amp;" in text
    assert "&lt;script&gt;" in text
    assert "fill: var(--c7)" in text
    assert not re.search(r"#0[0-9a-f]{5}", text)
