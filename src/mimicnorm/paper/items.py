"""Every table and figure of the paper as an item: recipes, a reducer from runs to rows, claims, a table, a figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimicnorm.paper import appendix_c, claims, depthwise, figures, integers, memory, parity, signals, tables, variance
from mimicnorm.paper.published import TABLE1, TABLE3, TITLES
from mimicnorm.paper.scales import Rows, Runs, Scale, Setting
from mimicnorm.paper.tables import Stage
from mimicnorm.paper.verdicts import NEEDS_GPUS, UNDECIDED, Judgement, at_desk
from mimicnorm.training.recipes import Recipe

Claims = Callable[[Rows], list[Judgement]]


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper.

    Attributes:
        name: A key of ``TITLES``.
        rows: From the runs that are finished to the item's rows; an item without stages computes them.
        claims: About training: from rows to judgements.
        facts: About what is computed, not trained: from rows to judgements.
        stages: The recipes it needs, by label. A later stage sees the runs of those before.
        draw: Draws the rows to a file.
        needs_gpus: Whether its training is out of reach of a CPU at any scale.
    """

    name: str
    rows: Callable[[Runs, Setting], list[dict[str, Any]]]
    claims: Claims | None = None
    facts: Claims | None = None
    stages: tuple[Stage, ...] = ()
    draw: Callable[[Rows, Path, Setting], None] | None = None
    needs_gpus: bool = False

    @property
    def title(self) -> str:
        """What it shows."""
        return TITLES[self.name]

    def recipes(self, scale: Scale, runs: Runs) -> dict[str, Recipe]:
        """Return all recipes that are known, given the runs that are finished."""
        return {label: r for stage in self.stages for label, r in stage(scale, runs).items()}

    def judge(self, scale: str, rows: Rows, ran: bool = True) -> list[Judgement]:
        """Judge the item's claims.

        Args:
            scale: "desk" or "paper". Training at desk scale can confirm no more than a direction.
            rows: What was measured.
            ran: Whether anything was trained.

        Example:
            >>> rows = [{"network": "vgg11", "method": m, "top1": [60.0, 60.4, 60.2], "diverged": 0}
            ...         for m in ("batchnorm", "mimicnorm")]
            >>> ITEMS["table1"].judge("paper", rows)[0].verdict
            'holds'
        """
        judged: list[Judgement] = []
        if self.claims is not None and ran:
            judged = [at_desk(j) if scale == "desk" else j for j in self.claims(rows)]
        elif self.claims is not None:
            verdict = NEEDS_GPUS if self.needs_gpus else UNDECIDED
            judged = [Judgement("every claim about training", verdict, "not run")]
        return judged if self.facts is None else [*judged, *self.facts(rows)]


_ITEMS = (
    Item(
        "table1",
        memory.with_memory("cifar100", TABLE1),
        claims.table1,
        claims.memory(TABLE1),
        (tables.table1,),
    ),
    Item("table2", tables.by_rate, claims.rates, stages=(tables.table2,)),
    Item(
        "table3",
        memory.with_memory("imagenet", TABLE3),
        claims.table3,
        claims.memory(TABLE3),
        (tables.table3,),
        needs_gpus=True,
    ),
    Item(
        "figure-shift",
        signals.channels(("straight",), (20, 50)),
        facts=claims.shift,
        draw=signals.drawer("distributions"),
    ),
    Item(
        "figure-bnwm",
        signals.channels(("batch_norm", "weight_mean"), (50,)),
        facts=claims.unfrozen,  # the picture of figure-shift has both
    ),
    Item("figure-operator", signals.operator, facts=claims.operator, draw=signals.drawer("transitions")),
    Item(
        "figure-vgg-ablation",
        tables.curves,
        claims.ablations,
        stages=(tables.ablation("vgg16"),),
        draw=figures.curves,
    ),
    Item(
        "figure-resnet-ablation",
        tables.curves,
        claims.ablations,
        stages=(tables.ablation("resnet18", "resnet50"),),
        draw=figures.curves,
    ),
    Item("figure-residual", signals.residual, facts=claims.residual, draw=signals.drawer("residual")),
    Item("figure-correlation", signals.correlations, facts=claims.correlations, draw=signals.drawer("correlations")),
    Item("figure-variance", variance.rows, claims.variance, stages=(variance.recipes,), draw=figures.variance),
    Item("appendix-c", appendix_c.rows, facts=claims.appendix_c),
    Item("depthwise", depthwise.rows, claims.depthwise, stages=(depthwise.recipes,)),
    Item("integer-training", integers.rows, claims.integers, stages=(integers.recipes,)),
    Item("theorems", signals.theorems, facts=claims.theorems),
    Item("parity", parity.rows, claims.parity, stages=(parity.search, parity.wider, parity.finals)),
)
ITEMS = {item.name: item for item in _ITEMS}
"""Every item by name, in the paper's order."""
