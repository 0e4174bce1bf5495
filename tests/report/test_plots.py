"""The figures: the numbers of the JSON, texts inside the picture and escaped, the page's colours."""

from __future__ import annotations

import itertools
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
    named = {t.get_text(): t.xy for t in axis.texts}
    assert named["nonorm"] == (1, pytest.approx(20.0))  # a line that ends early is named there
    assert named["batchnorm"][0] == 3
    assert "fixup" not in named  # no run, no line


@pytest.mark.parametrize(
    ("values", "scale"),
    [((0.0, 0.0), "linear"), ((-3.0, 400.0), "linear"), ((0.1, 1.9), "linear"), ((1e-6, 1e6), "log")],
)
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


@pytest.mark.parametrize("name", ["a", "mimicnorm+residual=linear", "x" * 60])
def test_names_and_texts_of_bars_are_inside_the_picture(name):
    figure, axis = drawn(lambda axis: bars(axis, [Bar(0, name, 2.0, "1.132 [0.922, 1.360]", 1.5, 3.0)]), 0.6)
    shown, text = axis.texts
    assert shown.get_window_extent().x0 >= 0
    assert max(t.get_window_extent().x1 for t in (shown, text)) <= figure.bbox.x1
    assert axis.get_window_extent().width > 0.4 * figure.bbox.width
    assert shown.get_text() == name or shown.get_text().endswith("…")


@pytest.mark.parametrize("ends", [(0.5, 0.5, 0.5), (0.1, 0.9, 0.11)])
def test_lines_are_named_at_their_ends_and_names_do_not_overlap(ends):
    labels = ("batchnorm", "mimicnorm", "mimicnorm+residual=linear")
    histories = [[{"epoch": 1, "top1": 0.0}, {"epoch": 2, "top1": end}] for end in ends]
    methods = [
        {"label": label, "runs": [{"history": history, "status": "done"}]}
        for label, history in zip(labels, histories, strict=True)
    ]
    figure, axis = drawn(lambda axis: curves(axis, methods, "top1"))
    assert [t.get_text() for t in axis.texts] == ["batchnorm", "mimicnorm", "+residual=linear"]
    boxes = sorted((t.get_window_extent() for t in axis.texts), key=lambda box: box.y0)
    assert all(below.y0 < above.y0 and below.y1 <= above.y0 + 2 for below, above in itertools.pairwise(boxes))
    assert all(0 <= box.x0 <= box.x1 <= figure.bbox.x1 for box in boxes)
    assert [t.get_color() for t in axis.texts] == [line.get_color() for line in axis.lines]


def test_bars_have_values_names_and_whiskers():
    items = [Bar(0, "a", 2.0, "2 s"), Bar(1, "b", 3.0, "3 s", 2.5, 3.25)]
    _, axis = drawn(lambda axis: bars(axis, items))
    assert [patch.get_width() for patch in axis.patches] == [2.0, 3.0]
    assert axis.containers[1].lines[2][0].get_segments()[0].tolist() == [[2.5, 1.0], [3.25, 1.0]]
    assert [t.get_text() for t in axis.texts] == ["a", "2 s", "b", "3 s"]
    assert axis.get_xlim() == (0, 3.25)  # the longest bar, with its whisker, fills the axis


def test_texts_are_escaped_and_colours_are_those_of_the_page():
    text = element(lambda axis: bars(axis, [Bar(7, "<b>$x$&", 1.0, "<script>")]), 0.7)
    assert "&lt;b&gt;$x$&amp;" in text
    assert "&lt;script&gt;" in text
    assert "fill: var(--c7)" in text
    assert not re.search(r"#0[0-9a-f]{5}", text)
