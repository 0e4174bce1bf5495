"""Processor seconds to plan ResNet-50 and ten of timm's networks with the most BatchNorms, now and at another commit.

    git worktree add ../before COMMIT
    python benchmarks/planning.py --before ../before [--rounds 3]

Each plan is a process of its own, in turns with the other commit's; the network is built on the meta device where that
is possible. Writes ``results/planning.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from provenance import ROOT, Rows

LARGE = ("resnetrs420", "resnest269e", "ghostnetv3_050", "hrnet_w18", "efficientnetv2_xl", "ecaresnet269d")
LARGE += ("densenet264d", "nasnetalarge", "fastvit_mci2", "mobileone_s0")
MODELS = ("torchvision:resnet50", *(f"timm:{name}" for name in LARGE))
ONE_PLAN = """
import sys, time, torch
sys.path[:0] = {paths!r}
from golden import MimicNorm, plan_of
torch.set_num_threads(1)
source = {model!r}
plan_of("torchvision:resnet18", [2, 3, 64, 64], MimicNorm())  # imports and first calls
start = time.process_time()
planned = plan_of(source, [2, 3, 64, 64], MimicNorm())
print(len(planned.norms), time.process_time() - start)
"""


def seconds(tree: Path, model: str) -> tuple[int, float]:
    paths = [str(tree / "src"), str(tree / "benchmarks"), str(tree / "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", ONE_PLAN.format(paths=paths, model=model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model} in {tree}: {done.stderr}")
    norms, taken = done.stdout.split()[-2:]
    return int(norms), float(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    git = ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"]
    before = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    rows = Rows("planning", "model", rounds=options.rounds, before=before)
    for model in MODELS:
        if (model,) in rows:
            continue
        taken: dict[str, list[float]] = {"before": [], "now": []}
        norms = 0
        for _ in range(options.rounds):
            for name, tree in (("before", options.before), ("now", ROOT)):
                norms, once = seconds(tree, model)
                taken[name].append(once)
        rows.add(
            {"model": model, "batch_norms": norms, **{k: round(statistics.median(v), 2) for k, v in taken.items()}}
        )


if __name__ == "__main__":
    main()
