"""Trained networks that are kept: equality over the zoo, fine-tuning, and what a user could take instead.

    python benchmarks/keep.py equal
    python benchmarks/keep.py rates seeds --data-dir FOLDER [--jobs 2]
    python benchmarks/keep.py alternatives

equal         torchvision's BatchNorm classifiers and one network of each module of timm, statistics and affine drawn at
              random: outputs, gradients, independence of samples, saved bytes. Finished networks are skipped when the
              same code runs again. ``results/keep-equal.json``
rates, seeds  CIFAR-100: a narrow ResNet-18 trained on 50 classes, fine-tuned on 5,000 images of the others. First a
              learning rate for each way at batch 32 and 4, on images held out; then three seeds on the test set. Runs
              are cached in ``results/runs``. ``results/keep-tuning.json``
alternatives  frozen BatchNorm, inductor's flag for it, activation checkpointing: saved bytes and time of a step beside
              keep. ``results/keep-alternatives.json``
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch._inductor.config
from coverage import build, smallest_input
from provenance import RESULTS, ROOT, Rows, provenance, save, zoo
from runs import available, trained
from steps import checkpointed, ratio, really_saved, training_step
from torch import Tensor, nn
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))  # the runs import keep_networks

import keep_networks

import mimicnorm as mn
from mimicnorm import memory
from mimicnorm.compare.timing import interleaved
from mimicnorm.deploy.fold import relative_error
from mimicnorm.errors import MimicNormError
from mimicnorm.surgery.recorder import is_batch_norm
from mimicnorm.training import recipe
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.sweep import folder_of, run_all

# -- equal -------------------------------------------------------------------------------------------------------

GRADIENTS = 1e-9  # where gradients differ by more, the network's own sensitivity is measured, too:
MOVED = 1e-15  # how much its gradients change if every input value changes by this fraction
LARGE = 200e6  # parameters; above, two networks in fp64 with their gradients do not fit into 16 GiB


def families() -> list[tuple[str, str]]:
    """torchvision's classifiers with BatchNorm; of each module of timm, the one that coverage.py converted fastest."""
    lines = map(json.loads, (RESULTS / "coverage.jsonl").read_text().splitlines())
    seconds = {(row["source"], row["name"]): row["seconds"] for row in lines if row.get("outcome") == "converted"}
    chosen = [key for key in seconds if key[0] == "torchvision"]
    timm = zoo.timm()
    for module in timm.list_modules():
        names = [("timm", name) for name in timm.list_models(module=module) if ("timm", name) in seconds]
        chosen += [min(names, key=lambda key: seconds[key])] if names else []
    return sorted(chosen, key=lambda key: seconds[key])


def draw(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Give every BatchNorm a random affine map, and statistics at random around those of a batch of noise.

    They must fit the network, as trained ones do, or rounding errors grow from layer to layer: gammas are small,
    variances differ by factors exp(0.3 z + 0.045) from the batch's, and are a tenth of their layer's mean at least.
    """
    generator = torch.Generator().manual_seed(1)
    norms: list[Any] = [m for m in model.modules() if is_batch_norm(m)]
    with torch.no_grad():
        for m in norms:
            if m.weight is not None:
                m.weight.uniform_(0.2, 0.6, generator=generator)
                m.bias.normal_(0, 0.1, generator=generator)
            m.momentum = 1.0
        model.train()(torch.randn(16, *shape[1:], generator=generator))
        for m in norms:
            m.momentum = 0.1
            m.running_var.clamp_(min=0.1 * float(m.running_var.mean()) + 1e-6)
            m.running_mean += 0.1 * m.running_var.sqrt() * torch.randn(m.running_mean.shape, generator=generator)
            m.running_var *= torch.exp(0.3 * torch.randn(m.running_var.shape, generator=generator) + 0.045)


def leaves(output: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def difference(a: Any, b: Any) -> float:
    """The largest difference of two outputs, relative to the largest value."""
    return max(relative_error(s, t) for s, t in zip(leaves(a), leaves(b), strict=True))


def gradient_difference(model: nn.Module, other: nn.Module, moved: dict[str, str], x: Tensor, y: Tensor) -> float:
    """The largest relative difference of a parameter's gradient; one below 1e-6 of the largest counts as that.

    The networks get the inputs x and y. In training mode with BatchNorms in evaluation mode: some networks cache values
    in evaluation mode.
    """
    for network, given in ((model, x), (other, y)):
        network.zero_grad()
        for m in network.train().modules():
            m.training &= not is_batch_norm(m)
        torch.manual_seed(2)  # dropout
        outputs = leaves(network(given))
        generator = torch.Generator().manual_seed(2)
        sum((torch.randn(t.shape, generator=generator).to(t) * t).sum() for t in outputs).backward()  # pyrefly: ignore
    pairs = [(p.grad, other.get_parameter(moved.get(n, n)).grad) for n, p in model.named_parameters()]
    if any((a is None) != (b is None) for a, b in pairs):
        return math.inf
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    least = 1e-6 * max(float(a.norm()) for a, _ in both)
    return max(float((a - b).norm()) / max(float(a.norm()), least) for a, b in both)


def sees_others(kept: nn.Module, x: Tensor) -> bool:
    """Whether, in training mode, what comes out for the first sample depends on another."""
    x = x.clone().requires_grad_()
    firsts = [t[0].sum() for t in leaves(kept.train()(x)) if t.shape[:1] == x.shape[:1]]
    (grad,) = torch.autograd.grad(sum(firsts), x)  # pyrefly: ignore
    return bool(grad[1:].any()) or not bool(grad[0].any())


def examine(source: str, name: str) -> dict:
    torch.manual_seed(0)
    model = build(source, name)
    shape = smallest_input(model)
    draw(model, shape)
    x = torch.randn(shape)
    row: dict[str, Any] = {"shape": list(shape), "parameters": sum(p.numel() for p in model.parameters())}
    for method in (mn.MimicNorm(), mn.NoNorm()):
        kept = copy.deepcopy(model)
        report = mn.convert_(kept, method, example=shape, init="keep")
        row["other samples"] = row.get("other samples", False) or sees_others(kept, x)
        with torch.no_grad():
            row[f"fp32 {method.name}"] = difference(model.eval()(x), kept.eval()(x))
    row |= {key: report.totals()[key] for key in ("batch_norms", "folded", "affines", "left")}
    row |= saved(model, kept, max(224, shape[-1]))
    if row["parameters"] < LARGE:
        exact, kept, x = copy.deepcopy(model).double(), kept.double(), x.double()
        with torch.no_grad():
            row["fp64"] = difference(exact.eval()(x), kept.eval()(x))
            row["fp32 of the original"] = difference(exact(x), model.eval()(x.float()))  # its own rounding
        row["gradients"] = gradient_difference(exact, kept, report.moved_parameters, x, x)
        if row["gradients"] > GRADIENTS:
            same = copy.deepcopy(exact)
            row["gradients of the original, input moved"] = gradient_difference(exact, same, {}, x, x * (1 + MOVED))
    return row


def saved(model: nn.Module, kept: nn.Module, image: int) -> dict:
    """Bytes saved for backward at the network's own input size, over those of the network without norms."""
    config = getattr(model, "default_cfg", None) or {}
    shape = (8, *config.get("input_size", (3, image, image)))
    plain = mn.convert(model, mn.NoNorm(), example=shape, init=None)
    networks = {"batchnorm": model, "keep": kept, "nonorm": plain}
    measured = {key: memory.measure(network.train(), shape).saved_bytes for key, network in networks.items()}
    return {f"saved {key}": measured[key] / measured["nonorm"] for key in ("batchnorm", "keep")}


def equal() -> None:
    rows = Rows("keep-equal", "source", "name")
    for source, name in families():
        if (source, name) in rows:
            continue
        try:
            outcome = examine(source, name)
        except MimicNormError as error:
            outcome = {"refused": str(error)[:400]}
        rows.add({"source": source, "name": name, **outcome})
        gc.collect()


# -- rates and seeds ---------------------------------------------------------------------------------------------

PRETRAINED, FOLDED = "runs/keep-pretrained.safetensors", "runs/keep-folded.safetensors"
BATCHES = (2, 4, 32)
RATES = (0.01, 0.03, 0.1)  # at batch 32; in proportion to the batch
SEARCHED = {32: 32, 4: 4, 2: 4}  # which batch size's search gives the rate: that of 4 serves 2, in proportion
COMMON: dict[str, Any] = {"classes": "50-99", "limit": 5000, "epochs": 4, "schedule": "linear", "warmup": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "BatchNorm": {"model": "keep_networks:batchnorm", "method": "batchnorm"},
    "frozen BatchNorm": {"model": "keep_networks:frozen", "method": "batchnorm"},
    "GroupNorm": {"model": "keep_networks:groupnorm", "method": "batchnorm"},
    "folded": {"model": "keep_networks:folded", "method": "batchnorm", "init_from": FOLDED},
    "keep": {"model": "keep_networks:batchnorm", "method": "nonorm"},
    "keep, centred": {"model": "keep_networks:batchnorm", "method": "mimicnorm", "settings": ("min_fan_in=12",)},
}
SEEDS = (0, 1, 2)


def pretrain(data_dir: str) -> None:
    """Train on the first 50 classes; write the weights without the classifier, as they are and folded."""
    fields = {"classes": "0-49", "epochs": 20, "batch": 128, "lr": 0.2, "schedule": "linear", "warmup": 0.1}
    chosen = recipe("cifar100-resnet18-desk", model="keep_networks:batchnorm", method="batchnorm", **fields)
    (((_, result)),) = run_all({"pretrained": chosen}, "runs", data_dir=data_dir)
    print(f"pretrained: {result.status}, top-1 {result.top1}", flush=True)
    state = safetensors.torch.load_file(folder_of("pretrained", chosen, "runs") / "weights.safetensors")
    state = {k: v for k, v in state.items() if not k.startswith("fc.")}
    safetensors.torch.save_file(state, PRETRAINED)
    safetensors.torch.save_file(keep_networks.fold_state(state), FOLDED)


def tuning(way: str, batch: int, rate: float, seed: int, **changes: Any) -> Recipe:
    fields = {"init_from": PRETRAINED, "init": "keep", **COMMON, **WAYS[way], **changes}
    return recipe("cifar100-resnet18-desk", batch=batch, lr=rate * batch / 32, seed=seed, **fields)


def rates() -> dict[tuple, Recipe]:
    """Each way at three learning rates, evaluated on a tenth of the training images."""
    return {
        (way, batch, rate): tuning(way, batch, rate, 10, validation=0.1)
        for batch in dict.fromkeys(SEARCHED.values())
        for way in WAYS
        for rate in RATES
    }


def best_rates() -> dict[tuple, float]:
    """The learning rate of each way and batch size whose run was best on the images held out."""
    runs = labelled(available(texts(rates())), rates())
    best = {}
    for way in WAYS:
        for batch in BATCHES:
            tried = {rate: top1(run) for (w, b, rate), run in runs.items() if (w, b) == (way, SEARCHED[batch])}
            if len(tried) == len(RATES):
                best[way, batch] = max(tried, key=lambda rate: tried[rate])
    return best


def seeds() -> dict[tuple, Recipe]:
    """Three seeds of each way at its best learning rate, on the test set; keep in micro-batches of one, too."""
    made = {
        (way, batch, seed): tuning(way, batch, rate, seed)
        for (way, batch), rate in best_rates().items()
        for seed in SEEDS
    }
    for seed in SEEDS:
        if ("keep, centred", 32) in best_rates():
            rate = best_rates()["keep, centred", 32]
            made["keep, centred, micro-batches of 1", 32, seed] = tuning("keep, centred", 32, rate, seed, micro_batch=1)
    return made


def texts(recipes: dict[tuple, Recipe]) -> dict[str, Recipe]:
    return {"keep " + " ".join(map(str, label)): r for label, r in recipes.items()}


def labelled(runs: dict[str, dict], recipes: dict[tuple, Recipe]) -> dict[tuple, dict]:
    return {label: runs[text] for label, text in zip(recipes, texts(recipes), strict=True) if text in runs}


def top1(run: dict) -> float:
    return run["history"][-1]["top1"] if run["status"] == "done" else 0.0


def summarise() -> None:
    """Accuracy of every seed, memory and time of every way; also of what is not finished."""
    runs = labelled(available(texts(seeds())), seeds())
    searched = labelled(available(texts(rates())), rates())
    rows: dict[str, dict] = {}
    for (way, batch, _), run in runs.items():
        row = rows.setdefault(f"{way}, batch {batch}", {"way": way, "batch": batch, "top1": [], "diverged": 0})
        row["diverged"] += run["status"] == "diverged"
        row["lr"] = run["recipe"]["lr"]
        row["top1"].append(top1(run))
        row.setdefault("seconds", []).extend(h["seconds"] for h in run["history"])
        row["saved_bytes"] = saved_bytes(way, batch)
    search = [
        {"way": w, "batch": b, "rate": r, "status": run["status"], "top1": top1(run)}
        for (w, b, r), run in searched.items()
    ]
    save("keep-tuning", {**provenance(**COMMON, rates=RATES), "search": search, "rows": list(rows.values())})


def saved_bytes(way: str, batch: int) -> int:
    """What a step saves for backward; in micro-batches of one, what one of them does."""
    fields, parts = WAYS.get(way, WAYS["keep, centred"]), way not in WAYS
    shape = (1 if parts else batch, 3, 32, 32)
    model = getattr(keep_networks, fields["model"].partition(":")[2])()
    if fields["method"] != "batchnorm":
        draw(model, (2, 3, 32, 32))
        model = mn.convert(model, mn.NoNorm(), example=(2, 3, 32, 32), init="keep")
    return memory.measure(model.train(), shape).saved_bytes


# -- alternatives ------------------------------------------------------------------------------------------------

SHAPE = (32, 3, 32, 32)


def alternatives() -> None:
    """The narrow ResNet-18 on the CPU; the compiled networks are compiled for real."""
    model = keep_networks.batchnorm()
    draw(model, SHAPE)
    frozen = keep_networks.freeze(copy.deepcopy(model))
    rows = Rows("keep-alternatives", "name", shape=SHAPE, threads=torch.get_num_threads())
    kept = {m.name: mn.convert(model, m, example=SHAPE, init="keep") for m in (mn.NoNorm(), mn.MimicNorm())}
    networks: dict[str, tuple[nn.Module, bool | None]] = {
        "BatchNorm": (model, None),
        "frozen BatchNorm": (frozen, None),
        "frozen BatchNorm, checkpointed blocks": (checkpointed(copy.deepcopy(frozen)), None),
        "no norm": (mn.convert(model, mn.NoNorm(), example=SHAPE, init=None), None),
        "keep": (kept["nonorm"], None),
        "keep, centred": (kept["mimicnorm"], None),
        "frozen BatchNorm, compiled": (copy.deepcopy(frozen), False),
        "frozen BatchNorm, compiled, efficient_conv_bn_eval_fx_passes": (copy.deepcopy(frozen), True),
        "keep, compiled": (copy.deepcopy(kept["nonorm"]), False),
    }
    images, labels = torch.randn(SHAPE), torch.zeros(SHAPE[0], dtype=torch.long)
    baseline = training_step(copy.deepcopy(model).train(), images, labels)
    for name, (network, flag) in networks.items():
        if (name,) in rows:
            continue
        row: dict[str, Any] = {"name": name}
        if flag is None:
            row["saved_bytes"] = memory.measure(network.train(), SHAPE).saved_bytes
        else:
            torch._dynamo.reset()
            torch._inductor.config.efficient_conv_bn_eval_fx_passes = flag
            network.train().compile()
            row["saved_bytes"] = really_saved(network, images)
        steps = {"this": training_step(network.train(), images, labels), "BatchNorm": baseline}
        seconds = interleaved(steps, rounds=7, budget=float("inf"))
        rows.add(row | {"seconds": ratio(seconds["this"], seconds["BatchNorm"])["value"]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=("equal", "rates", "seeds", "alternatives"))
    parser.add_argument("--data-dir")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    os.chdir(ROOT)  # the files of weights go by relative names
    for part in options.parts:
        if part in ("equal", "alternatives"):
            {"equal": equal, "alternatives": alternatives}[part]()
            continue
        if not options.data_dir:
            parser.error(f"{part} needs --data-dir")
        pretrain(options.data_dir)
        torch.set_num_threads(options.jobs)  # one for each run
        trained(texts({"rates": rates, "seeds": seeds}[part]()), options.data_dir, options.jobs)
        summarise()


if __name__ == "__main__":
    main()
