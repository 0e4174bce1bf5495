"""``mimicnorm reproduce``: a table or figure of the paper, trained and judged."""

from __future__ import annotations

import statistics
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
    """Where finished runs (runs/KEY.json), items (paper/ITEM-SCALE.json) and the page (paper/results.md, .html) are."""
    runs: Path = Path("runs")
    """Where runs on their way are."""
    jobs: int = 1
    """Runs to train at once, each with its share of the threads."""
    device: str = "auto"
    """cpu, cuda, ...; auto is the GPU if there is one."""
    gpus: int = 1
    """GPUs of one run; several train it together."""
    launcher: Literal["local", "slurm"] = "local"
    """local: processes here. slurm: jobs, through submitit."""
    slurm: tuple[str, ...] = ()
    """What sbatch needs, as NAME=VALUE: slurm_partition=gpu timeout_min=600."""
    only_finished: bool = False
    """Train nothing: judge the runs that are finished, and write the page."""
    max_steps: int | None = None
    """End every run after so many steps: a trial of the whole path, which is not on the page."""

    def check_names(self) -> None:
        """Refuse an unknown item before torch is loaded for training."""
        from mimicnorm.paper.published import ITEM_NAMES

        positive_int(self.jobs, "--jobs")
        positive_int(self.gpus, "--gpus")
        if self.max_steps is not None:
            positive_int(self.max_steps, "--max-steps")
        known = (*ITEM_NAMES, "list", "all")
        if self.item not in known:
            raise NameNotFoundError(f"there is no item {self.item!r}.", self.item, known)

    def run(self) -> None:
        """List the items, or run them and write the page."""
        from rich.table import Table

        from mimicnorm.cli.console import Console
        from mimicnorm.paper import ITEMS, page, reproduce
        from mimicnorm.training.state import write_atomically

        if self.item == "list":
            Console().print(self._listed())
            return
        options = ("results", "runs", "jobs", "data_dir", "device", "max_steps", "gpus", "only_finished")
        where: dict[str, Any] = {name: getattr(self, name) for name in options}
        if self.launcher == "slurm":
            from mimicnorm.training.slurm import Slurm

            where["launcher"] = Slurm(self.runs / "slurm", self.gpus, self.slurm)
        for item in ITEMS if self.item == "all" else (self.item,):
            data = reproduce(item, self.scale, **where)
            table = Table("claim", "verdict", "evidence", title=f"{item}: {data['title']}, {self.scale} scale")
            for verdict in data["verdicts"]:
                table.add_row(verdict["claim"], verdict["verdict"], verdict["evidence"])
            Console().print(table)
        for ending, text in (("md", page.markdown(self.results)), ("html", page.html(self.results))):
            path = self.results / "paper" / f"results.{ending}"
            write_atomically(path, text.encode())
            print(f"wrote {path}")

    def _listed(self) -> Any:
        """Return a table of the items: runs, and hours of training, estimated for those that are not finished."""
        from rich.table import Table

        from mimicnorm.paper import ITEMS, SCALES
        from mimicnorm.training.cache import finished_runs, seconds

        table = Table(title=f"{self.scale} scale, hours of training one run after the other")
        table.add_column("item", no_wrap=True)
        for column in ("shows", "runs", "finished", "hours so far", "hours left"):
            table.add_column(column)
        scale, hours = SCALES[self.scale], {}
        for name, item in ITEMS.items():
            done: dict[str, Any] = {}
            for stage in item.stages:
                done |= finished_runs(stage(scale, done), self.results)
            recipes = item.recipes(scale, done)
            for run in done.values():
                model, images = run["recipe"]["model"], (run["recipe"]["limit"] or 50_000) * len(run["history"])
                hours.setdefault(model, []).append(seconds(run) / 3600 / max(images, 1))
            left = [r for label, r in recipes.items() if label not in done]
            known = [statistics.mean(hours[r.model]) * r.epochs * (r.limit or 50_000) for r in left if r.model in hours]
            so_far = sum(map(seconds, done.values())) / 3600
            estimate = "-" if not left else f"about {sum(known):.1f}" if len(known) == len(left) else "not known yet"
            table.add_row(name, item.title, str(len(recipes)), str(len(done)), f"{so_far:.1f}", estimate)
        return table
