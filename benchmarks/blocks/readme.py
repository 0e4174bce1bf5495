"""README.md and docs/convert.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from blocks.text import GIB, load, prose, table, top1_by_seed, worst

_BOTH = ("batchnorm", "mimicnorm")
_IN_ONES = ("BatchNorm", "MimicNorm, microbatch.backward")


def coverage() -> str:
    c = load("coverage")
    converted, refused = c["outcomes"]["converted"], c["outcomes"]["refused"]
    return prose(
        f"Of every BatchNorm classifier of torchvision and timm (`benchmarks/coverage.py`, one training step each), "
        f"**{converted} of {c['models']} convert** ({100 * c['converted_share']:.1f} %), and "
        f"{100 * c['of_those_centred_share']:.1f} % of their owners with a fan-in above 50 that are not depthwise are "
        f"centred (the rest belong to gates). The other {refused} are CLIP image towers without a classifier: refused, "
        f"with the advice to name the head or to leave the last BN out. {c['step']['real']} took the step for real, "
        "with a finite gradient for every parameter that had one before. Plans of all of them are "
        "[frozen](../results/plans.jsonl); `benchmarks/golden.py` plans them again and lists what differs."
    )


def measured() -> str:
    """One number per cell: BatchNorm, MimicNorm with its default settings, and the page that tells more."""
    saved = {
        (r["method"], r["bits"]): f"{r['saved_mib_per_image']:.1f}"
        for r in load("compress-bytes")["rows"]
        if r["network"] == "resnet50"
    }
    peaks = load("memory-peak")["methods"]
    fast = {r["cell"]: f"{1 / r['batchnorm_over']['mimicnorm, backward']['value']:.2f}" for r in load("speed")["rows"]}
    error, zoo = worst(load("microbatch-exact")["rows"], "float64"), load("coverage")
    rows: list[tuple[str, Iterable[object], str]] = [
        ("saved for backward, ResNet-50, MiB per image", (saved[m, 0] for m in _BOTH), "memory"),
        *((f"... in {bits} bits", [saved[m, bits] for m in _BOTH], "compress") for bits in (8, 4)),
        ("peak of a step, ResNet-50, batch 256, GiB", (f"{peaks[m]['peak_bytes'] / GIB:.1f}" for m in _BOTH), "memory"),
        ("largest batch in 16 GiB, ResNet-50", (peaks[m]["largest_batch"] for m in _BOTH), "memory"),
        ("time of a step on a CPU, ResNet-50, batch 32", (1, fast["resnet50-32-224"]), "speed"),
        ("... batch 8", (1, fast["resnet50-8-224"]), "speed"),
        ("... a tiny network on digits", (1, fast["digits-64-8"]), "speed"),
        ("accuracy on CIFAR-100, narrow ResNet-18, 5 epochs, %", _accuracies("fine"), "accuracy"),
        ("... its 20 coarse labels", _accuracies("coarse"), "accuracy"),
        ("... trained, then fine-tuned on new classes, batch 2", map(_tuned, ("BatchNorm", "keep, centred")), "keep"),
        ("accuracy on digits, micro-batches of one, %", (_in_ones(m) for m in _IN_ONES), "microbatch"),
        ("relative error of a gradient from micro-batches, fp64", ("-", error), "microbatch"),
        (f"classifiers that convert, of {zoo['models']}", ("-", zoo["outcomes"]["converted"]), "convert"),
    ]
    return table("what | BatchNorm | MimicNorm | page", [(a, *b, f"[{c}](docs/{c}.md)") for a, b, c in rows])


def _accuracies(labels: str) -> list[str]:
    return [f"{100 * statistics.mean(top1_by_seed(labels, method)):.1f}" for method in _BOTH]


def _tuned(way: str) -> str:
    row = next(r for r in load("keep-tuning")["rows"] if (r["way"], r["batch"]) == (way, 2))
    return f"{100 * statistics.mean(row['top1']):.1f}"


def _in_ones(method: str) -> str:
    rows = [r for r in load("microbatch-accuracy")["rows"] if (r["method"], r["micro_batch"]) == (method, 1)]
    return f"{100 * statistics.mean(a for r in rows for a in r['accuracy']):.1f}"
