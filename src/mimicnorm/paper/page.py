"""The results page: each item's numbers beside the paper's, its figure, a verdict per claim; in Markdown and HTML."""

from __future__ import annotations

import base64
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mimicnorm.paper.figures import NAMES
from mimicnorm.paper.items import ITEMS
from mimicnorm.paper.parity import RATES
from mimicnorm.paper.published import TABLE1, TABLE2, TABLE3, Cell
from mimicnorm.paper.scales import SCALES, Rows

TITLE = "The paper, run again"
ABOUT = (
    "Each table has the paper's numbers beside ours. Desk runs are real experiments with narrow networks, few epochs "
    "and a part of CIFAR-100, which each item states, so their accuracies are far below the paper's: compare methods, "
    "not absolute numbers. `mimicnorm reproduce ITEM --scale paper` is the paper's own recipe, for GPUs. Memory is the "
    "predicted peak of a training step of the full-size network, tensors alone; the paper's is that of the process."
)
Cells = tuple[Sequence[str], Sequence[Sequence[Any]]]
"""The head and the lines of a table."""


@dataclass
class Section:
    """One item on the page."""

    title: str
    state: str
    head: Sequence[str] = ()
    lines: Sequence[Sequence[Any]] = ()
    figure: Path | None = None
    costs: dict[str, str] = field(default_factory=dict)
    verdicts: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def embedded(self) -> str:
        """The figure as a data URL."""
        content = b"" if self.figure is None else self.figure.read_bytes()
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def sections(results: str | Path) -> list[Section]:
    """Return a section for each item that was run, from its file in ``RESULTS/paper``."""
    folder = Path(results) / "paper"
    paths = [folder / f"{item}-{scale}.json" for item in ITEMS for scale in SCALES]
    return [section(json.loads(path.read_text()), folder) for path in paths if path.exists()]


def section(data: Mapping[str, Any], folder: Path = Path()) -> Section:
    """Return the section of one item, from its file."""
    scale = f"{data['scale']} scale, " if ITEMS[data["item"]].stages else ""
    runs = len(data["runs"]), len(data["runs"]) + len(data["missing"])
    state = "computed, no training"
    if runs[1]:
        state = f"{scale}{runs[0]} of {runs[1]} runs, {_hours(data['seconds'])}; {'; '.join(data['sizes'])}"
    made = Section(f"{data['item']}: {data['title']}", state)
    if data["rows"]:
        made.head, made.lines = _TABLES.get(data["item"], _plain)(data["rows"])
    if data.get("figure"):
        made.figure = folder / data["figure"]
    made.costs = {label: f"{used / 60:.1f}" for label, used in data.get("costs", {}).items()}
    made.verdicts = [(v["claim"], v["verdict"], v["evidence"]) for v in data["verdicts"]]
    return made


def markdown(results: str | Path, figures: str = "") -> str:
    """Return the page in Markdown, with links to its figures.

    Args:
        results: Where the items' files are.
        figures: The way from the page to the folder ``RESULTS/paper``, such as ``../results/paper/``.
    """
    parts = [f"# {TITLE}", ABOUT]
    for s in sections(results):
        parts += [f"## {s.title}", f"{s.state}."]
        if s.lines:
            parts.append(_table(s.head, s.lines))
        if s.figure is not None:
            parts.append(f"![{s.title}]({figures}{s.figure.name})")
        parts.append(_table(("claim", "verdict", "evidence"), ([c, f"**{v}**", e] for c, v, e in s.verdicts)))
        if s.costs:
            parts += ["<details><summary>Cost of every run</summary>", _table(("run", "minutes"), s.costs.items())]
            parts.append("</details>")
    return "\n\n".join(parts) + "\n"


def html(results: str | Path) -> str:
    """Return the page as one HTML file with its figures inside."""
    from jinja2 import Environment, PackageLoader

    template = Environment(loader=PackageLoader("mimicnorm.paper", "."), autoescape=True).get_template("page.html")
    return template.render(title=TITLE, about=ABOUT.replace("`", ""), sections=sections(results))


def _table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rule = "|" + "---|" * len(head)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(map(str, line))} |" for line in lines)])


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours of training" if seconds > 3600 else f"{seconds / 60:.0f} minutes of training"


# -- tables ------------------------------------------------------------------------------------------------------


def _accuracies(published: Mapping[str, Mapping[str, Cell]]) -> Callable[[Rows], Cells]:
    def table(rows: Rows) -> Cells:
        base = {row["network"]: row.get("peak_mib") for row in rows if row["method"] == "batchnorm"}
        lines = []
        for row in rows:
            cells = published[row["network"]]
            cell, peak = cells.get(row["method"]), row.get("peak_mib")
            theirs = ("-", "-") if cell is None else _memory(cell.memory, cells["batchnorm"].memory)
            ours = ("-", "-") if peak is None else _memory(peak, base.get(row["network"]))
            accuracy = _published(cell), _measured(row) or "-"
            lines.append((row["network"], NAMES[row["method"]], *accuracy, *theirs, *ours))
        lines.sort(key=lambda line: list(published).index(line[0]))
        memory = ("memory, paper, MB", "/ BatchNorm", "ours, MiB", "/ BatchNorm")
        return ("network", "method", "accuracy, paper, %", "ours, %", *memory), lines

    return table


def _memory(peak: float, first: float | None) -> tuple[str, str]:
    return f"{peak:,.0f}", "-" if first is None else f"{peak / first:.2f}"


def _published(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    deviation = "" if cell.deviation is None else f" ± {cell.deviation:.2f}"
    return f"{cell.accuracy:.2f}{deviation}{' (unstable)' * cell.starred}"


def _measured(row: Mapping[str, Any]) -> str:
    top1, diverged = row["top1"], row["diverged"]
    deviation = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
    mean = f"{statistics.mean(top1):.2f}{deviation}" if top1 else ""
    lost = f"{diverged} of {diverged + len(top1)} diverged" if diverged else ""
    return ", ".join(filter(None, (mean, lost)))


def _rates(rows: Rows) -> Cells:
    methods = tuple(next(iter(TABLE2.values())))
    lines = []
    for row in rows:
        pairs = ((TABLE2[row["lr"]][m], row.get(m)) for m in methods)
        cells = (f"{theirs:.1f} / {'-' if ours is None else f'{ours:.1f}'}" for theirs, ours in pairs)
        lines.append((row["lr"], *cells))
    return ("learning rate", *(f"{NAMES[m]}, paper / ours" for m in methods)), lines


def _curves(rows: Rows) -> Cells:
    length = max((len(row["top1"]) for row in rows), default=0)
    epochs = sorted({1, 2, 4, 8, length} & set(range(1, length + 1)))
    lines = []
    for row in rows:
        reached = [f"{row['top1'][e - 1]:.1f}" for e in epochs]
        lines.append((row["network"], NAMES[row["method"]], *reached, row["diverged"]))
    return ("network", "method", *(f"epoch {e}, %" for e in epochs), "runs that diverged"), lines


def _parity(rows: Rows) -> Cells:
    lines = []
    for row in rows:
        errors = row["calibration_error"]
        error = f"{statistics.mean(errors):.3f}" if errors else "-"
        rate = f"{row['lr']:g}{' (the last one tried)' * (row['lr'] not in RATES)}"
        lines.append((row["labels"], NAMES[row["method"]], rate, len(row["top1"]), _measured(row), error))
    return ("labels", "method", "learning rate", "seeds", "accuracy, %", "calibration error"), lines


def _accuracy_rows(first: tuple[str, ...], *more: str) -> Callable[[Rows], Cells]:
    """Return a table of accuracies, with these fields of a row before them and those after."""

    def table(rows: Rows) -> Cells:
        lines = [(*(NAMES.get(r[k], r[k]) for k in first), _measured(r), *(f"{r[k]:,.0f}" for k in more)) for r in rows]
        return (*first, "accuracy, %", *(k.replace("_", " ") for k in more)), lines

    return table


def _variance(rows: Rows) -> Cells:
    head = ("network", "method", "ended", "largest median variance", "last")
    lines = []
    for row in rows:
        ended = "done" if row["diverged_at"] is None else f"diverged at step {row['diverged_at']}"
        medians = [f"{value:.3g}" for value in (max(row["median"]), row["median"][-1])] if row["median"] else ["-", "-"]
        lines.append((row["network"], NAMES[row["method"]], ended, *medians))
    return head, lines


def _correlations(rows: Rows) -> Cells:
    shown = [r for r in rows if r["layer"] in (1, 5, 10, 20, 30)]
    lines = [(NAMES[r["kind"]], r["layer"], *(f"{r[k]:.3f}" for k in ("low", "median", "high"))) for r in shown]
    return ("network", "layer", "5 %", "median", "95 %"), lines


def _operator(rows: Rows) -> Cells:
    lines = [
        (NAMES[r["kind"]], f"{p['rho']:.4g}", p["stability"], f"{p['slope']:.4f}")
        for r in rows
        for p in r["fixed_points"]
    ]
    return ("network", "fixed point", "stability", "slope"), lines


def _plain(rows: Rows) -> Cells:
    """Every field of every row: for items whose rows are a table already."""
    head = list(rows[0])
    cells = [
        [f"{row[k]:.4g}" if isinstance(row[k], float) else NAMES.get(row[k], row[k]) for k in head] for row in rows
    ]
    return [key.replace("_", " ") for key in head], cells


_TABLES: dict[str, Callable[[Rows], Cells]] = {
    "table1": _accuracies(TABLE1),
    "table2": _rates,
    "table3": _accuracies(TABLE3),
    "figure-operator": _operator,
    "figure-vgg-ablation": _curves,
    "figure-resnet-ablation": _curves,
    "figure-correlation": _correlations,
    "figure-variance": _variance,
    "depthwise": _accuracy_rows(("way",)),
    "integer-training": _accuracy_rows(("network", "precision"), "images_per_second"),
    "parity": _parity,
}
"""How an item's rows are shown; `_plain` for the others."""
