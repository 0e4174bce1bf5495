"""Activations saved in few bits: bytes, exactness, time, accuracy; one JSON file in ``results/`` per part.

    python benchmarks/compress.py [bytes] [exactness] [time] [accuracy] [--data-dir FOLDER] [--jobs 1]

bytes      saved for backward and peak of a step, with BatchNorm and with MimicNorm, and the largest batch in 16 GiB:
           predicted on fake tensors
exactness  bias gradients that are bit-equal to those of full precision, the cosine of all gradients, residual scalars
time       a training step, methods and widths in turns
accuracy   CIFAR-100, a narrow ResNet-18, ten epochs, three seeds: runs of ``mimicnorm train``, cached in results/runs

Each part goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections.abc import Callable

import torch
from provenance import Rows, provenance, save, zoo
from runs import SHORT, short, trained
from steps import ratio
from torch import nn
from torch.nn import functional as F

from mimicnorm import memory
from mimicnorm.compare.timing import interleaved
from mimicnorm.compress import kernels, saved_activations
from mimicnorm.methods import METHODS
from mimicnorm.surgery.convert import convert_

NETWORKS = ("resnet50", "resnet18", "vgg16_bn", "mobilenet_v2", "densenet121", "shufflenet_v2_x0_5")
SEVERAL = ("batchnorm", "mimicnorm")
SEEDS = range(3)
MIB = 2**20


def network(name: str, method: str, pixels: int, init: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = zoo.torchvision().models.get_model(name, weights=None, num_classes=1000)
    convert_(model, METHODS[method](), example=(2, 3, pixels, pixels), init=init)
    return model.train()


def saving(bits: int) -> contextlib.AbstractContextManager:
    return saved_activations(bits, seed=0) if bits else contextlib.nullcontext()


# -- bytes -------------------------------------------------------------------------------------------------------


def bytes_(_: argparse.Namespace) -> None:
    batch, budget = 256, "16 GiB"
    rows = Rows("compress-bytes", "network", "method", "bits", batch=batch, pixels=224, budget=budget)
    for name in NETWORKS:
        for method in SEVERAL:
            model = network(name, method, 224)
            for bits in (0, 32, 8, 4):
                if (name, method, bits) in rows:
                    continue
                how = {"activation_bits": bits or None}
                analysis = memory.measure(model, (batch, 3, 224, 224), **how)
                row = {"network": name, "method": method, "bits": bits}
                row["saved_mib_per_image"] = analysis.saved_bytes_per_sample / MIB
                row["peak_bytes"] = analysis.peak_bytes
                row["largest_batch"] = memory.largest_batch(model, (2, 3, 224, 224), budget, **how)
                rows.add(row)


# -- exactness ---------------------------------------------------------------------------------------------------


def exactness(_: argparse.Namespace) -> None:
    batch, pixels = 4, 64
    rows = Rows("compress-exactness", "network", "method", "bits", batch=batch, pixels=pixels)
    for name in (*NETWORKS, "regnet_y_400mf", "efficientnet_b0"):
        for method in SEVERAL if name in ("resnet50", "resnet18") else ("mimicnorm",):
            missing = [bits for bits in (32, 8, 4, 2) if (name, method, bits) not in rows]
            if not missing:
                continue
            model = network(name, method, pixels, init="auto")
            images = torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(1))
            right = gradients(model, images, 0)
            for bits in missing:
                rows.add(
                    {"network": name, "method": method, "bits": bits, **apart(gradients(model, images, bits), right)}
                )


def gradients(model: nn.Module, images: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    with saving(bits):
        loss = F.cross_entropy(model(images), torch.arange(len(images)))
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def apart(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict:
    biases = [n for n in right if n.endswith("bias")]
    flat = [torch.cat([g.double().flatten() for g in grads.values()]) for grads in (found, right)]
    scalars = [((found[n] - right[n]) / right[n]).abs().item() for n in right if right[n].numel() == 1]
    return {
        "biases": len(biases),
        "equal_biases": sum(torch.equal(found[n], right[n]) for n in biases),
        "cosine": F.cosine_similarity(*flat, dim=0).item(),
        "worst_scalar_error": max(scalars, default=None),
    }


# -- time --------------------------------------------------------------------------------------------------------

WAYS = ("batchnorm", "mimicnorm", "mimicnorm 8", "mimicnorm 4", "mimicnorm 8 uncompiled", "batchnorm 8")
CELLS = (("resnet50", 8, 224), ("resnet50", 8, 112), ("resnet18", 32, 112))


def time(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    rows = Rows("compress-time", "cell", rounds=options.rounds, threads=options.threads)
    for name, batch, pixels in CELLS:
        cell = f"{name}-{batch}-{pixels}"
        if (cell,) in rows:
            continue
        steps = {way: step_of(name, way, batch, pixels) for way in WAYS}
        seconds = interleaved(steps, rounds=options.rounds, budget=float("inf"))
        over = {way: ratio(s, seconds["mimicnorm"]) for way, s in seconds.items()}
        medians = {way: round(statistics.median(s), 4) for way, s in seconds.items()}
        rows.add({"cell": cell, "over_mimicnorm": over, "median_seconds": medians})


def step_of(name: str, way: str, batch: int, pixels: int) -> Callable[[], None]:
    method, bits, eager = (*way.split(), "", "")[:3]
    model = network(name, method, pixels).to(memory_format=torch.channels_last)  # pyrefly: ignore
    images = torch.randn(batch, 3, pixels, pixels).to(memory_format=torch.channels_last)
    labels = torch.arange(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.9, weight_decay=1e-4)

    def step() -> None:
        if eager:
            kernels._broken.append("switched off")
        optimizer.zero_grad()
        with saving(int(bits or 0)):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        if eager:
            kernels._broken.clear()

    return step


# -- accuracy ----------------------------------------------------------------------------------------------------


def accuracy(options: argparse.Namespace) -> None:
    cells = [(seed, method, bits) for seed in SEEDS for method in SEVERAL for bits in (0, 8, 4, 2)]
    recipes = {
        f"{method} {bits or 32} bits seed {seed}": short(method, seed, activation_bits=bits)
        for seed, method, bits in cells
    }
    torch.set_num_threads(options.threads)
    runs = trained(recipes, options.data_dir, options.jobs)
    rows: dict[tuple[str, int], dict] = {}
    for (_, method, bits), run in zip(cells, map(runs.get, recipes), strict=True):
        row = rows.setdefault((method, bits), {"method": method, "bits": bits or 32, "accuracy": [], "diverged": 0})
        if run is not None:
            row["accuracy"].append(run["history"][-1]["top1"] if run["status"] == "done" else None)
            row["diverged"] += run["status"] == "diverged"
    save("compress-accuracy", {**provenance(recipe="cifar100-resnet18-desk", **SHORT), "rows": list(rows.values())})


PARTS = {"bytes": bytes_, "exactness": exactness, "time": time, "accuracy": accuracy}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: bytes and exactness")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--data-dir")
    chosen = parser.parse_args()
    for part in chosen.parts or ("bytes", "exactness"):
        PARTS[part](chosen)
