"""Integer training against floating point: accuracy, what matters for it, time, bytes; one JSON file per part.

    python benchmarks/integer.py [digits] [cifar100] [ablation] [matmul] [step] [bytes] [--data-dir FOLDER] [--seeds 3]

digits    four networks on scikit-learn's digits, each in integers and in fp32 under the same recipe
cifar100  VGG-11 and ResNet-18 at a quarter of the width, ten epochs on 8,000 images, in integers and in fp32
ablation  ResNet-18 of that recipe, seed 0: nearest rounding, 8-bit masters, no weight mean, no last BN, neither
matmul    one product of a 3 x 3 convolution, int8 against fp32, by width
step      a whole step of ResNet-18, by width, requantisation compiled or not, and the share of matrix products in it
bytes     what a step saves for backward, holds as state, and moves

Runs are folders of the training loop (``--runs``), so each part goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
import functools
import time as clock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import ROOT, Rows
from runs import SHORT
from steps import training_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import mimicnorm as mn
from mimicnorm import models
from mimicnorm.compare.timing import interleaved, summary
from mimicnorm.integer import Trainer, convolve, run
from mimicnorm.integer.formats import Block
from mimicnorm.integer.matmul import matmul as product
from mimicnorm.integer.operation import Pass
from mimicnorm.training import Recipe, recipe, train

EIGHTHS = {"momentum": 0.875}  # what integers have; fp32 gets the same
DIGITS = ("mlp10", "resnet10", "vgg11", "squeezenet")
SMALL = ("resnet18", "vgg11")
KINDS: dict[str, dict] = {"fp32": {"precision": "fp32"}, "integers": {"precision": "int8", "compile": True}}
ABLATION: dict[str, dict] = {
    "as it is": {},
    "nearest rounding": {"rounding": "nearest"},
    "8-bit masters": {"master_bits": 8},
    "no weight mean": {"method": "last-bn"},
    "no last BN": {"method": "weight-mean"},
    "no norm at all": {"method": "nonorm"},
}
WIDTHS = (16, 32, 64, 128, 256, 512)


def trained(options: argparse.Namespace, label: str, made: Recipe, **how: object) -> dict:
    """Train in a folder, or read what is there; return what a row holds of it."""
    start = train if made.precision == "fp32" else run.train
    result = start(made, options.runs / label, data_dir=options.data_dir, progress=False, **how)  # type: ignore
    if result.status == "interrupted":
        raise SystemExit(130)
    last = result.history[-1] if result.history else {}
    return {"status": result.status, **{k: last.get(k) for k in ("top1", "train_loss", "images_per_second")}}


# -- accuracy ----------------------------------------------------------------------------------------------------


def accuracy(options: argparse.Namespace, part: str, networks: tuple[str, ...], seeds: int, **changes: Any) -> None:
    """Train each network in integers and in fp32 under the same recipe."""
    rows = Rows(f"integer-{part}", "network", "kind", "seed", **changes)
    for seed in range(seeds):
        for network in networks:
            for kind, fields in KINDS.items():
                if (network, kind, seed) not in rows:
                    base = {"model": network, "seed": seed, **fields, **changes}
                    made = recipe("digits-resnet10" if part == "digits" else "cifar100-resnet18-desk", **base)
                    about = {"network": network, "kind": kind, "seed": seed}
                    rows.add(about | trained(options, f"{part}-{network}-{kind}-{seed}", made))


def digits(options: argparse.Namespace) -> None:
    accuracy(options, "digits", DIGITS, 5, **EIGHTHS)


def cifar100(options: argparse.Namespace) -> None:
    accuracy(options, "cifar100", SMALL, options.seeds, **SHORT, **EIGHTHS)


def ablation(options: argparse.Namespace) -> None:
    changes = SHORT | EIGHTHS
    rows = Rows("integer-ablation", "way", "kind", network=options.network, seed=0, **changes)
    for way, settings in ABLATION.items():
        method = {"method": settings["method"]} if "method" in settings else {}
        how = {name: value for name, value in settings.items() if name != "method"}
        for kind, fields in KINDS.items():
            if (way, kind) in rows or (how and kind == "fp32"):
                continue
            made = recipe(f"cifar100-{options.network}-desk", **method, **fields, **changes)
            whole = f"cifar100-{options.network}-{kind}-0"  # what the part cifar100 has trained
            label = f"ablation-{options.network}-{way}-{kind}".replace(" ", "-") if settings else whole
            rows.add({"way": way, "kind": kind} | trained(options, label, made, **how))


# -- time --------------------------------------------------------------------------------------------------------


# Processor time: a long product waits for other processes on the cores and a short one does not, which would favour
# integers by the clock.
in_turns = functools.partial(interleaved, budget=float("inf"), clock=clock.process_time)


def matmul(options: argparse.Namespace) -> None:
    rows = Rows("integer-matmul", "channels", rounds=options.rounds, threads=1, time="processor")
    for channels in WIDTHS:
        if (channels,) in rows:
            continue
        pixels = 2**18 // channels  # the more channels, the fewer pixels, as in a network
        codes = torch.randint(-127, 128, (pixels, 9 * channels), dtype=torch.int8)
        weight = torch.randint(-127, 128, (channels, 9 * channels), dtype=torch.int8)
        wide, wide_weight = codes.float(), weight.float()
        half, half_weight = codes.bfloat16(), weight.bfloat16()
        ways: dict[str, Callable[[], object]] = {
            "fp32": lambda a=wide, b=wide_weight: a @ b.t(),
            "bf16": lambda a=half, b=half_weight: a @ b.t(),
            "int8": lambda a=codes, b=weight: product(a, b.t()),
        }
        seconds = in_turns(ways, rounds=options.rounds)
        work = 2 * pixels * 9 * channels * channels
        rate = {way: work / min(s) / 1e9 for way, s in seconds.items()}
        rows.add({"channels": channels, "pixels": pixels, "gflops": rate, "over_fp32": summary(seconds, "fp32")})


def network(width: float, method: mn.Method | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = models.build("resnet18", input="cifar", width=width)
    mn.convert_(model, method or mn.MimicNorm(min_fan_in=12, centre="backward"), example=(2, 3, 32, 32))
    return model.train()


def float_step(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], object]:
    images = images.contiguous(memory_format=torch.channels_last)
    return training_step(model.to(memory_format=torch.channels_last), images, labels, momentum=0.875)


def step(options: argparse.Namespace) -> None:
    rows = Rows("integer-step", "width", rounds=options.rounds, threads=1, time="processor")
    for width, batch in ((0.25, 128), (0.5, 64), (1.0, 32)):
        if (width,) in rows:
            continue
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))
        ways = {"fp32": float_step(network(width), images, labels)}
        for way, compiled in (("integers", False), ("compiled", True)):
            trainer = Trainer(network(width), lr=0.0, weight_decay=5e-4, compile=compiled)
            ways[way] = functools.partial(trainer.step, images, labels)
        seconds = in_turns(ways, rounds=options.rounds)
        rate = {way: batch / min(s) for way, s in seconds.items()}
        share = {way: share_of_products(ways[way]) for way in ("integers", "compiled")}
        row = {"width": width, "batch": batch, "images_per_second": rate, "share_of_products": share}
        rows.add(row | {"over_fp32": summary(seconds, "fp32")})


def share_of_products(step: Callable[[], object]) -> float:
    """Return the fraction of a step's time that is spent in matrix products."""
    spent = [0.0]

    def timed(*args: Tensor, **kwargs: Tensor) -> Tensor:
        begun = clock.process_time()
        result = product(*args, **kwargs)
        spent[0] += clock.process_time() - begun
        return result

    convolve.matmul = timed
    try:
        begun = clock.process_time()
        step()
        return spent[0] / (clock.process_time() - begun)
    finally:
        convolve.matmul = product


# -- bytes -------------------------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Adds up the bytes that operations read and write; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        storages = {t.untyped_storage().data_ptr() for t in read}
        in_place = func._schema.name.endswith("_") or "out" in (kwargs or {})
        if in_place or any(t.untyped_storage().data_ptr() not in storages for t in made):
            self.bytes += sum(t.numel() * t.element_size() for t in (*read, *made))
        return result


def traffic(step: Callable[[], object]) -> int:
    with Traffic() as seen:
        step()
    return seen.bytes


def storages(tensors: list[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def saved_by(model: nn.Module, images: Tensor, labels: Tensor) -> list[Tensor]:
    """Return what autograd saves in a forward pass, without the weights."""
    saved: list[Tensor] = []
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        F.cross_entropy(model(images), labels)
    return [t for t in saved if t.untyped_storage().data_ptr() not in weights]


def bytes_(_: argparse.Namespace) -> None:
    batch = 64
    rows = Rows("integer-bytes", "width", batch=batch, pixels=32)
    for width in (0.25, 1.0):
        if (width,) in rows:
            continue
        images, labels = torch.randn(batch, 3, 32, 32), torch.randint(100, (batch,))
        model = network(width)
        step = float_step(model, images, labels)
        step()
        parameters = sum(p.numel() for p in model.parameters())
        fp32 = {
            "saved": storages(saved_by(model, images, labels)),
            "state": 12 * parameters,
            "moved": traffic(step),
        }  # with the gradient
        trainer = Trainer(network(width), lr=0.0, weight_decay=5e-4)
        codes = trainer.encode(images)
        trainer.step(codes, labels)
        _, held = trainer.network.forward(Pass(0, trainer._key), Block(codes, 0))
        leaves = [t for t in pytree.tree_leaves(held) if isinstance(t, Tensor)]
        state = sum(t.numel() * t.element_size() for name, t in trainer.state_dict().items() if "head." not in name)
        for p in trainer.network.products:
            state += sum(t.numel() * t.element_size() for t in (p.codes, p.grad, p.bias_grad))
        moved = traffic(functools.partial(trainer.step, codes, labels))
        integers = {"saved": storages(leaves), "state": state, "moved": moved}
        rows.add({"width": width, "parameters": parameters, "fp32": fp32, "integers": integers})


PARTS = {"digits": digits, "cifar100": cifar100, "ablation": ablation, "matmul": matmul, "step": step, "bytes": bytes_}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--data-dir")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "integer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--network", choices=SMALL, default="resnet18")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)  # processor time is that of one thread
    for part in options.parts or PARTS:
        PARTS[part](options)


if __name__ == "__main__":
    main()
