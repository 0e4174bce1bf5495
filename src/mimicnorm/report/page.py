"""One self-contained HTML page from a comparison's JSON: no script, no font, no image from elsewhere."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import Any

from mimicnorm.memory.units import format_bytes
from mimicnorm.methods import METHODS
from mimicnorm.report.plots import Bar, Line, bars, curves
from mimicnorm.report.summary import about_memory, columns, rows, title
from mimicnorm.surgery.plan import count

COLOURS = 9
_PLAN = ("module", "kind and role", "action", "fan-in", "gain", "v", "why")


def page(data: dict[str, Any]) -> str:
    """The whole page as text.

    Args:
        data: What ``compare.json`` holds.
    """
    style = files("mimicnorm.report").joinpath("style.css").read_text()
    body = "\n".join(
        (
            f"<h1>{escape(title(data))}</h1>",
            _lead(data),
            _summary(data),
            _training(data),
            _costs(data),
            _methods(data),
            _reproduce(data),
        )
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title(data))}</title>\n<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n'
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _lead(data: dict[str, Any]) -> str:
    sizes, s = data["data"], data["settings"]
    done = sum(len(m["runs"]) for m in data["methods"])
    planned = sum(m["seeds"] for m in data["methods"])
    least, most = (f(m["seeds"] for m in data["methods"]) for f in (min, max))
    seeds = count(most, "seed") if least == most else f"{least} to {most} seeds"
    text = (
        f"<p>The same network, {escape(s['model'])}, was trained on the same {sizes['train']:,} images of "
        f"{escape(s['data'])} ({sizes['classes']} classes, {' x '.join(map(str, sizes['shape']))}) under each method, "
        f"with {seeds}, and tested on {sizes['test']:,} others. A method says what happens to the network's BatchNorm "
        f"layers; everything else (order of the images, schedule, number of steps) is equal{_but(data)}.</p>"
    )
    if data["status"] != "done":
        text += (
            f'<p class="note">Not finished yet: {done} of {planned} runs are in. The command at the end of this page '
            "goes on where it was.</p>"
        )
    return text


def _but(data: dict[str, Any]) -> str:
    """What is not equal: the learning rate that a method's authors prescribe for its single numbers."""
    if data["settings"].get("scalar_rate") is not None:
        return ""
    known = [(m["label"], METHODS.get(m["plan"]["method"].get("name", ""))) for m in data["methods"]]
    own = [(label, method.scalar_rate) for label, method in known if method and method.scalar_rate != 1]
    words = (f"the single numbers (scalars) of {escape(label)} learn at {rate:g} times the rate" for label, rate in own)
    return f", but that {', '.join(words)}, as its authors prescribe" if own else ""


def _summary(data: dict[str, Any]) -> str:
    shown = columns(data)
    head = "".join(f"<th>{escape(c.heading)}</th>" for c in shown)
    lines = []
    for number, (m, row) in enumerate(zip(data["methods"], rows(data), strict=True)):
        cells = "".join(f"<td>{escape(text)}</td>" for text in row[1:])
        lines.append(
            f'<tr data-method="{escape(m["label"], quote=True)}"><td>{_key(number)}{escape(row[0])}</td>{cells}</tr>'
        )
    meanings = "".join(f"<dt>{escape(c.heading)}</dt><dd>{escape(c.explanation)}</dd>" for c in shown)
    return (
        '<h2>Results</h2>\n<p class="hint">The table goes on to the right: scroll it sideways.</p>\n'
        '<div class="scroll"><table id="summary"><thead><tr>'
        f"{head}</tr></thead><tbody>\n{chr(10).join(lines)}\n</tbody></table></div>\n"
        f"<details open><summary>What the columns mean</summary><dl>{meanings}</dl></details>"
    )


def _training(data: dict[str, Any]) -> str:
    legend = "".join(
        f'<li>{_key(n)}<span class="name">{escape(_legend(m))}</span></li>' for n, m in enumerate(data["methods"])
    )
    plots = (
        ("Test accuracy, %", "Higher is better.", "top1", lambda v: f"{100 * v:.4g}", "accuracy"),
        ("Training loss", "Cross entropy, mean over an epoch; lower is better.", "train_loss", _number, "train-loss"),
        ("Test loss", "Cross entropy on the test images.", "test_loss", _number, "test-loss"),
    )
    figures = ""
    for heading, caption, what, shown, kind in plots:
        plot = curves(_lines(data, what), x="epoch", y=heading, shown=shown, kind=kind)
        figures += f"<figure><h3>{heading}</h3>{plot}<figcaption>{caption}</figcaption></figure>"
    return (
        f'<h2>Training</h2>\n<ul class="legend">{legend}</ul>\n<div class="plots">{figures}</div>\n'
        "<p>Thick lines are means over the seeds, thin ones the single runs; ✕ is where one diverged. "
        "Point at a line for its values.</p>"
    )


def _costs(data: dict[str, Any]) -> str:
    kept, peak, times = [], [], []
    for n, m in enumerate(data["methods"]):
        found, timed = m["memory"] or {}, m["time"]
        for what, where in (("saved_bytes_per_image", kept), ("peak_bytes", peak)):
            if what in found:
                where.append(Bar(m["label"], found[what], format_bytes(round(found[what])), n % COLOURS))
        if timed:
            ratio = timed["ratio"]
            text = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            times.append(Bar(m["label"], ratio["value"], text, n % COLOURS, ratio["low"], ratio["high"]))
    first, batch = escape(data["methods"][0]["label"]), data["settings"]["batch"]
    rounds = times and next(m["time"]["rounds"] for m in data["methods"] if m["time"])
    return (
        '<h2>What a step costs</h2>\n<div class="plots">'
        f"<figure><h3>Kept for the backward pass, per image</h3>{bars(kept, label='Bytes kept per image', kind='kept')}"
        "<figcaption>What one image in the batch occupies; lower is better.</figcaption></figure>"
        f"<figure><h3>Predicted peak memory, batch {batch}</h3>{bars(peak, label='Predicted peak', kind='peak')}"
        "<figcaption>Weights, gradients, momentum and activations at the worst moment of a step. "
        f"{escape(about_memory(data))}</figcaption></figure>"
        f"<figure><h3>Time per step / {first}</h3>{bars(times, label='Time per step', kind='time')}"
        f"<figcaption>Median of {rounds or 0} rounds in which all methods took turns; whiskers are its 95 % interval."
        "</figcaption></figure></div>"
    )


def _methods(data: dict[str, Any]) -> str:
    parts = ["<h2>What each method did to the network</h2>"]
    for number, m in enumerate(data["methods"]):
        plan = m["plan"]
        summary = "".join(f"<p>{escape(line)}</p>" for line in plan["summary"])
        head = "".join(f"<th>{name}</th>" for name in _PLAN)
        lines = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in plan["rows"])
        parts.append(
            f"<h3>{_key(number)}{escape(m['label'])}</h3>"
            f"<p>{escape(m['summary'])} {_note(m)}{m['parameters']:,} parameters.</p>{summary}"
            f"<details><summary>Layer by layer ({len(plan['rows'])} rows)</summary>"
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></details>'
        )
    return "\n".join(parts)


def _note(m: dict[str, Any]) -> str:
    return f"Here {escape(m['note'])}. " if m.get("note") else ""


def _reproduce(data: dict[str, Any]) -> str:
    about = data["provenance"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    settings = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in data["settings"].items())
    return (
        f"<h2>Reproduce</h2>\n<pre>{escape(data['command'])}</pre>\n"
        f"<details><summary>All settings of the runs</summary><dl>{settings}</dl></details>\n"
        f"<footer><p>{escape(versions)}; {escape(about['system'])} on {escape(about['device'])}, {about['threads']} "
        "threads. All numbers of this page are in the JSON file beside it.</p></footer>"
    )


def _lines(data: dict[str, Any], what: str) -> list[Line]:
    return [
        Line(
            m["label"],
            [[(line["epoch"], line[what]) for line in run["history"] if line[what] is not None] for run in m["runs"]],
            number % COLOURS,
            [run["status"] == "diverged" for run in m["runs"]],
        )
        for number, m in enumerate(data["methods"])
    ]


def _legend(m: dict[str, Any]) -> str:
    lost = [run["step"] for run in m["runs"] if run["status"] == "diverged"]
    return m["label"] + (f" (diverged at step {', '.join(map(str, lost))})" if lost else "")


def _key(number: int) -> str:
    return f'<span class="key c{number % COLOURS}"></span>'


def _number(value: float) -> str:
    return f"{value:.3g}"
