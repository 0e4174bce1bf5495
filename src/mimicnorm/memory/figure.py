"""A picture of the memory over one training step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mimicnorm import pictures
from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.comparison import Comparison
from mimicnorm.memory.tracker import CATEGORIES
from mimicnorm.memory.units import format_bytes

_COLOURS = {
    "parameters": "#4c5c78",
    "inputs": "#a9b665",
    "optimizer_state": "#8b7fb5",
    "gradients": "#d98c5f",
    "activations": "#5ba3a0",
    "temporary": "#cfcfcf",
}


def plot(what: Analysis | Comparison | Mapping[str, Analysis], path: str | Path) -> None:
    """Draw the memory alive at each operation of the step, stacked by what it is for, to an image file.

    Several analyses stand side by side on one scale, three in a row, each with its peak marked.

    Example:
        >>> plot(compare(model, (256, 3, 224, 224)), "memory.png")  # doctest: +SKIP
    """
    pictures.require_picture(path)
    if isinstance(what, Comparison):
        what = what.analyses
    analyses = {"": what} if isinstance(what, Analysis) else dict(what)
    unit = 2**30 if max(a.peak_bytes for a in analyses.values()) >= 2**30 else 2**20
    columns = min(len(analyses), 3)
    rows = -(-len(analyses) // columns)
    figure, grid = pictures.canvas(rows, columns, 1.5 + 4 * columns, 0.4 + 3.4 * rows, sharey=True)
    panels = list(grid.flat)
    for panel, (name, analysis) in zip(panels, analyses.items(), strict=False):
        _draw(panel, analysis, unit)
        panel.set_title(f"{name}  batch {analysis.batch}".strip(), fontsize=10, pad=16)
    for empty in panels[len(analyses) :]:
        empty.set_visible(False)
    for first in panels[::columns]:
        first.set_ylabel("GiB alive" if unit == 2**30 else "MiB alive")
    figure.supxlabel("operations of one training step", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    pictures.save(figure, path, dpi=150, palette=None)


def _draw(panel, analysis: Analysis, unit: int) -> None:
    timeline = analysis.timeline
    layers = [[getattr(moment, category) / unit for moment in timeline] for category in CATEGORIES]
    labels = [category.replace("_", " ") for category in CATEGORIES]
    panel.stackplot(range(len(timeline)), layers, labels=labels, colors=[_COLOURS[c] for c in CATEGORIES])
    starts = {moment.phase: index for index, moment in reversed(list(enumerate(timeline)))}
    for phase, start in starts.items():
        panel.axvline(start, color="black", linewidth=0.5, alpha=0.5)
        panel.annotate(
            phase, (start, 1), xycoords=("data", "axes fraction"), xytext=(2, 3), textcoords="offset points", fontsize=7
        )
    at = max(range(len(timeline)), key=lambda index: timeline[index].total)
    panel.plot([at], [analysis.peak_bytes / unit], "v", color="black", markersize=5)
    panel.axhline(analysis.peak_bytes / unit, color="black", linewidth=0.6, linestyle=":")
    panel.annotate(
        f"peak {format_bytes(analysis.peak_bytes)}",
        (len(timeline), analysis.peak_bytes / unit),
        xytext=(-3, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    panel.set_xlim(0, len(timeline))
    panel.margins(y=0.12)
    panel.set_xticks([])
