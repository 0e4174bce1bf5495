"""docs/results.md."""

from __future__ import annotations

from blocks.text import ROOT


def paper() -> str:
    from mimicnorm.paper.page import markdown

    text = markdown(ROOT / "results", "../results/paper/")
    return text.split("\n\n", 2)[2].strip()  # the title and what it is about are on the page
