"""docs/accuracy.md."""

from __future__ import annotations

import statistics

from blocks.text import load, named, percent, prose, table
from mimicnorm.compare.intervals import difference

_LABELS = {"fine": "100 classes", "coarse": "20 classes", "ten": "ten classes", "mnist": "MNIST"}


def _part(name: str) -> dict[tuple[str, ...], dict]:
    """The runs of a part, by the words of their labels."""
    parts = load("accuracy")["parts"]
    return {tuple(label.split(", ")): row for label, row in parts.get(name, {}).items()}


def _mean(rows: list[dict], key: str) -> str:
    known = [r[key] for r in rows if r[key] is not None]
    return f"{statistics.mean(known):.3f}" if known else "-"


def _cells(rows: list[dict]) -> tuple[str, ...]:
    return percent(r["top1"] for r in rows), *(_mean(rows, k) for k in ("test_loss", "confidence", "calibration_error"))


def accuracy_rates() -> str:
    runs = _part("rates") | _part("wider") | _part("tuned")
    rates = sorted({float(rate) for _, _, rate in runs})
    lines = []
    for data, method in dict.fromkeys((data, method) for data, method, _ in runs):
        at = {float(rate): r["top1"] for (d, m, rate), r in runs.items() if (d, m) == (data, method)}
        cells = [percent([at[rate]]) if rate in at else "" for rate in rates]
        lines.append((_LABELS[data], named(method), *cells))
    return table(" | ".join(("labels", "method", *(f"{rate:g}" for rate in rates))), lines, left=2)


def accuracy_test() -> str:
    runs = _part("test") | _part("ten") | _part("mnist")
    lines = []
    for data, method in dict.fromkeys((data, method) for data, method, _ in runs):
        rows = [r for (d, m, _), r in runs.items() if (d, m) == (data, method)]
        base = [r for (d, m, _), r in runs.items() if (d, m) == (data, "batchnorm")]
        against = [_gap(rows, base, key) if method != "batchnorm" else "" for key in ("top1", "calibration_error")]
        lines.append((_LABELS[data], named(method), f"{rows[0]['lr']:g}", len(rows), *_cells(rows), *against))
    head = "labels | method | learning rate | seeds | accuracy, % | cross entropy | confidence | calibration error"
    return table(f"{head} | accuracy against BatchNorm, points | calibration error against BatchNorm", lines, left=2)


def _gap(rows: list[dict], base: list[dict], key: str) -> str:
    """The difference of two means with its interval; of accuracies in points."""
    factor, digits = (100, 1) if key == "top1" else (1, 3)
    gap = difference(*([factor * r[key] for r in some] for some in (rows, base)))
    return "" if gap is None else f"{gap.value:+.{digits}f} [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}]"


def accuracy_columns() -> str:
    runs = _part("columns")
    for row in load("accuracy-networks")["rows"]:
        runs["ten", row["way"], f"{row['lr']:g}", f"seed {row['seed']}"] = row
    cells = list(dict.fromkeys((data, rate) for data, _, rate, _ in runs))
    lines = []
    for way in dict.fromkeys(way for _, way, _, _ in runs):
        line = [way]
        for cell in cells:
            rows = [r for (data, w, rate, _), r in runs.items() if (data, rate) == cell and w == way]
            line.append(", ".join(_cells(rows)[:3]) if rows else "")
        lines.append(tuple(line))
    return table(" | ".join(("method", *(f"{_LABELS[data]}, {rate}" for data, rate in cells))), lines)


def _two_ways(part: str, names: dict[str, str]) -> str:
    runs = _part(part)
    lines = []
    for data, way in dict.fromkeys((data, way) for data, way, _ in runs):
        rows = [r for (d, w, _), r in runs.items() if (d, w) == (data, way)]
        lines.append((_LABELS[data], names.get(way, f"`{way}`"), len(rows), *_cells(rows)))
    head = "labels | MimicNorm with | seeds | accuracy, % | cross entropy | confidence | calibration error"
    return table(head, lines, left=2)


def accuracy_scale() -> str:
    return _two_ways("scale", {"scaled": "a logit scale", "unscaled": "none (the paper)"})


def accuracy_first() -> str:
    return _two_ways("first", {})


def accuracy_larger() -> str:
    runs = _part("longer") | _part("wide")
    lines = []
    for cell in dict.fromkeys(label[:-1] for label in runs):
        rows = [r for label, r in runs.items() if label[:-1] == cell]
        data, *size, way = cell
        lines.append((_LABELS[data], ",".join(size), f"`{way}`", len(rows), *_cells(rows)))
    head = "labels | size | MimicNorm with | seeds | accuracy, % | cross entropy | confidence | calibration error"
    return table(head, lines, left=3)


def accuracy_factors() -> str:
    rows = [(named(method), ", ".join(changed), *_cells([r])) for (method, *changed), r in _part("factors").items()]
    return table("method | changed | accuracy, % | cross entropy | confidence | calibration error", rows, left=2)


def accuracy_layers() -> str:
    methods = load("layer-rates")["methods"]
    changes = {m: row["relative_change_by_epoch"] for m, row in methods.items()}
    lines = []
    for layer in changes["mimicnorm"]:
        cells = [f"{1000 * changes[m][layer][e]:.1f}" for m in changes for e in (0, 2, 4)]
        lines.append((f"`{layer}`", *cells))
    return table(" | ".join(("layer", *(f"{named(m)}, epoch {e}" for m in changes for e in (1, 3, 5)))), lines)


def accuracy_lag() -> str:
    running, exact = load("layer-rates")["methods"]["mimicnorm"]["fp32_top1"].values()
    return prose(
        f"With its running statistics the trained network is right on {100 * running:.1f} % of the images held out; "
        f"with the mean and variance of its logits over all training images, on {100 * exact:.1f} %."
    )


def segmentation() -> str:
    rows = [r for r in load("segmentation")["rows"] if r["images"] == "test"]
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method]
        done = [r for r in own if r["cross_entropy"] is not None]
        ious = [r["object_iou"] for r in done]
        scales = [r["logit_scale"] for r in done if r["logit_scale"] is not None]
        numbers = (f"{statistics.mean(r[k] for r in done):.3f}" for k in ("cross_entropy", "confidence", "accuracy"))
        scale = f"{statistics.mean(scales):.1f}" if scales else ""
        spread = f"{statistics.mean(ious):.3f} ± {statistics.stdev(ious):.3f}"
        name, _, setting = method.partition(", ")
        label = f"{named(name)}, `{setting}`" if setting else named(name)
        lines.append((label, f"{own[0]['lr']:g}", len(own) - len(done), spread, *numbers, scale))
    head = "method | learning rate | diverged | object IoU | cross entropy | confidence | pixels right | logit scale"
    return table(head, lines)
