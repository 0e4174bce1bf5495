"""The page's figures: matplotlib draws them as inline SVG, the page's style sheet colours them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mimicnorm.errors import PictureError
from mimicnorm.pictures import canvas, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = 9
WIDTH = 4.4  # inches
LONGEST_NAME = 25
SPACING = 0.075  # of the names at the ends of lines, as a fraction of the height

# Placeholders: `element` replaces them by the style sheet's variables, which differ in light and dark.
INK, RULE = "#010101", "#010102"
_VARIABLES = {INK: "var(--ink)", RULE: "var(--rule)"}
_VARIABLES |= {f"#01020{number}": f"var(--c{number})" for number in range(COLOURS)}


class Bar(NamedTuple):
    """The bar of one method: its number chooses the colour; ``low`` and ``high`` end its whisker."""

    number: int
    name: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


def element(draw: Callable[[Axes], None], height: float) -> str:
    """Return the figure that ``draw`` makes as an ``<svg>`` element; without matplotlib, say so in a paragraph."""
    try:
        figure, (axis,) = canvas(1, 1, WIDTH, height)
    except PictureError as error:
        return f"<p>No figure: {error}.</p>"
    axis.tick_params(colors=INK, length=0, labelsize=11)
    draw(axis)
    text = svg(figure)
    text = re.sub(r' id="[\w.]+_\d+"', "", text)  # figure_1, axes_1, ...: the same in every figure of the page
    text = re.sub(r'font-family: [^;"]*;? ?', "", text)  # the page's font
    return re.sub("|".join(_VARIABLES), lambda match: _VARIABLES[match[0]], text)


def curves(axis: Axes, methods: Sequence[dict[str, Any]], quantity: str, factor: float = 1.0) -> None:
    """Draw a quantity by epoch: every run thin, the mean over runs thick and named at its end.

    A cross marks where a run diverged. The scale is logarithmic if values differ by more than a factor of 20.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

    drawn: list[float] = []
    ends: list[tuple[int, float, str, str]] = []
    for number, method in enumerate(methods):
        colour = f"#01020{number % COLOURS}"
        by_epoch: dict[int, list[float]] = {}
        for run in method["runs"]:
            points = points_of(run, quantity)
            epochs, values = [epoch for epoch, _ in points], [factor * value for _, value in points]
            for epoch, value in zip(epochs, values, strict=True):
                by_epoch.setdefault(epoch, []).append(value)
            drawn += values
            if len(method["runs"]) > 1:
                axis.plot(epochs, values, linewidth=0.8, alpha=0.45, color=colour)
            if run["status"] == "diverged":
                axis.plot(epochs[-1:], values[-1:], "x", markersize=9, markeredgewidth=2, color=colour)
        means = {epoch: sum(values) / len(values) for epoch, values in sorted(by_epoch.items())}
        axis.plot([*means], [*means.values()], "o-", linewidth=1.8, markersize=3, label=method["label"], color=colour)
        if means:
            ends.append((*list(means.items())[-1], method["label"], colour))
    low, high = min(drawn), max(drawn)
    if low > 0 and high > 20 * low:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 1e4 * low else (1,)))
        axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("epoch", color=INK, fontsize=11)
    axis.grid(axis="y", color=RULE)
    axis.spines[:].set_visible(False)
    name_ends(axis, ends)


def name_ends(axis: Axes, ends: Sequence[tuple[int, float, str, str]]) -> None:
    """Write the name of each line at its end; those at the right edge one below the other, however close they end.

    Args:
        axis: The axis of the lines.
        ends: Of each line: epoch, value, name and colour.
    """
    last = max((epoch for epoch, *_ in ends), default=0)
    names = {name for _, _, name, _ in ends}
    axis.set_ylim(axis.get_ylim())  # the heights below depend on the limits
    heights = [axis.transAxes.inverted().transform(axis.transData.transform((x, y)))[1] for x, y, *_ in ends]
    at_edge = sorted((n for n, end in enumerate(ends) if end[0] == last), key=lambda n: -heights[n])
    free = 1.0  # above it, the edge is taken
    for place, number in enumerate(at_edge):
        heights[number] = max(min(heights[number], free), SPACING * (len(at_edge) - 1 - place))
        free = heights[number] - SPACING
    for number, (epoch, value, name, colour) in enumerate(ends):
        base, plus, setting = name.partition("+")  # a setting alone, where the method stands beside it
        text = _shortened(plus + setting if setting and base in names else name)
        place, of = ((1.01, heights[number]), "axes fraction") if number in at_edge else ((8, 0), "offset points")
        axis.annotate(text, (epoch, value), place, textcoords=of, va="center", color=colour, fontsize=9.5)


def _shortened(name: str, longest: int = LONGEST_NAME) -> str:
    return _escaped(name if len(name) <= longest else name[: longest - 1] + "…")


def _escaped(text: str) -> str:
    return text.replace("$", r"\$")  # not a formula


def points_of(run: dict[str, Any], quantity: str) -> list[tuple[int, float]]:
    """Return the (epoch, value) pairs of a run; epochs without a finite value are left out."""
    points = [(line["epoch"], line[quantity]) for line in run["history"]]
    return [(epoch, value) for epoch, value in points if value is not None and math.isfinite(value)]


def bars(axis: Axes, items: Sequence[Bar]) -> None:
    """Draw horizontal bars from zero over the whole width, each under its name, its value as text at its end."""
    rows = range(len(items))
    axis.barh(rows, [b.value for b in items], 0.42, color=[f"#01020{b.number % COLOURS}" for b in items])
    longest = max(max(b.value, b.high or 0) for b in items)
    axis.set(ylim=(len(items) - 0.7, -0.75), xlim=(0, longest), xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    for row, b in zip(rows, items, strict=True):
        if b.low is not None and b.high is not None:
            axis.errorbar((b.low + b.high) / 2, row, xerr=(b.high - b.low) / 2, color=INK, capsize=3, linewidth=1)
        axis.text(0, row - 0.3, _shortened(b.name, 40), va="bottom", color=INK, fontsize=11)
        end = max(b.value, b.high or 0)
        axis.annotate(
            _escaped(b.text), (end, row), (6, 0), textcoords="offset points", va="center", color=INK, fontsize=11
        )
