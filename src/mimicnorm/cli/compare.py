"""``mimicnorm compare``: methods side by side, from one command to one page."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimicnorm.arguments import positive_int
from mimicnorm.cli.train import folder, given_fields, with_recipe_flags
from mimicnorm.compare.job import DEFAULT_METHODS, Job, base_recipe, entries

_PER_RUN = ("method", "settings", "seed")


@dataclass
class Options:
    """Train one network under several methods and show them side by side: a table, compare.json and report.html.

    Without options it compares four methods on small images of digits, with three seeds each, in two minutes. Run the
    same command again to continue where it stopped; with more methods or seeds it adds them.
    """

    methods: str = DEFAULT_METHODS
    """Methods by name, separated by commas; the first is what the others are compared with. NAME:3 trains one with
    three seeds, NAME+SETTING=VALUE changes one of its settings."""
    seeds: int = 3
    """How often to train each method."""
    out: str | None = None
    """The folder for results and runs; runs/compare-MODEL-DATA if not given."""
    data_dir: Path | None = None
    """Where the data is; else the environment variable MIMICNORM_DATA, else the hub."""
    rounds: int = 20
    """Rounds of timed steps in which the methods take turns; 0 times nothing."""
    largest_lr: bool = False
    """Also search each method's largest stable learning rate."""
    jobs: int = 0
    """Runs to train at once, each in a process with its share of the threads; 0 is two on a CPU, one on a GPU."""
    device: str = "auto"
    """cpu, cuda, ...; auto is the GPU if there is one."""

    def run(self) -> None:
        """Compare, print the table, say where the page is."""
        for name, least in (("seeds", 1), ("rounds", 0), ("jobs", 0)):
            positive_int(getattr(self, name), f"--{name}", least=least)
        chosen = base_recipe(**given_fields(self))
        out = folder(self.out, re.sub(r"[:/]+", "-", f"compare-{chosen.model}-{chosen.data}"))
        command = shlex.join(["mimicnorm", *sys.argv[1:]])
        job = Job(chosen, entries(self.methods, self.seeds), self.rounds, self.largest_lr, command)
        for entry in job.entries:
            job.run_recipe(entry).check_names()

        from mimicnorm import report
        from mimicnorm.cli.console import Console
        from mimicnorm.compare import run

        data = run(job, out, data_dir=self.data_dir, device=self.device, jobs=self.jobs)
        if data["status"] == "interrupted":
            print(f"interrupted; finished runs are in {out}. Run the same command to continue", file=sys.stderr)
            raise SystemExit(128 + data["signal"])
        Console().print(report.table(data))
        print(f"wrote {out / 'compare.json'} and {out / 'report.html'}")


Compare: Any = with_recipe_flags(Options, "Compare", without=_PER_RUN)
