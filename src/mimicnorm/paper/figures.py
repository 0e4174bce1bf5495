"""The figures of items that train: accuracy by epoch, variance of the logits by step."""

from __future__ import annotations

from pathlib import Path

from mimicnorm.paper.scales import Rows, Setting
from mimicnorm.pictures import canvas, save
from mimicnorm.report.plots import name_ends

NAMES = {
    "batchnorm": "BatchNorm",
    "mimicnorm": "MimicNorm",
    "weight-mean": "weight mean",
    "last-bn": "last BN",
    "nonorm": "no norm",
    "fixup": "Fixup",
    "groupnorm-ws": "GroupNorm and WS",
    "mimicnorm, depthwise centred": "MimicNorm, depthwise layers centred",
    "straight": "straight",
    "weight_mean": "weight mean",
    "batch_norm": "BatchNorm",
}
"""Methods and kinds of networks as people write them."""
COLOURS = {
    "batchnorm": "#228833",
    "mimicnorm": "#ee6677",
    "weight-mean": "#ccbb44",
    "last-bn": "#66ccee",
    "nonorm": "#4477aa",
    "fixup": "#aa3377",
}


def curves(rows: Rows, path: Path, _setting: Setting) -> None:
    """Draw the accuracy after each epoch: one panel per network, the method at the end of its line."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, axes = canvas(1, len(networks), 1.0 + 4.6 * len(networks), 3.8)
    for axis, network in zip(axes, networks, strict=True):
        lines = [row for row in rows if row["network"] == network and row["top1"]]
        for row in lines:
            epochs = range(1, len(row["top1"]) + 1)
            axis.plot(epochs, row["top1"], "o-", ms=2.5, color=COLOURS[row["method"]])
        axis.set(title=network, xlabel="epoch", ylabel="top-1 accuracy, %")
        ends = [(len(r["top1"]), r["top1"][-1], NAMES[r["method"]], COLOURS[r["method"]]) for r in lines]
        name_ends(axis, ends)
    save(figure, path, dpi=120)


def variance(rows: Rows, path: Path, _setting: Setting) -> None:
    """Draw the variance of the logits by step: the median over classes, and the range from least to largest."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure, axes = canvas(1, max(len(networks), 1), 1.0 + 4.6 * max(len(networks), 1), 3.6)
    for axis, network in zip(axes, networks, strict=False):
        for row in (r for r in rows if r["network"] == network and r["step"]):
            colour, name = COLOURS[row["method"]], NAMES[row["method"]]
            name += "" if row["diverged_at"] is None else f" (diverged at step {row['diverged_at']})"
            axis.plot(row["step"], row["median"], color=colour, label=name)
            axis.fill_between(row["step"], row["min"], row["max"], color=colour, alpha=0.2, lw=0)
        axis.set(title=network, xlabel="step", ylabel="variance of a class's logits", yscale="log")
        axis.legend(frameon=False, fontsize=8)
    save(figure, path, dpi=120)
