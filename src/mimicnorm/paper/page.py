"""The results page, in Markdown: each item's numbers beside the paper's, and a verdict per claim."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mimicnorm.paper.items import ITEMS
from mimicnorm.paper.published import TABLE1, TABLE2, TABLE3, Cell

_NAMES = {"batchnorm": "BatchNorm", "mimicnorm": "MimicNorm", "nonorm": "no norm", "fixup": "Fixup"}
_NAMES |= {"weight-mean": "weight mean", "last-bn": "last BN"}
_ABOUT = """# The paper, run again

Each table has the paper's numbers beside ours. *Desk* runs are real experiments on CIFAR-100 with a quarter of the
width, 12 epochs and 10,000 of the 50,000 images, so their accuracies are far below the paper's: compare methods, not
absolute numbers. `mimicnorm reproduce ITEM --scale paper` is the paper's own recipe, for GPUs."""


def page(results: str | Path) -> str:
    """Return the page of all items that were run, from their files in ``RESULTS/paper``."""
    parts = [_ABOUT]
    for item in ITEMS:
        for scale in ("desk", "paper"):
            path = Path(results) / "paper" / f"{item}-{scale}.json"
            if path.exists():
                parts.append(section(json.loads(path.read_text())))
    return "\n\n".join(parts) + "\n"


def section(data: Mapping[str, Any]) -> str:
    """Return the part of the page about one item, from its file."""
    state = f"{len(data['runs'])} of {len(data['runs']) + len(data['missing'])} runs"
    lines = [f"## {data['item']}: {data['title']}", f"{data['scale']} scale, {state}, {_hours(data['seconds'])}."]
    if data["rows"]:
        lines.append(_TABLES[data["item"]](data["rows"]))
    verdicts = ([v["claim"], f"**{v['verdict']}**", v["evidence"]] for v in data["verdicts"])
    return "\n\n".join([*lines, _table(("claim", "verdict", "measured"), verdicts)])


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours of training" if seconds > 3600 else f"{seconds / 60:.0f} minutes of training"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *(" | ".join(map(str, row)) for row in rows)]
    return "\n".join(f"| {line} |" if line[0] != "-" else f"|{line}|" for line in lines)


def _accuracies(published: Mapping[str, Mapping[str, Cell]]) -> Callable[[Sequence[Mapping]], str]:
    def table(rows: Sequence[Mapping]) -> str:
        lines = []
        for row in rows:
            cell = published[row["network"]].get(row["method"])
            lines.append((row["network"], _NAMES[row["method"]], _published(cell), _measured(row)))
        return _table(("network", "method", "paper, %", "ours, %"), lines)

    return table


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


def _rates(rows: Sequence[Mapping]) -> str:
    methods = tuple(next(iter(TABLE2.values())))
    lines = []
    for row in rows:
        pairs = ((TABLE2[row["lr"]][m], row.get(m)) for m in methods)
        lines.append(
            (row["lr"], *(f"{theirs:.1f} / {'-' if ours is None else f'{ours:.1f}'}" for theirs, ours in pairs))
        )
    return _table(("learning rate", *(f"{_NAMES[m]}, paper / ours" for m in methods)), lines)


def _curves(rows: Sequence[Mapping]) -> str:
    length = max((len(row["top1"]) for row in rows), default=0)
    epochs = sorted({1, 2, 4, 8, length} & set(range(1, length + 1)))
    lines = []
    for row in rows:
        reached = [f"{row['top1'][e - 1]:.1f}" if e <= len(row["top1"]) else "diverged" for e in epochs]
        lines.append((row["network"], _NAMES[row["method"]], *reached))
    return _table(("network", "method", *(f"epoch {e}, %" for e in epochs)), lines)


_TABLES: dict[str, Callable[[Sequence[Mapping]], str]] = {
    "table1": _accuracies(TABLE1),
    "table2": _rates,
    "table3": _accuracies(TABLE3),
    "figure-vgg-ablation": _curves,
    "figure-resnet-ablation": _curves,
}
