"""Draw the picture of README, ``docs/figures/overview*.svg``: memory, speed and accuracy from the result files.

    python benchmarks/overview.py

Plain SVG, which follows the reader's light or dark scheme; one file for wide screens, one for phones.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from blocks.text import ROOT, load, top1_by_seed

FIGURES = ROOT / "docs/figures"
FILES = {"overview.svg": 3, "overview-narrow.svg": 1}  # panels beside each other
PANEL, GAP, HEIGHT, LABELS, VALUES = 276, 36, 150, 82, 44
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1d1f21 }
  .title { font-size: 15px; font-weight: 600 } .about { font-size: 11.5px; fill: #5f6368 }
  .a { fill: #7d8a99 } .b { fill: #c2461f } .c { fill: #c2461f; opacity: .55 }
  .range { stroke: #1d1f21; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6e6e1 } .about { fill: #a0a4a8 } .b, .c { fill: #ff8a5c } .a { fill: #8f9dad }
    .range { stroke: #e6e6e1 }
  }"""


class Bar(NamedTuple):
    """One bar: its name, value and text; ``low`` and ``high`` end its whisker."""

    kind: str
    name: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None


class Panel(NamedTuple):
    """Bars under a title, with a line on what was measured."""

    title: str
    about: str
    bars: list[Bar]


def panels() -> list[Panel]:
    saved = {
        (r["method"], r["bits"]): r["saved_mib_per_image"]
        for r in load("compress-bytes")["rows"]
        if r["network"] == "resnet50"
    }
    times = {r["cell"]: r["batchnorm_over"]["mimicnorm, backward"] for r in load("speed")["rows"]}

    def time(kind: str, name: str, cell: str) -> Bar:
        value, high, low = (1 / times[cell][key] for key in ("value", "low", "high"))
        return Bar(kind, name, value, f"{value:.2f}", low, high)

    def top1(kind: str, name: str, labels: str, method: str) -> Bar:
        reached = [100 * top1 for top1 in top1_by_seed(labels, method)]
        mean, sd = statistics.mean(reached), statistics.stdev(reached)
        return Bar(kind, name, mean, f"{mean:.1f}", mean - sd, mean + sd)

    memory = [
        Bar("a", "BatchNorm", saved["batchnorm", 0], ""),
        Bar("b", "MimicNorm", saved["mimicnorm", 0], ""),
        Bar("c", "… in 8 bits", saved["mimicnorm", 8], ""),
    ]
    return [
        Panel("Saved for backward", "ResNet-50, MiB per image", [b._replace(text=f"{b.value:.1f}") for b in memory]),
        Panel(
            "Time of a training step",
            "ResNet-50, batch 32, CPU; BatchNorm = 1",
            [
                Bar("a", "BatchNorm", 1.0, "1.00"),
                time("b", "MimicNorm", "resnet50-32-224"),
                time("c", "… batch 8", "resnet50-8-224"),
            ],
        ),
        Panel(
            "Accuracy",
            "CIFAR-100, narrow ResNet-18, 5 epochs, %",
            [top1("a", "BatchNorm", "fine", "batchnorm"), top1("b", "MimicNorm", "fine", "mimicnorm")],
        ),
    ]


def drawing(columns: int) -> str:
    """The picture as text, with so many panels in a row."""
    shown = panels()
    width, height = columns * (PANEL + GAP) - GAP, HEIGHT * len(shown) // columns
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        "<title>Memory, speed and accuracy of BatchNorm and MimicNorm side by side</title>",
        f"<style>{STYLE}\n</style>",
    ]
    for number, panel in enumerate(shown):
        down, right = divmod(number, columns)
        lines.append(f'<g transform="translate({right * (PANEL + GAP)} {down * HEIGHT})">')
        lines.append(f'<text class="title" y="18">{panel.title}</text>')
        lines.append(f'<text class="about" y="36">{panel.about}</text>')
        scale = (PANEL - LABELS - VALUES) / max(b.high or b.value for b in panel.bars)
        for row, b in enumerate(panel.bars):
            y, end = 50 + 32 * row, LABELS + scale * (b.high or b.value)
            lines.append(f'<text y="{y + 16}">{b.name}</text>')
            lines.append(
                f'<rect class="{b.kind}" x="{LABELS}" y="{y}" width="{scale * b.value:.1f}" height="23" rx="2"/>'
            )
            if b.low is not None:
                lines.append(f'<path class="range" d="M{LABELS + scale * b.low:.1f} {y + 11.5}H{end:.1f}"/>')
            lines.append(f'<text x="{end + 7:.1f}" y="{y + 16}">{b.text}</text>')
        lines.append("</g>")
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    for name, columns in FILES.items():
        (FIGURES / name).write_text(drawing(columns))
