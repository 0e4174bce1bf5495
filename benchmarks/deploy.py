"""Folded networks: equal to eval mode, the speed of fused BatchNorm, and int8; ``results/deploy-*.json``.

    python benchmarks/deploy.py equal [--only timm:levit_128s]
    python benchmarks/deploy.py int8 digits [--seeds 3] [--jobs 1]
    python benchmarks/deploy.py int8 cifar100 [--seeds 1] [--jobs 1] [--data-dir FOLDER]
    python benchmarks/deploy.py time [--rounds 30] [--threads 1]

``equal`` converts a network of each family, gives its biases, scalars and statistics random values, folds it and
compares the outputs in single and double precision, beside the rounding of the converted network itself (its single
against its double precision). Every method on every network; some methods refuse some networks.

``int8`` trains with BatchNorm and with MimicNorm by the library's own recipes (in ``runs``, resumed if it was
interrupted), folds one and lets PyTorch fuse the other, and quantises both alike, calibrated on 512 training images.

``time`` runs the folded network and PyTorch's fusion of the BatchNorm one in turns, eager and in onnxruntime, and gives
the median of the ratios within a round with its 95 % interval.

Rows are kept: the same command goes on.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from coverage import smallest_input
from provenance import ROOT, Rows, zoo
from runs import RUNS, short
from steps import ratio

sys.path.insert(0, str(ROOT / "tests" / "deploy"))

from stirred import stirred
from test_zoo import TIMM, TORCHVISION, build

from mimicnorm.compare.timing import interleaved
from mimicnorm.deploy import accuracy, export, fold, fold_with_report, fuse, quantise
from mimicnorm.deploy.export import session_of
from mimicnorm.deploy.fold import relative_error
from mimicnorm.errors import MimicNormError, RefusedError
from mimicnorm.methods import METHODS, ScaledWS
from mimicnorm.surgery.convert import convert
from mimicnorm.surgery.example import tensors_in
from mimicnorm.training import finished, recipe, run_all
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.state import Result
from mimicnorm.training.sweep import folder_of

NETWORKS = {"digits": ("resnet10", "shufflenetv2"), "cifar100": ("resnet18", "shufflenetv2")}
TIMED = (("resnet50", 1), ("resnet50", 8), ("resnet18", 1), ("vgg16_bn", 1), ("shufflenet_v2_x1_0", 1))
CALIBRATION, BATCH = 512, 64


# -- equal -------------------------------------------------------------------------------------------------------


def equal(asked: argparse.Namespace) -> None:
    rows = Rows("deploy-equal", "model", "method")
    specs = [f"torchvision:{n}" for n in TORCHVISION] + [f"timm:{n}" for n in TIMM]
    for spec in specs if asked.only is None else [asked.only]:
        for name in METHODS:
            if name != "batchnorm" and (spec, name) not in rows:
                row = {"model": spec, "method": name, **_equal(spec, name)}
                rows.add(row, **_summary([*rows.rows, row]))
                gc.collect()


def _equal(spec: str, name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    method = ScaledWS(skip_gain=0.5) if name == "scaled-ws" else METHODS[name]()
    model = build(spec)
    shape = smallest_input(model)
    try:
        converted = stirred(model, method, shape)
    except RefusedError as error:
        return {"outcome": "not converted", "why": str(error)[:200]}
    start = time.perf_counter()
    try:
        folded = fold_with_report(converted)
        seconds = time.perf_counter() - start
        wide = copy.deepcopy(converted).double()
        wide_folded = fold_with_report(wide)
    except MimicNormError as error:
        return {"outcome": "broken", "why": str(error)[:400]}
    x = torch.randn(shape)
    with torch.no_grad():
        exact = tensors_in(wide(x.double()))
        single, again = tensors_in(converted(x.clone())), tensors_in(folded.model(x.clone()))
        double = tensors_in(wide_folded.model(x.double()))
    return {
        "outcome": "folded",
        "shape": list(shape),
        "fp32": max(map(relative_error, single, again)),
        "fp64": max(map(relative_error, exact, double)),
        "fp32_rounding": max(map(relative_error, exact, single)),
        "folded_into_layers": len(folded.into),
        "layers_of_their_own": len(folded.standalone),
        "classes_left": sorted({type(m).__name__ for m in folded.model.modules() if "mimicnorm" in type(m).__module__}),
        "seconds": round(seconds, 2),
    }


def _summary(rows: list[dict]) -> dict[str, Any]:
    folded = [row for row in rows if row["outcome"] == "folded"]
    return {
        "folded": len(folded),
        "broken": [(row["model"], row["method"]) for row in rows if row["outcome"] == "broken"],
        "worst": {kind: max(row[kind] for row in folded) for kind in ("fp32", "fp64")} if folded else {},
        "above_1e-5": [(r["model"], r["method"], r["fp32"], r["fp32_rounding"]) for r in folded if r["fp32"] > 1e-5],
    }


# -- int8 --------------------------------------------------------------------------------------------------------


def int8(asked: argparse.Namespace) -> None:
    cells = [
        (network, method, seed)
        for network in NETWORKS[asked.data]
        for seed in range(asked.seeds)
        for method in ("batchnorm", "mimicnorm")
    ]
    recipes = {f"{asked.data} {' '.join(map(str, cell))}": _recipe(asked.data, *cell) for cell in cells}
    epochs = {r.epochs for r in recipes.values()}
    rows = Rows(f"deploy-int8-{asked.data}", "network", "method", "seed", epochs=epochs.pop())
    results = dict(run_all(recipes, RUNS, asked.jobs, data_dir=asked.data_dir))
    for cell, (label, chosen) in zip(cells, recipes.items(), strict=True):
        if cell not in rows:
            row = dict(zip(("network", "method", "seed"), cell, strict=True))
            rows.add({**row, **_int8(results[label], folder_of(label, chosen, RUNS), asked.data_dir)})


def _recipe(data: str, network: str, method: str, seed: int) -> Recipe:
    if data == "digits":
        return recipe("digits-resnet10", model=network, method=method, seed=seed)
    return short(method, seed, model=network)


def _int8(result: Result, folder: Path, data_dir: str | None) -> dict[str, Any]:
    run = finished(folder, data_dir=data_dir)
    example = (2, *run.train_set.shape)
    plain = fuse(run.model) if run.recipe.method == "batchnorm" else fold(run.model, example=example)
    row: dict[str, Any] = {"top1_torch": result.top1, "top1": {}, "bytes": {}}
    row["last_norm_variance"] = result.history[-1].get("last_norm_variance")
    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder) / f"{kind}.onnx" for kind in ("float", "per tensor", "per channel")}
        exported = export(plain, "onnx", paths["float"], example=example)
        row |= {"opset": exported.opset, "nodes": exported.nodes, "normalisation_nodes": exported.norms}
        ranges = []
        for kind in ("per tensor", "per channel"):
            images = (images for images, _ in run.train_set.plain_batches(BATCH, most=CALIBRATION))
            ranges = quantise(paths["float"], paths[kind], images, per_channel=kind == "per channel")
        for kind, path in paths.items():
            row["top1"][kind] = accuracy(path, run.test_set.plain_batches(BATCH))
            row["bytes"][kind] = path.stat().st_size
    spreads = [r.spread for r in ranges]
    row["channel_spread"] = {"median": statistics.median(spreads), "largest": max(spreads)}
    return {**row, "ranges": [asdict(r) for r in ranges]}


# -- time --------------------------------------------------------------------------------------------------------


def timed(asked: argparse.Namespace) -> None:
    torch.set_num_threads(asked.threads)
    rows = Rows("deploy-time", "network", "batch", rounds=asked.rounds, threads=asked.threads)
    for network, batch in TIMED:
        if (network, batch) not in rows:
            rows.add({"network": network, "batch": batch, **_timed(asked, network, batch)})
            gc.collect()


def _timed(asked: argparse.Namespace, network: str, batch: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = zoo.torchvision().models.get_model(network, weights=None).eval()
    shape = (2, 3, 224, 224)
    plain = {"folded": fold(convert(model, METHODS["mimicnorm"](), example=shape).eval()), "fused": fuse(model)}
    x = torch.randn(batch, *shape[1:])
    steps: dict[str, Callable[[], object]] = {}
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, net in plain.items():
            path = Path(folder) / f"{name}.onnx"
            sizes[name] = export(net, "onnx", path, example=shape).bytes
            session = session_of(path, threads=asked.threads)
            feed = {session.get_inputs()[0].name: x.numpy()}
            steps[f"{name}, eager"] = lambda net=net: net(x)
            steps[f"{name}, onnxruntime"] = lambda session=session, feed=feed: session.run(None, feed)
        with torch.inference_mode():
            seconds = interleaved(steps, rounds=asked.rounds, budget=float("inf"))
    ways = ("eager", "onnxruntime")
    return {
        "folded_over_fused": {way: ratio(seconds[f"folded, {way}"], seconds[f"fused, {way}"]) for way in ways},
        "median_seconds": {name: round(statistics.median(s), 5) for name, s in seconds.items()},
        "onnx_bytes": sizes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    one = parts.add_parser("equal")
    one.add_argument("--only")
    one.set_defaults(run=equal)
    two = parts.add_parser("int8")
    two.add_argument("data", choices=NETWORKS)
    two.add_argument("--seeds", type=int, default=3)
    two.add_argument("--jobs", type=int, default=1)
    two.add_argument("--data-dir")
    two.set_defaults(run=int8)
    three = parts.add_parser("time")
    three.add_argument("--rounds", type=int, default=30)
    three.add_argument("--threads", type=int, default=1)
    three.set_defaults(run=timed)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    asked.run(asked)


if __name__ == "__main__":
    main()
