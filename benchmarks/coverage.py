"""Convert every BatchNorm classifier of torchvision and timm, and train each for one step.

    python benchmarks/coverage.py [--shard 0/2] [--memory GIB] [--retry]

Resumable: finished models are kept in ``results/coverage.jsonl`` and skipped (without a model's line, it is examined
again); the summary is ``results/coverage.json``. Shards may run side by side. For each model, at the smallest input it
takes: converted (no batch-dependent module left but LastNorm; a training step gives a finite gradient to every
parameter that had one; the share of owners that are centred), or refused by name. What would not fit into ``--memory``
takes its training step in micro-batches of one sample; if that would not fit either, on fake tensors: that every
gradient exists is shown there, that it is finite is not. ``--retry`` with more memory examines those again. Whether the
code as it is now decides for every model what it decided before is the question of ``golden.py``.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter

import torch
from provenance import RESULTS, provenance, save, zoo
from rich.progress import track
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mimicnorm import microbatch
from mimicnorm.errors import MimicNormError
from mimicnorm.layers import LastNorm
from mimicnorm.memory import measure
from mimicnorm.methods import MimicNorm
from mimicnorm.surgery.convert import convert_, init_
from mimicnorm.surgery.planning import plan
from mimicnorm.surgery.record import is_batch_norm, record

SIZES = (32, 64, 96, 128, 160, 224, 256, 299, 384)


def build(source: str, name: str) -> nn.Module:
    if source == "timm":
        return zoo.timm().create_model(name)
    models = zoo.torchvision().models
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return models.get_model(name, **quick)


def candidates() -> list[tuple[str, str]]:
    models = zoo.torchvision().models
    names = [("torchvision", n) for n in models.list_models(module=models)]
    return names + [("timm", n) for n in zoo.timm().list_models()]


def has_batch_norm(source: str, name: str) -> bool:
    """Built on the meta device: shapes only."""
    try:
        with torch.device("meta"):
            model = build(source, name)
    except Exception:
        model = build(source, name)
    return any(is_batch_norm(m) for m in model.modules())


def smallest_input(model: nn.Module) -> tuple[int, ...]:
    """The smallest square image on which the model runs, found on fake tensors."""
    config = getattr(model, "default_cfg", None) or {}
    channels, *_, default = config.get("input_size", (3, 299, 299))
    for size in (*[s for s in SIZES if s < default and not config.get("fixed_input_size")], default):
        try:
            record(model, (2, channels, size, size))
        except MimicNormError:
            continue
        return (2, channels, size, size)
    raise MimicNormError(f"runs on none of the sizes up to {default}")


def parameters_with_gradient(model: nn.Module, shape: tuple[int, ...]) -> set[str]:
    """Which parameters a training step of the original reaches, on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {
            n: mode.from_tensor(p.detach()).requires_grad_(p.is_floating_point()) for n, p in model.named_parameters()
        }
        buffers = {n: mode.from_tensor(b.detach()) for n, b in model.named_buffers()}
        x = torch.empty(shape)
        loss(torch.func.functional_call(model, {**state, **buffers}, (x,))).backward()
        return {n for n, p in state.items() if p.grad is not None}


def gibibytes(model: nn.Module, shape: tuple[int, ...]) -> tuple[float, float]:
    """What a training step will take by prediction: of the whole batch, and of its halves one after the other."""
    if shape[-1] <= 128 and sum(p.numel() for p in model.parameters()) < 100e6:
        return 0.0, 0.0  # fits anywhere
    try:
        predicted = measure(model, shape, loss=loss, optimizer=None)
    except MimicNormError:  # no prediction: the smallest inputs of nearly all models fit
        return 0.0, 0.0
    return predicted.peak_bytes / 2**30, (predicted.peak_bytes - predicted.saved_bytes / 2) / 2**30


def loss(output: object) -> torch.Tensor:
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
    return sum((t.float().square().mean() for t in leaves), torch.zeros(()))


def examine(source: str, name: str, memory: float) -> dict:
    torch.manual_seed(0)
    model = build(source, name).train()
    shape = smallest_input(model)
    reached = parameters_with_gradient(model, shape)
    weights = sum(p.nbytes for p in model.parameters()) / 2**30  # conversion keeps a copy to fall back on
    large = gibibytes(model, shape)[0] + weights > memory
    init = plan(model, MimicNorm(), example=shape).init if large else "auto"
    row: dict = {"source": source, "name": name, "shape": list(shape), "commit": provenance()["commit"]}
    start = time.perf_counter()
    try:
        report = convert_(model, MimicNorm(), example=shape, init=None if large else "auto")
    except MimicNormError as error:
        return row | {"outcome": "refused", "why": str(error)[:600]}
    row["seconds"] = round(time.perf_counter() - start, 2)
    row["step"] = "real"
    if large:  # the converted network needs less: its own size decides
        whole, halves = gibibytes(model, shape)
        row["step"] = "real" if whole <= memory else "micro-batches" if halves <= memory else "fake"
    row |= {"init": report.init, **report.totals()}
    left = [n for n, m in model.named_modules() if is_batch_norm(m) and not isinstance(m, LastNorm)]
    depthwise = {n for n, m in model.named_modules() if getattr(m, "groups", 1) == getattr(m, "in_channels", 0) > 1}
    eligible = [s for s in report.layers if s.fan_in > 50 and s.name not in depthwise]
    row["eligible"], row["eligible_centred"] = len(eligible), sum(s.action == "centre" for s in eligible)
    row["norms_without_owner"] = sum(not n.owners and n.role != "unused" for n in report.norms)
    moved = {new: old for old, new in report.moved_parameters.items()}
    wanted = {n for n, _ in model.named_parameters() if moved.get(n, n) in reached}
    if row["step"] == "fake":
        bad = sorted(wanted - parameters_with_gradient(model, shape))
    else:
        if large:
            row["init"] = init
            init_(model, init, example=shape)
        if row["step"] == "real":
            loss(model(torch.randn(shape))).backward()
        else:
            microbatch.backward(model, lambda output, _: loss(output), torch.randn(shape), micro_batch=1)
        finite = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.isfinite().all()}
        bad = sorted(wanted - finite)
    row["batch_norms_left"], row["without_gradient"] = left, bad[:20]
    return row | {"outcome": "converted" if not left and not bad else "broken"}


def summarise(rows: list[dict]) -> dict:
    outcomes = Counter(r["outcome"] for r in rows)
    done = [r for r in rows if r["outcome"] == "converted"]
    eligible = sum(r["eligible"] for r in done)
    return {
        **provenance(method="MimicNorm()", init="auto", step="one training step, batch 2, smallest input"),
        "models": len(rows),
        "by_source": Counter(f"{r['source']}: {r['outcome']}" for r in rows),
        "outcomes": outcomes,
        "converted_share": round(outcomes["converted"] / max(len(rows), 1), 4),
        "owners_over_50_not_depthwise": eligible,
        "of_those_centred_share": round(sum(r["eligible_centred"] for r in done) / max(eligible, 1), 4),
        "init": Counter(r["init"] or "not set (fake step)" for r in done),
        "step": Counter(r.get("step", "real") for r in done),
        "examined_at": Counter(r.get("commit", "cbcd43a and shortly after") for r in rows),  # older rows do not say
        "not_converted": [
            {k: r[k] for k in ("source", "name", "outcome", "why", "without_gradient") if k in r}
            for r in rows
            if r["outcome"] != "converted"
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--retry", action="store_true", help="examine again what was refused, broken, or took its step on fake tensors"
    )
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that one real step may take")
    parser.add_argument("--shard", default="0/1", help="i/n: take every n-th model, beginning with the i-th")
    options = parser.parse_args()
    shard, shards = map(int, options.shard.split("/"))
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    log = RESULTS / "coverage.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if options.retry:
        settled = ("converted", "no batch norm")
        rows = [r for r in rows if r["outcome"] in settled and r.get("step") != "fake"]
        log.write_text("".join(json.dumps(r) + "\n" for r in rows))
    known = {(r["source"], r["name"]) for r in rows}
    for source, name in track([c for c in candidates()[shard::shards] if c not in known], "examining"):
        row: dict = {"source": source, "name": name, "outcome": "no batch norm"}
        if has_batch_norm(source, name):
            try:
                row = examine(source, name, options.memory)
            except Exception as error:
                row |= {"outcome": "error", "why": f"{type(error).__name__}: {error}"[:600]}
        with log.open("a") as f:
            f.write(json.dumps(row) + "\n")
        gc.collect()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    print(save("coverage", summarise([r for r in rows if r["outcome"] != "no batch norm"])))


if __name__ == "__main__":
    main()
