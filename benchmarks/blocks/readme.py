"""README.md and docs/index.md."""

from __future__ import annotations

import statistics
import textwrap

from blocks.text import cell_name, load, named, prose, table, worst


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
        "[frozen](results/plans.jsonl); `benchmarks/golden.py` plans them again and lists what differs."
    )


def _mean(name: str, **wanted: object) -> float:
    """The mean accuracy of the runs with these fields, in percent."""
    rows = [r for r in load(name)["rows"] if all(r[k] == v for k, v in wanted.items())]
    return 100 * statistics.mean(a for r in rows for a in r["accuracy"])


def measured() -> str:
    ratio = {r["network"]: r for r in load("memory-ratios")["rows"] if r["setting"] == "eager"}
    peaks, predicted = load("memory-peak"), load("memory-prediction")["rows"]
    exact = load("microbatch-exact")["rows"]
    fast = {r["cell"]: r["batchnorm_over"]["mimicnorm, backward"]["value"] for r in load("speed")["rows"]}
    accuracy = {m["label"]: 100 * m["accuracy"]["mean"] for m in load("compare-cifar100-resnet18")["methods"]}
    methods = peaks["methods"]
    networks = ("resnet50", "resnet18", "vgg16_bn", "shufflenet_v2_x0_5", "densenet121")
    saved = "bytes saved for backward, converted / BatchNorm"
    rows = [(f"{saved}, {named(n)}", f"{ratio[n]['mimicnorm_over_batchnorm']:.3f}", "memory") for n in networks]
    step = "time of a training step, BatchNorm / converted, ResNet-50, 224 px"
    rows += [
        ("peak of a training step, ResNet-50, batch 256, converted / BatchNorm",
         f"{methods['mimicnorm']['peak_bytes'] / methods['batchnorm']['peak_bytes']:.3f}", "memory"),
        ("largest batch in 16 GiB, ResNet-50, converted / BatchNorm", f"{peaks['largest_batch_ratio']:.2f}", "memory"),
        (f"predicted peak against a real step on the CPU, worst of {len(predicted)} steps",
         f"{100 * max(abs(r['error']) for r in predicted):.2f} %", "memory"),
        ("`microbatch.backward`, relative gradient error in fp64", worst(exact, "float64"), "microbatch"),
        ("`microbatch.backward`, relative gradient error in fp32", worst(exact, "float32"), "microbatch"),
        ("`microbatch.backward`, time / plain accumulation",
         f"{load('microbatch-time')['processor']['ratio_median']:.2f}", "microbatch"),
        (f"{step}, batch 32", f"{fast['resnet50-32-224']:.2f}", "compare"),
        (f"{step}, batch 8", f"{fast['resnet50-8-224']:.2f}", "compare"),
        ("CIFAR-100, narrow ResNet-18, 10 epochs: BatchNorm", f"{accuracy['batchnorm']:.1f} %", "compare"),
        ("CIFAR-100, narrow ResNet-18, 10 epochs: MimicNorm", f"{accuracy['mimicnorm']:.1f} %", "compare"),
        ("digits, micro-batches of one: MimicNorm",
         f"{_mean('microbatch-accuracy', method='MimicNorm, microbatch.backward', micro_batch=1):.1f} %", "microbatch"),
        ("digits, micro-batches of one: BatchNorm",
         f"{_mean('microbatch-accuracy', method='BatchNorm', micro_batch=1):.1f} %", "microbatch"),
    ]  # fmt: skip
    return table("what | measured | page", [(a, b, f"[{c}](docs/{c}.md)") for a, b, c in rows])


def shortfalls() -> str:
    sets = {n: load(f"compare-cifar100-{n}")["methods"] for n in ("resnet18", "vgg11")}
    behind = {n: next(m for m in ms if m["label"] == "mimicnorm+min_fan_in=50") for n, ms in sets.items()}
    points = {n: [100 * m["accuracy"]["difference"][k] for k in ("value", "low", "high")] for n, m in behind.items()}
    fast = {r["cell"]: r["batchnorm_over"]["mimicnorm, backward"] for r in load("speed")["rows"]}
    slow = [f"{cell_name(cell)} {100 / r['value'] - 100:.0f} %" for cell, r in fast.items() if r["high"] < 1]
    items = [
        "With the authors' threshold of 50, which `mn.MimicNorm()` has, MimicNorm against BatchNorm on CIFAR-100 in "
        "points: "
        + ", ".join(f"narrow {named(n)} {v:+.1f} [{lo:+.1f}, {hi:+.1f}]" for n, (v, lo, hi) in points.items())
        + ". The table's run centres layers above a fan-in of 12; that was chosen on these test images.",
        *([f"A converted network is slower than BatchNorm's on a CPU at {', '.join(slow)}."] if slow else []),
        "Activation checkpointing of the BatchNorm network saves fewer bytes than conversion, and costs time "
        "([memory](docs/memory.md)).",
    ]
    return "\n".join(f"- {textwrap.fill(item, 117, subsequent_indent='  ')}" for item in items)
