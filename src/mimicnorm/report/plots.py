"""Plots as inline SVG: nothing to load, readable in light and dark (colours are the page's ``--c0`` ... ``--c8``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 40, 12, 10, 38
LETTER, MOST_LETTERS = 7.4, 25  # the width of one, and how many of a name are shown


@dataclass(frozen=True)
class Line:
    """A curve: several runs, thin, and their mean, thick.

    Attributes:
        runs: The (x, value) of each run.
        colour: Number of its colour.
        lost: Which runs ended early, as they diverged.
    """

    name: str
    runs: Sequence[Sequence[tuple[float, float]]]
    colour: int
    lost: Sequence[bool]

    def by_place(self) -> dict[float, list[float]]:
        """For each x, the values of all runs that came so far."""
        found: dict[float, list[float]] = {}
        for place, value in sorted(point for run in self.runs for point in run):
            found.setdefault(place, []).append(value)
        return found


@dataclass(frozen=True)
class Bar:
    """A bar with the text behind it and, if known, the interval of its value."""

    name: str
    value: float
    text: str
    colour: int
    low: float | None = None
    high: float | None = None


def curves(lines: Sequence[Line], *, x: str, y: str, shown: Callable[[float], str], kind: str) -> str:
    """Every run as a thin line and their mean as a thick one; values on hover; logarithmic over a wide range."""
    points = [point for line in lines for run in line.runs for point in run]
    places, values = [place for place, _ in points], [value for _, value in points]
    if not values:
        return '<p class="none">No epoch was finished.</p>'
    low, high = min(values), max(values)
    log = low > 0 and high / low > 20
    scale = math.log10 if log else float
    ticks = _log_ticks(low, high) if log else _ticks(low, high)
    bottom, top = scale(min(low, *ticks)), scale(max(high, *ticks))
    first, last = min(places), max(max(places), min(places) + 1)

    def at(place: float, value: float) -> tuple[float, float]:
        across = (place - first) / (last - first)
        up = (scale(value) - bottom) / ((top - bottom) or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = []
    for tick in ticks:
        _, level = at(first, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{shown(tick)}</text>')
    for tick in _whole_ticks(first, last):
        parts.append(f'<text x="{at(tick, low)[0]:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    for line in lines:
        parts += _curve(line, at, x, shown)
    label = escape(f"{y} by {x}", quote=True)
    return _svg(f"{kind} curves", label, HEIGHT, parts)


def _curve(line: Line, at: Callable[[float, float], tuple[float, float]], x: str, shown: Callable) -> list[str]:
    parts = [f'<g class="line c{line.colour}" data-name="{escape(line.name, quote=True)}">']
    by_place = line.by_place()
    if len(line.runs) > 1:
        parts += [f'<polyline class="run" points="{_path([at(*p) for p in run])}"/>' for run in line.runs]
    means = {place: sum(values) / len(values) for place, values in by_place.items()}
    parts.append(f'<polyline points="{_path([at(*c) for c in means.items()])}"/>')
    for place, values in by_place.items():
        spread = f" ({shown(min(values))} to {shown(max(values))}, {len(values)} runs)" if len(values) > 1 else ""
        hint = escape(f"{line.name}, {x} {place:g}: {shown(means[place])}{spread}")
        across, down = at(place, means[place])
        parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.5"/>')
        parts.append(f'<circle class="hit" cx="{across:.1f}" cy="{down:.1f}" r="9"><title>{hint}</title></circle>')
    for run, lost in zip(line.runs, line.lost, strict=True):
        if lost and run:
            across, down = at(*run[-1])
            parts.append(f'<text class="lost" x="{across:.1f}" y="{down + 6:.1f}" text-anchor="middle">✕</text>')
    return [*parts, "</g>"]


def bars(items: Sequence[Bar], *, label: str, kind: str) -> str:
    """Horizontal bars from zero, each with its text; a whisker where there is an interval."""
    if not items:
        return '<p class="none">Not measured.</p>'
    longest_name = min(max(len(b.name) for b in items), MOST_LETTERS)
    step, name_width, text_width = 30, max(110, round(LETTER * longest_name) + 10), 130
    height = step * len(items) + 8
    longest = max(max(b.value, b.high or 0) for b in items) or 1
    room = WIDTH - name_width - text_width
    parts = []
    for row, b in enumerate(items):
        top = row * step + 6
        length, middle = b.value / longest * room, top + 10
        short = b.name if len(b.name) <= MOST_LETTERS else b.name[: MOST_LETTERS - 1] + "…"
        parts.append(f'<g class="bar c{b.colour}"><title>{escape(f"{b.name}: {b.text}")}</title>')
        parts.append(f'<text x="{name_width - 8}" y="{middle + 4}" text-anchor="end">{escape(short)}</text>')
        parts.append(f'<rect x="{name_width}" y="{top}" width="{max(length, 1):.1f}" height="20" rx="2"/>')
        if b.low is not None and b.high is not None:
            ends = [name_width + v / longest * room for v in (b.low, b.high)]
            path = f"M{ends[0]:.1f} {middle}H{ends[1]:.1f}" + "".join(f"M{e:.1f} {middle - 4}v8" for e in ends)
            parts.append(f'<path class="whisker" d="{path}"/>')
        after = name_width + max(length, (b.high or 0) / longest * room) + 7
        parts.append(f'<text x="{after:.1f}" y="{middle + 4}">{escape(b.text)}</text></g>')
    return _svg(f"{kind} bars", escape(label, quote=True), height, parts)


def _svg(classes: str, label: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg class="{classes}" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
    return head + "".join(parts) + "</svg>"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that enclose the range."""
    raw = max(high - low, abs(high) * 1e-3, 1e-9) / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * 0.999)
    return [k * step for k in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = (1,) if len(decades) > 4 else (1, 3)
    all_ticks = [m * 10.0**d for d in decades for m in marks]
    inside = [t for t in all_ticks if low <= t <= high]
    below = [t for t in all_ticks if t < low][-1:]
    return [*below, *inside, *[t for t in all_ticks if t > high][:1]]


def _whole_ticks(first: float, last: float) -> list[int]:
    step = max(1, math.ceil((last - first) / 10))
    return list(range(math.ceil(first), math.floor(last) + 1, step))
