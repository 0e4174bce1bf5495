"""One self-contained HTML page from a comparison's JSON: no script, no font, no image from elsewhere.

The text and the style are in ``page.html``, a jinja2 template that escapes every value.
"""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from mimicnorm.memory.units import format_bytes
from mimicnorm.methods import METHODS
from mimicnorm.report.conclusion import about_time, conclusions
from mimicnorm.report.plots import COLOURS, Bar, bars, curves, element, points_of
from mimicnorm.report.summary import about_memory, columns, evaluated_on, interval, rounds, rows, title
from mimicnorm.surgery.plan import count

if TYPE_CHECKING:
    from jinja2 import Template


def page(data: dict[str, Any]) -> str:
    """Return the page as text.

    Args:
        data: The content of ``compare.json``.
    """
    methods = data["methods"]
    seeds = sorted({m["seeds"] for m in methods})
    return _template().render(
        data,
        colours=COLOURS,
        title=title(data),
        conclusions=conclusions(data),
        about_time=about_time(data),
        columns=columns(data),
        images=evaluated_on(data),
        rows=rows(data),
        seeds=count(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds",
        runs_done=sum(len(m["runs"]) for m in methods),
        runs_planned=sum(m["seeds"] for m in methods),
        scalar_rates=_scalar_rates(data),
        diverged_steps=[[run["step"] for run in m["runs"] if run["status"] == "diverged"] for m in methods],
        curve=lambda quantity, factor=1.0: _curve(methods, quantity, factor),
        memory_bars=lambda quantity: _bars(_memory_bars(methods, quantity)),
        time_bars=_bars(_time_bars(methods)),
        rounds=rounds(data),
        interval=interval(data),
        about_memory=about_memory(data),
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    source = files("mimicnorm.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(source)


def _scalar_rates(data: dict[str, Any]) -> list[tuple[str, float]]:
    """Return (label, factor) of the methods whose authors prescribe another learning rate for scalars."""
    if data["settings"].get("scalar_rate") is not None:
        return []
    known = [(m["label"], METHODS.get(m["plan"]["method"].get("name", ""))) for m in data["methods"]]
    return [(label, method.scalar_rate) for label, method in known if method and method.scalar_rate != 1]


def _curve(methods: list[dict[str, Any]], quantity: str, factor: float) -> str:
    if not any(points_of(run, quantity) for m in methods for run in m["runs"]):
        return ""
    return element(lambda axis: curves(axis, methods, quantity, factor), 3.0)


def _bars(items: list[Bar]) -> str:
    return element(lambda axis: bars(axis, items), 0.1 + 0.5 * len(items)) if items else ""


def _memory_bars(methods: list[dict[str, Any]], quantity: str) -> list[Bar]:
    predicted = [(number, m["label"], (m["memory"] or {}).get(quantity)) for number, m in enumerate(methods)]
    return [Bar(n, label, value, format_bytes(round(value))) for n, label, value in predicted if value is not None]


def _time_bars(methods: list[dict[str, Any]]) -> list[Bar]:
    items = []
    for number, m in enumerate(methods):
        if m["time"]:
            value, low, high = (m["time"]["ratio"][key] for key in ("value", "low", "high"))
            items.append(Bar(number, m["label"], value, f"{value:.3f} [{low:.3f}, {high:.3f}]", low, high))
    return items
