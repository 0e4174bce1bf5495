"""docs/results.md."""

from __future__ import annotations

import re

from blocks.text import ROOT, table


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
