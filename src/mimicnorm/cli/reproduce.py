"""``mimicnorm reproduce``: a table or figure of the paper, trained and judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from mimicnorm.arguments import positive_int
from mimicnorm.errors import NameNotFoundError


@dataclass
class Reproduce:
    """Run a table or figure of the paper again and judge its claims; the same command resumes it.

    ``list`` shows the items, ``all`` runs every one. Finished runs are read, not trained again.
    """

    item: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ITEM|list|all")]
    """A table or figure, such as table1; list and all."""
    scale: Literal["desk", "paper"] = "desk"
    """desk: narrow networks, a fifth of CIFAR-100, minutes per run on a CPU. paper: the paper's recipes, for GPUs."""
    data_dir: Path | None = None
    """Where the data is; else the environment variable MIMICNORM_DATA, else the hub."""
    results: Path = Path("results")
    """Where finished runs (runs/KEY.json), items (paper/ITEM-SCALE.json) and the page (paper/results.md) are."""
    runs: Path = Path("runs")
    """Where runs on their way are."""
    jobs: int = 1
    """Runs to train at once, each with its share of the threads."""
    device: str = "auto"
    """cpu, cuda, ...; auto is the GPU if there is one."""

    def check_names(self) -> None:
        """Refuse an unknown item before torch is loaded for training."""
        from mimicnorm.paper import ITEMS

        positive_int(self.jobs, "--jobs")
        if self.item not in (*ITEMS, "list", "all"):
            raise NameNotFoundError(f"there is no item {self.item!r}.", self.item, (*ITEMS, "list", "all"))

    def run(self) -> None:
        """List the items, or run them and write the page."""
        from rich.table import Table

        from mimicnorm.cli.console import Console
        from mimicnorm.paper import ITEMS, reproduce
        from mimicnorm.paper.page import page
        from mimicnorm.training.state import write_atomically

        if self.item == "list":
            Console().print(self._listed())
            return
        where: dict[str, Any] = {"results": self.results, "runs": self.runs, "jobs": self.jobs}
        for item in ITEMS if self.item == "all" else (self.item,):
            data = reproduce(item, self.scale, data_dir=self.data_dir, device=self.device, **where)
            table = Table("claim", "verdict", "measured", title=f"{item}: {data['title']}, {self.scale} scale")
            for verdict in data["verdicts"]:
                table.add_row(verdict["claim"], verdict["verdict"], verdict["evidence"])
            Console().print(table)
        path = self.results / "paper" / "results.md"
        write_atomically(path, page(self.results).encode())
        print(f"wrote {path}")

    def _listed(self) -> Any:
        from rich.table import Table

        from mimicnorm.paper import ITEMS, SCALES
        from mimicnorm.training.cache import finished_runs

        table = Table(title=f"{self.scale} scale")
        table.add_column("item", no_wrap=True)
        for column in ("shows", "runs", "finished", "hours of those"):
            table.add_column(column)
        for name, item in ITEMS.items():
            recipes = item.recipes(SCALES[self.scale])
            done = finished_runs(recipes, self.results)
            hours = sum(line.get("seconds") or 0.0 for run in done.values() for line in run["history"]) / 3600
            table.add_row(name, item.title, str(len(recipes)), str(len(done)), f"{hours:.1f}")
        return table
