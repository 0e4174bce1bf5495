from __future__ import annotations

import re

import pytest

from mimicnorm.report.plots import HEIGHT, LETTER, WIDTH, Bar, Line, _log_ticks, _ticks, bars, curves


def points(svg: str) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in re.findall(r"(-?[\d.]+),(-?[\d.]+)", svg)]


@pytest.mark.parametrize("values", [(0.1, 0.9), (0.5, 0.5), (0.0, 0.0), (-3.0, 4.0), (1e-6, 1e6), (99.1, 99.2)])
def test_every_point_is_inside_the_picture(values):
    line = Line("a", [list(enumerate(values, 1)), list(enumerate(reversed(values), 1))], 0, [False, True])
    drawn = points(curves([line], x="epoch", y="loss", shown=str, kind="k"))
    assert len(drawn) == 6
    assert all(0 <= a <= WIDTH and 0 <= b <= HEIGHT for a, b in drawn)


def test_ticks_are_round_and_enclose():
    assert _ticks(0.03, 0.97) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert _log_ticks(0.05, 2.0) == pytest.approx([0.03, 0.1, 0.3, 1, 3])


def test_a_wide_range_is_logarithmic():
    line = Line("a", [[(1, 100.0), (2, 1.0), (3, 0.01)]], 0, [False])
    (_, a), (_, b), (_, c) = points(curves([line], x="epoch", y="loss", shown=str, kind="k"))
    assert b - a == pytest.approx(c - b, abs=0.2)


@pytest.mark.parametrize("name", ["a", "mimicnorm+residual=linear", "x" * 60])
def test_names_and_texts_of_bars_are_inside_the_picture(name):
    drawn = bars([Bar(name, 2.0, "1.132 [0.922, 1.360]", 0, 1.5, 3.0)], label="Time", kind="k")
    (right, shown), (left, text) = re.findall(r'<text x="([\d.]+)"[^>]*>([^<]*)</text>', drawn)
    assert float(right) >= (LETTER - 0.2) * len(shown)
    assert float(left) + 6 * len(text) <= WIDTH
    assert shown == name or shown.endswith("…")
