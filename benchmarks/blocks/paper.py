"""docs/results.md."""

from __future__ import annotations

import dataclasses
import re

from blocks.text import ROOT, percent, prose, table


def paper() -> str:
    from mimicnorm.paper.page import markdown

    text = markdown(ROOT / "results", "../results/paper/")
    return text.split("\n\n", 2)[2].strip()  # the title and what it is about are on the page


def verdicts() -> str:
    """How many claims of each item got which verdict; each item links to its section."""
    from mimicnorm.paper import verdicts as known
    from mimicnorm.paper.page import sections

    kinds = (known.HOLDS, known.DIRECTION, known.FAILS, known.UNDECIDED, known.NEEDS_GPUS)
    lines = []
    for section in sections(ROOT / "results"):
        found = [verdict for _, verdict, _ in section.verdicts]
        anchor = re.sub(r"[^\w -]", "", section.title.lower()).replace(" ", "-")
        lines.append((f"[{section.title}](#{anchor})", *(found.count(kind) or "" for kind in kinds)))
    return table(" | ".join(("claims about", *kinds)), lines)


def longer() -> str:
    """Two cells of Table 2 with as many steps as in the paper."""
    from mimicnorm.paper.scales import SCALES
    from mimicnorm.paper.tables import table2
    from mimicnorm.training.cache import finished_runs

    cells = {m: table2(SCALES["desk"], {})[f"vgg16 {m} lr 0.1"] for m in ("mimicnorm", "batchnorm")}
    runs = finished_runs({m: dataclasses.replace(r, limit=25_000) for m, r in cells.items()}, ROOT / "results")
    ours, theirs = (percent([max(h["top1"] for h in runs[m]["history"])]) for m in cells)
    return prose(
        "**Desk scale is short for VGG16**: 780 steps in table2, where the paper has 1,950. With 25,000 images, and so "
        f"as many steps as in the paper, one run each at a rate of 0.1 reaches {ours} % with MimicNorm and {theirs} "
        "% with BatchNorm. So what does not hold in table2 and in figure-vgg-ablation may hold in longer runs."
    )
