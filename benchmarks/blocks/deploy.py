"""docs/deploy.md."""

from __future__ import annotations

import statistics

from blocks.text import MIB, NAMES, interval, load, prose, small, table


def folded() -> str:
    rows = [r for r in load("deploy-equal")["rows"] if r["outcome"] == "folded"]
    models = {r["model"] for r in rows}
    lines = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method]
        apart = sum(r["layers_of_their_own"] > 0 for r in own)
        errors = [small(max(r[kind] for r in own)) for kind in ("fp32", "fp32_rounding", "fp64")]
        lines.append([NAMES.get(method, method), len(own), *errors, apart])
    head = "method | networks | fp32 | the network's own rounding | fp64 | with layers of their own"
    text = (
        f"{len(models)} networks, one per family of torchvision and timm (`benchmarks/deploy.py equal`), with random "
        "biases and statistics, and scalars within a quarter of where they start (further away, some networks "
        "explode). The largest difference of an output to eval mode, over the largest output; "
        "the network's own rounding is that of its single to its double precision; and how many networks have shifts "
        "or scalars that no layer can take up:"
    )
    return f"{prose(text)}\n\n{table(head, lines)}"


def quantised() -> str:
    lines = []
    for data in ("digits", "cifar100"):
        rows = load(f"deploy-int8-{data}")["rows"]
        for network, method in dict.fromkeys((r["network"], r["method"]) for r in rows):
            own = [r for r in rows if (r["network"], r["method"]) == (network, method)]
            top1 = [f"{statistics.mean(r['top1'][k] for r in own):.1%}" for k in ("float", "per tensor", "per channel")]
            widest = max(r["channel_spread"]["largest"] for r in own)
            spread = f"{widest:.0f}" if widest > 100 else f"{widest:.2f}"
            sizes = [f"{own[0]['bytes'][k] / MIB:.2f}" for k in ("float", "per tensor")]
            name = f"{NAMES.get(data, data)}, {NAMES.get(network, network)}, {NAMES[method]}"
            lines.append([name, len(own), *top1, spread, *sizes])
    head = "trained on | seeds | float | per tensor | per channel | widest channel / median, worst layer"
    head += " | MiB, float | MiB, int8"
    text = (
        "Top-1 accuracy of narrow networks (`benchmarks/deploy.py int8`), mean over seeds, BatchNorm fused by PyTorch "
        "and MimicNorm folded. Digits: 12 epochs. CIFAR-100: ten epochs on 8,000 images."
    )
    bad = [
        r for r in load("deploy-int8-digits")["rows"] if (r["network"], r["method"]) == ("shufflenetv2", "mimicnorm")
    ]
    variance = [r["last_norm_variance"]["median"] for r in bad]
    caveat = (
        "MimicNorm does not train ShuffleNetV2 on 8 x 8 digits by this recipe: the variance of its logits before the "
        f"last BN is {small(min(variance))} to {small(max(variance))}. How int8 treats that network says nothing about "
        "a good one."
    )
    return "\n\n".join([prose(text), table(head, lines), prose(caveat)])


def inference() -> str:
    lines = []
    for r in load("deploy-time")["rows"]:
        ratios = [r["folded_over_fused"][way] for way in ("eager", "onnxruntime")]
        cells = [interval(ratio, 3) for ratio in ratios]
        sizes = r["onnx_bytes"]["folded"] / r["onnx_bytes"]["fused"]
        lines.append([NAMES.get(r["network"], r["network"]), r["batch"], *cells, f"{sizes:.3f}"])
    text = (
        "Time of the folded network over PyTorch's fusion of the BatchNorm one, run in turns on a CPU, 224 pixels: "
        "median with its 95 % interval; and the size of the ONNX file over the other's:"
    )
    return f"{prose(text)}\n\n{table('network | batch | eager | onnxruntime | file size', lines)}"
