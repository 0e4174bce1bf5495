"""What the blocks are made of: result files, names, numbers, tables."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MIB, GIB = 2**20, 2**30
NAMES = {
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
    "vgg11": "VGG-11",
    "vgg11_bn": "VGG11-BN",
    "vgg16_bn": "VGG16-BN",
    "shufflenet_v2_x0_5": "ShuffleNetV2 0.5",
    "shufflenet_v2_x1_0": "ShuffleNetV2 1.0",
    "densenet121": "DenseNet-121",
    "mobilenet_v2": "MobileNetV2",
    "googlenet": "GoogLeNet",
    "efficientnet_b0": "EfficientNet-B0",
    "regnet_y_400mf": "RegNetY 400MF",
    "timm:repvgg_a0": "RepVGG-A0",
    "squeezenet1_1": "SqueezeNet",
    "resnet10": "ResNet-10",
    "shufflenetv2": "ShuffleNetV2",
    "weight-mean": "weight mean",
    "last-bn": "last BN",
    "skipinit": "SkipInit",
    "groupnorm-ws": "GroupNorm and WS",
    "scaled-ws": "scaled WS",
    "cifar100": "CIFAR-100",
    "imagenet": "ImageNet",
    "batchnorm": "BatchNorm",
    "mimicnorm": "MimicNorm",
    "nonorm": "no norm",
    "fixup": "Fixup",
    "compile": "compiled",
}


def load(name: str) -> dict:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def named(name: str) -> str:
    plain, _, converted = name.partition(" ")
    return f"{NAMES.get(plain, plain)}, converted" if converted == "converted" else NAMES.get(name, name)


def small(number: float) -> str:
    """1.6e-15."""
    return "0" if number == 0 else f"{number:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def table(head: str, rows: Iterable[Iterable[object]], left: int = 1) -> str:
    """A table; the first columns are text, the others numbers."""
    titles = head.split(" | ")
    rule = "|" + "---|" * left + "---:|" * (len(titles) - left)
    first, *others = ("| " + " | ".join(map(str, line)) + " |" for line in [titles, *rows])
    return "\n".join([first, rule, *others])


def percent(tops: Iterable[float | None]) -> str:
    """Mean and standard deviation in percent; a run that diverged has no accuracy."""
    known = [100 * top for top in tops if top is not None]
    spread = f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.1f}{spread}" if known else "diverged"


def interval(ratio: dict, digits: int = 2) -> str:
    """A ratio with its 95 % interval."""
    value, low, high = (f"{ratio[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def prose(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def worst(rows: Iterable[dict], dtype: str) -> str:
    errors = [r["error"] for r in rows if r["dtype"] == dtype]
    return small(max(errors)) if errors else "-"


def cell_name(cell: str) -> str:
    name, batch, pixels, *layout = cell.split("-")
    return f"{named(name)}, {batch}, {pixels} px{''.join(f', {kind}' for kind in layout)}"


def top1_by_seed(labels: str, method: str) -> list[float]:
    """Accuracies on the test set, of ``benchmarks/accuracy.py test``."""
    runs = load("accuracy")["parts"]["test"]
    return [row["top1"] for label, row in runs.items() if label.startswith(f"{labels}, {method}, ")]
