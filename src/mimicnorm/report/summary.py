"""The summary of a comparison: one row per method, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mimicnorm.memory.analysis import not_counted
from mimicnorm.memory.units import format_bytes
from mimicnorm.surgery.plan import count

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """A column of the summary.

    Attributes:
        explanation: What it shows, in a sentence for someone who never saw it.
        cell: The text for one method.
        shown: Whether the comparison has anything for it.
    """

    heading: str
    explanation: str
    cell: Callable[[dict[str, Any]], str]
    shown: Callable[[dict[str, Any]], bool] = bool


def columns(data: dict[str, Any]) -> list[Column]:
    """The columns that a comparison has something for."""
    first = data["methods"][0]["label"]
    known = (
        Column("method", "What was done with BatchNorm; described below.", _name),
        Column(
            "test\naccuracy, %",
            "Share of test images classified right after the last epoch: the mean over seeds, ± their standard "
            "deviation. A run whose loss stopped being finite diverged, and is counted as such.",
            _accuracy,
        ),
        Column(
            f"against\n{first}",
            f"Difference in accuracy to {first}, in percentage points, with its 95 % confidence interval (Welch's t) "
            "if both have two seeds or more; one seed says little, and the cell says so.",
            lambda m: _difference(m, data["methods"][0]),
            lambda data: len(data["methods"]) > 1,
        ),
        Column(
            "kept\nper image",
            "Memory that one training image occupies from the forward to the backward pass, and as a multiple of "
            f"{first}. It decides how large a batch fits.",
            lambda m: _bytes(m, "saved_bytes_per_image", "saved_ratio"),
        ),
        Column(
            "predicted\npeak",
            f"The most memory in use at any moment of a training step of {data['settings']['batch']} images: weights, "
            f"gradients, momentum and what is kept. Predicted without running it. {about_memory(data)}".rstrip(),
            lambda m: _bytes(m, "peak_bytes", "peak_ratio"),
        ),
        Column(
            "time\nper step",
            f"Median time of one training step on this machine, and as a multiple of {first} with the 95 % "
            "interval of that median. Steps of all methods take turns, so that whatever else the machine does slows "
            "all of them.",
            _time,
            lambda data: any(m["time"] for m in data["methods"]),
        ),
        Column(
            "largest\nlearning rate",
            "The largest learning rate, to a factor of 1.4, at which a short run stays finite and gets better than "
            "guessing.",
            _rate,
            lambda data: any(m["largest_lr"] for m in data["methods"]),
        ),
    )
    return [column for column in known if column.shown(data)]


def rows(data: dict[str, Any]) -> list[list[str]]:
    """The summary's cells, a list per method."""
    return [[column.cell(m) for column in columns(data)] for m in data["methods"]]


def table(data: dict[str, Any]) -> Table:
    """The summary as a rich table."""
    from rich import box
    from rich.table import Table

    made = Table(title=title(data), box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(columns(data)):
        made.add_column(column.heading, justify="right" if number else "left", no_wrap=not number)
    for row in rows(data):
        made.add_row(*row)
    made.caption, made.caption_justify = about_memory(data) or None, "left"
    return made


def about_memory(data: dict[str, Any]) -> str:
    """What the predicted memory is of: device, micro-batches, compiled or not; nothing for older comparisons.

    Example:
        >>> settings = {"micro_batch": 8, "compile": False}
        >>> about_memory({"settings": settings, "methods": [{"memory": {"device": "cpu"}}]})
        'Memory is predicted for cpu, in micro-batches of 8.'
    """
    found = [m["memory"] for m in data["methods"] if m["memory"] and "device" in m["memory"]]
    if not found:
        return ""
    device, settings = found[0]["device"], data["settings"]
    text = f"Memory is predicted for {device}"
    text += f", in micro-batches of {settings['micro_batch']}" if settings.get("micro_batch") else ""
    if settings.get("compile") and any("note" not in f for f in found):
        text += ", as torch.compile partitions the network (an upper bound of the peak: nothing is fused)"
    sentences = [text, *not_counted(device)]
    sentences += sorted({f["note"] for f in found if "note" in f})
    return ". ".join(s[0].upper() + s[1:].rstrip(".") for s in sentences) + "."


def title(data: dict[str, Any]) -> str:
    """What was compared, in a line.

    Example:
        >>> settings = {"model": "vgg11", "data": "mnist", "width": 0.5, "epochs": 2}
        >>> title({"settings": settings, "methods": [{}, {}], "data": {"train": 60000}})
        'vgg11 (width 0.5) on mnist: 2 methods, 60,000 images, 2 epochs'
    """
    s = data["settings"]
    width = f" (width {s['width']:g})" if s["width"] != 1 else ""
    methods, epochs = count(len(data["methods"]), "method"), count(s["epochs"], "epoch")
    return f"{s['model']}{width} on {s['data']}: {methods}, {data['data']['train']:,} images, {epochs}"


def _name(m: dict[str, Any]) -> str:
    note = f"\n({m['note'].partition(' ')[0]})" if m.get("note") else ""
    return m["label"].replace("+", "\n+") + note


def _accuracy(m: dict[str, Any]) -> str:
    found = m["accuracy"]
    if found is None:
        return NOTHING
    lost = ""
    if found["diverged"]:
        steps = sorted(run["step"] for run in m["runs"] if run["status"] == "diverged")
        lost = f"{found['diverged']} of {len(m['runs'])} diverged (step {', '.join(map(str, steps))})"
    if found["mean"] is None:
        return lost
    spread = "" if found["sd"] is None else f" ± {100 * found['sd']:.2f}"
    return f"{100 * found['mean']:.2f}{spread}" + (f"\n{lost}" if lost else "")


def _difference(m: dict[str, Any], first: dict[str, Any]) -> str:
    if m is first or not m["accuracy"] or not first["accuracy"]:
        return NOTHING
    found = m["accuracy"]["difference"]
    if found is not None:
        return f"{100 * found['value']:+.2f}\n[{100 * found['low']:+.1f}, {100 * found['high']:+.1f}]"
    means = m["accuracy"]["mean"], first["accuracy"]["mean"]
    return NOTHING if None in means else f"{100 * (means[0] - means[1]):+.2f}\n(one seed)"


def _bytes(m: dict[str, Any], what: str, ratio: str) -> str:
    found = m["memory"] or {}
    if what not in found:
        return NOTHING
    eager = "\n(not compiled)" if "note" in found else ""
    return format_bytes(round(found[what])) + (f"\nx{found[ratio]:.2f}" if ratio in found else "") + eager


def _time(m: dict[str, Any]) -> str:
    found = m["time"]
    if not found:
        return NOTHING
    ratio = found["ratio"]
    if ratio["low"] == ratio["high"]:  # the first method, compared with itself
        return _seconds(found["seconds"])
    return f"{_seconds(found['seconds'])}\nx{ratio['value']:.2f}\n[{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _rate(m: dict[str, Any]) -> str:
    found = m["largest_lr"]
    if not found:
        return NOTHING
    if found["value"] is None:
        return found["why_not"]
    return ("at least " if found["at_least"] else "") + f"{found['value']:.3g}"
