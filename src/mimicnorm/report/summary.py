"""The summary of a comparison: one row per method, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mimicnorm.memory.analysis import not_counted
from mimicnorm.memory.units import format_bytes
from mimicnorm.surgery.plan import count

if TYPE_CHECKING:
    from rich.table import Table

NOTHING = "-"
_CALIBRATION = {"test_loss": "loss {:.3f}", "confidence": "conf. {:.1%}", "calibration_error": "ECE {:.1%}"}


class Column(NamedTuple):
    """A column of the summary: its explanation is for a reader who never saw it, ``cell`` is the text of a method."""

    heading: str
    explanation: str
    cell: Callable[[dict[str, Any]], str]


def columns(data: dict[str, Any]) -> list[Column]:
    """Return the columns of the summary, without those that are empty for every method."""
    methods = data["methods"]
    first = methods[0]["label"]
    images = evaluated_on(data)
    known = (
        Column("method", "What was done with BatchNorm; described below.", _name),
        Column(
            f"{images}\naccuracy, %",
            f"Share of {images} images classified correctly after the last epoch: mean over seeds ± standard "
            "deviation. A run whose loss stopped being finite diverged, and is counted as such. Below it, means over "
            "seeds: loss, the cross entropy; conf., the mean confidence (the probability of the predicted class); "
            "ECE, the expected calibration error: how far confidence and accuracy are apart, in 15 "
            "bins of equal width. A calibrated network is as confident as it is accurate.",
            _accuracy,
        ),
        Column(
            f"against\n{first}",
            f"Difference in accuracy to {first}, in percentage points, with its 95 % confidence interval (Welch's t) "
            "if both have two seeds or more; one seed says little, and the cell says so.",
            lambda m: _difference(m, methods[0]),
        ),
        Column(
            "saved\nper image",
            "Memory that one training image occupies from the forward to the backward pass, and as a multiple of "
            f"{first}. It decides how large a batch fits.",
            lambda m: _bytes(m, "saved_bytes_per_image", "saved_ratio"),
        ),
        Column(
            "predicted\npeak",
            f"The most memory in use at any moment of a training step of {data['settings']['batch']} images: weights, "
            "gradients, momentum and what is saved for backward. Predicted without running it. "
            f"{about_memory(data)}".rstrip(),
            lambda m: _bytes(m, "peak_bytes", "peak_ratio"),
        ),
        Column(
            "time\nper step",
            f"Median time of one training step on this machine, and as a multiple of {first} with {interval(data)} of "
            "that multiple. Steps of all methods take turns, so that other work of the machine slows all of them.",
            lambda m: _time(m, methods[0]),
        ),
        Column(
            "largest\nlearning rate",
            "The largest learning rate, to a factor of 1.4, at which a short run stays finite and gets better than "
            "guessing.",
            _rate,
        ),
    )
    return [column for column in known if any(column.cell(m) != NOTHING for m in methods)]


def evaluated_on(data: dict[str, Any]) -> str:
    """Say which images accuracies are of: test, or validation if some were held out of the training set."""
    return "validation" if data["settings"].get("validation") else "test"


def rows(data: dict[str, Any]) -> list[list[str]]:
    """Return the cells of the summary, a list per method."""
    shown = columns(data)
    return [[column.cell(m) for column in shown] for m in data["methods"]]


def table(data: dict[str, Any]) -> Table:
    """Return the summary as a rich table."""
    from rich import box
    from rich.table import Table

    made = Table(title=title(data), box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(columns(data)):
        made.add_column(column.heading, justify="right" if number else "left", no_wrap=not number)
    for row in rows(data):
        made.add_row(*row)
    made.caption, made.caption_justify = about_memory(data) or None, "left"
    return made


def rounds(data: dict[str, Any]) -> int:
    """Return in how many rounds the steps were timed; 0 if they were not."""
    return next((m["time"]["rounds"] for m in data["methods"] if m["time"]), 0)


def interval(data: dict[str, Any]) -> str:
    """Say what the interval of a time is: fewer than six rounds are too few for 95 %."""
    return "the 95 % interval" if rounds(data) >= 6 else "the range"


def about_memory(data: dict[str, Any]) -> str:
    """Say what the predicted memory is of: device, micro-batches, compiled or not; nothing for older comparisons.

    Example:
        >>> settings = {"micro_batch": 8, "compile": False}
        >>> about_memory({"settings": settings, "methods": [{"memory": {"device": "cpu"}}]})
        'Memory is predicted for cpu, in micro-batches of 8.'
    """
    predicted = [m["memory"] for m in data["methods"] if m["memory"] and "device" in m["memory"]]
    if not predicted:
        return ""
    device, settings = predicted[0]["device"], data["settings"]
    text = f"Memory is predicted for {device}"
    text += f", in micro-batches of {settings['micro_batch']}" if settings.get("micro_batch") else ""
    if settings.get("compile") and any("note" not in p for p in predicted):
        text += ", as torch.compile partitions the network (an upper bound of the peak: nothing is fused)"
    sentences = [text, *not_counted(device)]
    sentences += sorted({p["note"] for p in predicted if "note" in p})
    return ". ".join(s[0].upper() + s[1:].rstrip(".") for s in sentences) + "."


def title(data: dict[str, Any]) -> str:
    """Say in a line what was compared.

    Example:
        >>> settings = {"model": "vgg11", "data": "mnist", "width": 0.5, "epochs": 2}
        >>> title({"settings": settings, "methods": [{}, {}], "data": {"train": 60000}})
        'vgg11 (width 0.5) on mnist: 2 methods, 60,000 images, 2 epochs'
    """
    s = data["settings"]
    width = f" (width {s['width']:g})" if s["width"] != 1 else ""
    methods, epochs = count(len(data["methods"]), "method"), count(s["epochs"], "epoch")
    data_set = s["data"] + (f" (classes {s['classes']})" if s.get("classes") else "")
    return f"{s['model']}{width} on {data_set}: {methods}, {data['data']['train']:,} images, {epochs}"


def _name(m: dict[str, Any]) -> str:
    return m["label"].replace("+", "\n+")


def _accuracy(m: dict[str, Any]) -> str:
    accuracy = m["accuracy"]
    if accuracy is None:
        return NOTHING
    lines = []
    if accuracy["mean"] is not None:
        deviation = "" if accuracy["sd"] is None else f" ± {100 * accuracy['sd']:.2f}"
        lines.append(f"{100 * accuracy['mean']:.2f}{deviation}")
        measured = m.get("calibration") or {}  # older comparisons have none
        means = {name: values["mean"] for name, values in measured.items() if values["mean"] is not None}
        lines += [text.format(means[name]) for name, text in _CALIBRATION.items() if name in means]
    if accuracy["diverged"]:
        steps = sorted(run["step"] for run in m["runs"] if run["status"] == "diverged")
        lines.append(f"{accuracy['diverged']} of {len(m['runs'])} diverged (step {', '.join(map(str, steps))})")
    return "\n".join(lines)


def _difference(m: dict[str, Any], first: dict[str, Any]) -> str:
    if m is first or not m["accuracy"] or not first["accuracy"]:
        return NOTHING
    difference = m["accuracy"]["difference"]
    if difference is not None:
        value, low, high = (100 * difference[key] for key in ("value", "low", "high"))
        return f"{value:+.2f}\n[{low:+.1f}, {high:+.1f}]"
    means = m["accuracy"]["mean"], first["accuracy"]["mean"]
    return NOTHING if None in means else f"{100 * (means[0] - means[1]):+.2f}\n(one seed)"


def _bytes(m: dict[str, Any], quantity: str, ratio: str) -> str:
    memory = m["memory"] or {}
    if quantity not in memory:
        return NOTHING
    eager = "\n(not compiled)" if "note" in memory else ""
    return format_bytes(round(memory[quantity])) + (f"\nx{memory[ratio]:.2f}" if ratio in memory else "") + eager


def _time(m: dict[str, Any], first: dict[str, Any]) -> str:
    if not m["time"]:
        return NOTHING
    seconds, ratio = m["time"]["seconds"], m["time"]["ratio"]
    text = f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
    if m is first:
        return text
    return f"{text}\nx{ratio['value']:.2f}\n[{ratio['low']:.2f}, {ratio['high']:.2f}]"


def _rate(m: dict[str, Any]) -> str:
    search = m["largest_lr"]
    if not search:
        return NOTHING
    if search["value"] is None:
        return search["why_not"]
    return ("at least " if search["at_least"] else "") + f"{search['value']:.3g}"
