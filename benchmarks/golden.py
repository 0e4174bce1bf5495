"""Golden plans: what ``MimicNorm`` decides for every model of the zoo, so that a change of the planner shows.

    python benchmarks/golden.py            plan all models again and list the differences; exit code 1 if there are any
    python benchmarks/golden.py --freeze   write the present plans as the golden ones

``results/plans.jsonl`` has one line per model: a hash of the plan and its counts. ``results/plans/`` has the whole
plan of twenty models, and for those the hash of every other method's plan. A plan is written as its decisions, with
numbers to six digits; sentences (reasons, notes) are left out. ``--dump DIR`` writes the whole plan of every model
there; ``diff -r`` of two such folders shows what a change did. Methods that centre weights have the authors' threshold
here, min_fan_in=50, whatever the library's default is. About 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import sys
from collections import Counter
from pathlib import Path

import torch
from coverage import build
from provenance import RESULTS
from rich.progress import track

from mimicnorm.methods import METHODS, Method, MimicNorm
from mimicnorm.surgery.plan import Plan
from mimicnorm.surgery.planning import plan

AUTHORS: dict = {"min_fan_in": 50}
GOLDEN, WHOLE = RESULTS / "plans.jsonl", RESULTS / "plans"
SHOWN = {
    *(f"torchvision:{name}" for name in ("resnet18", "resnet50", "vgg16_bn", "densenet121", "shufflenet_v2_x0_5")),
    *(f"torchvision:{name}" for name in ("googlenet", "mobilenet_v3_small", "regnet_y_400mf")),
    *(f"timm:{name}" for name in ("resnetv2_50", "efficientnet_b0", "repvgg_a0", "mobileone_s0", "hrnet_w18_small")),
    *(f"timm:{name}" for name in ("botnet26t_256", "levit_128s", "dla34", "skresnet18", "convmixer_768_32")),
    *(f"timm:{name}" for name in ("selecsls42", "ghostnet_100")),
}


def decisions(planned: Plan) -> list[str]:
    """A plan as lines that hold every decision and no sentence."""
    lines = []
    for n in planned.norms:
        scale, factor = (n.scale, n.factor) if n.action == "scale" else (None, 1.0)  # a folded one is its layer's
        v = None if n.role in ("left", "unused") else n.v
        lines.append(
            f"norm {n.name} {n.role} {n.action} owners={','.join(n.owners)} children={','.join(n.children)} "
            f"dim={n.channel_dim} scale={_digits(scale)} factor={_digits(factor)} v={_digits(v)} "
            f"scalar={int(n.scalar)} groups={n.groups}"
        )
    for s in planned.layers:
        raw = s.on_raw_input and s.action == "bias"
        lines.append(
            f"layer {s.name} {s.role} {s.action} fan_in={s.fan_in} fed_by={s.fed_by} gain={_digits(s.gain)} "
            f"scale={_digits(s.scale)} v={_digits(s.v)} beta_from={s.beta_from} factor={_digits(s.weight_factor)} "
            f"output_factor={_digits(s.factor)} learns_gain={int(s.learns_gain)} raw={int(raw)}"
        )
    scaled = {True: " logit_scale", False: ""}
    lines += [f"head {h.name} outputs={h.outputs} dim={h.dim}{scaled[h.logit_scale]}" for h in planned.heads]
    lines += [f"gate {name}" for name in planned.gates]
    lines += [f"refused {r.name}" for r in planned.refusals]
    return [*lines, f"init {planned.init}"]


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _hash(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def plan_of(model: str, shape: list[int], method: Method) -> Plan:
    """The plan of a model of the zoo, built on the meta device where that is possible."""
    source, name = model.split(":")
    with contextlib.suppress(Exception):  # not every model can be built there
        with torch.device("meta"):
            built = build(source, name)
        return plan(built.train(), method, example=tuple(shape))
    torch.manual_seed(0)
    return plan(build(source, name).train(), method, example=tuple(shape))


def examine(task: tuple[str, list[int]]) -> tuple[dict, list[str]]:
    """The golden line of one model, and its whole plan."""
    torch.set_num_threads(1)
    model, shape = task
    planned = plan_of(model, shape, MimicNorm(**AUTHORS))
    lines = decisions(planned)
    counts = {k: v for k, v in planned.totals().items() if v}
    line = {"model": model, "shape": shape, "plan": _hash(lines), "init": planned.init, **counts}
    if model in SHOWN:
        others = {name: METHODS[name]() for name in METHODS if name not in ("mimicnorm", "batchnorm")}
        others["weight-mean"] = dataclasses.replace(others["weight-mean"], **AUTHORS)
        line["methods"] = {name: _hash(decisions(plan_of(model, shape, m))) for name, m in others.items()}
    return line, lines


def differences(golden: dict, now: dict) -> dict:
    """What a line says otherwise, by key; counts that are zero are left out of a line."""
    keys = [k for k in {**golden, **now} if golden.get(k, 0) != now.get(k, 0)]
    return {k: (golden.get(k, 0), now.get(k, 0)) for k in keys}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--freeze", action="store_true", help="write the present plans as the golden ones")
    parser.add_argument("--dump", type=Path, default=None, help="write every model's whole plan into this folder")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    options = parser.parse_args()
    golden = {line["model"]: line for line in map(json.loads, GOLDEN.read_text().splitlines())}
    rows = [json.loads(line) for line in (RESULTS / "coverage.jsonl").read_text().splitlines()]
    examined = sorted((f"{r['source']}:{r['name']}", r["shape"]) for r in rows if "shape" in r)
    tasks = [(model, shape) for model, shape in examined if options.only in model]
    reasons: Counter[str] = Counter()
    lines = dict(golden)
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.jobs, maxtasksperchild=20) as pool:
        for line, whole in track(pool.imap(examine, tasks), total=len(tasks), description="planning"):
            model = line["model"]
            changed = differences(golden.get(model, {}), line)
            if changed:
                print(f"{model}: {changed}", flush=True)
                reasons[", ".join(k for k in changed if k != "plan") or "the plan, with the same counts"] += 1
            lines[model] = line
            for folder in (*[WHOLE] * (options.freeze and model in SHOWN), *[options.dump] * bool(options.dump)):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{model.replace(':', '-')}.txt").write_text("\n".join(whole) + "\n")
    if options.freeze:
        GOLDEN.write_text("".join(json.dumps(line) + "\n" for line in lines.values()))
    print(f"{len(tasks)} models planned, {sum(reasons.values())} otherwise than the golden plans")
    for reason, count in reasons.most_common():
        print(f"  {count} differ in: {reason}")
    return int(bool(reasons) and not options.freeze)


if __name__ == "__main__":
    sys.exit(main())
