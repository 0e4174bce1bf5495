"""Write the numbers of the pages in ``docs/`` from the result files.

    python benchmarks/pages.py

What stands between ``<!-- results: NAME -->`` and ``<!-- end -->`` on a page is made by the function of that name here.
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/memory.md",
    "docs/microbatch.md",
    "docs/compare.md",
    "docs/compress.md",
    "docs/integer.md",
    "docs/deploy.md",
    "docs/keep.md",
    "docs/results.md",
    "docs/architecture.md",
    "examples/README.md",
)
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


def prose(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def worst(rows: Iterable[dict], dtype: str) -> str:
    errors = [r["error"] for r in rows if r["dtype"] == dtype]
    return small(max(errors)) if errors else "-"


# -- docs/memory.md ----------------------------------------------------------------------------------------------


def ratios() -> str:
    head = "network | run | BatchNorm | MimicNorm | no norm | MimicNorm / BatchNorm | MimicNorm / no norm"
    lines = []
    for r in load("memory-ratios")["rows"]:
        saved = [f"{r['saved_mib_per_image'][m]:.2f}" for m in ("batchnorm", "mimicnorm", "nonorm")]
        quotients = [f"**{r['mimicnorm_over_batchnorm']:.3f}**", f"{r['mimicnorm_over_nonorm']:.4f}"]
        lines.append([named(r["network"]), named(r["setting"]), *saved, *quotients])
    return table(head, lines, left=2)


def peak() -> str:
    data = load("memory-peak")
    text = prose(
        f"ResNet-50 at 224 px with SGD and momentum, batch 256, and the largest batch that fits 16 GiB "
        f"({data['largest_batch_ratio']:.2f} times BatchNorm's). One prediction took "
        f"{data['cpu_seconds_of_one_prediction']:.1f} s of CPU time, and the process held "
        f"{data['resident_mib_of_the_process_after_it']:.0f} MiB."
    )
    head = "method | saved MiB per image | peak GiB at batch 256 | peak / BatchNorm | largest batch in 16 GiB"
    lines = [
        [
            named(name),
            f"{m['saved_bytes'] / m['batch'] / MIB:.2f}",
            f"{m['peak_bytes'] / GIB:.2f}",
            f"{m['peak_ratio']:.3f}",
            m["largest_batch"],
        ]
        for name, m in data["methods"].items()
    ]
    return f"{text}\n\n{table(head, lines)}"


def prediction() -> str:
    rows = load("memory-prediction")["rows"]

    def worst(of: Iterable[dict]) -> float:
        return max((r["error"] for r in of), key=abs)

    text = prose(
        f"The prediction is within 2 % in {sum(abs(r['error']) <= 0.02 for r in rows)} of {len(rows)} steps; "
        f"the largest error is {abs(worst(rows)):.3%}."
    )
    lines = []
    for name in dict.fromkeys(r["network"] for r in rows):
        own = [r for r in rows if r["network"] == name]
        measured = [r["profiled_bytes"] / MIB for r in own]
        lines.append([named(name), f"{min(measured):.0f} to {max(measured):.0f}", small(abs(worst(own)))])
    return f"{text}\n\n{table('network | measured peak, MiB (batch 8 to 32) | worst relative error', lines)}"


def inductor() -> str:
    of = {(r["method"], r["layout"]): r for r in load("memory-inductor")["rows"]}
    plain, last = (of["batchnorm", layout] for layout in ("contiguous_format", "channels_last"))
    real, predicted = "really_saved_bytes", "predicted_saved_bytes"
    return prose(
        f"A real compiled ResNet of ten layers at batch 4, 64 px saves {last[real] / MIB:.2f} MiB where "
        f"{last[predicted] / MIB:.2f} were predicted in `channels_last`, and {plain[real] / MIB:.2f} instead of "
        f"{plain[predicted] / MIB:.2f} without it."
    )


def alternatives() -> str:
    head = "network | saved MiB per image | peak GiB, batch 256 | peak MiB, batch 4 | profiled | time / BatchNorm"

    def number(row: dict, key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-"

    lines = [
        [
            name,
            number(r, "saved_mib_per_image", ".2f"),
            number(r, "predicted_peak_gib_at_batch_256", ".2f"),
            number(r, "predicted_peak_mib", ".0f"),
            number(r, "profiled_peak_mib", ".0f"),
            number(r, "median_seconds_over_batchnorm", ".2f"),
        ]
        for name, r in load("memory-alternatives")["rows"].items()
    ]
    return table(head, lines)


# -- docs/microbatch.md ------------------------------------------------------------------------------------------


def accumulation() -> str:
    key = "plain_accumulation_error"
    of = {(r["network"], r["micro_batch"]): f"{r[key]:.3f}" for r in load("microbatch-exact")["rows"] if key in r}
    networks = list(dict.fromkeys(n for n, _ in of))
    return table("network | micro-batch 2 | 7 | 16", [[n, *(of[n, m] for m in (2, 7, 16))] for n in networks])


def time() -> str:
    data = load("microbatch-time")
    return prose(
        f"The first pass costs time: {data['processor']['ratio_median']:.2f} times the processor time of plain "
        f"accumulation ({data['wall']['ratio_median']:.2f} times by the clock) on {data['network']} at "
        f"{data['pixels']} pixels with micro-batches of {data['micro_batch']}, the median of {data['rounds']} "
        "interleaved rounds."
    )


def exactness() -> str:
    """One row per network, one pair of columns per way; a dash where it has not been measured."""
    ways = ("exact", "randomness", "ranks", "traced", "compiled")
    files = {way: load(f"microbatch-{way}") for way in ways}
    # The inductor file on record is of an earlier form: fp64, two networks.
    rows = {w: [{"dtype": "float64", **r} for r in f.get("rows", f.get("gradient_fp64"))] for w, f in files.items()}
    networks = list(dict.fromkeys(r["network"] for r in rows["exact"]))
    lines = []
    for network in networks:
        cells = []
        for way in ways:
            own = [r for r in rows[way] if r["network"] == network]
            cells.append(f"{worst(own, 'float64')}, {worst(own, 'float32')}" if own else "-")
        lines.append([network, *cells])
    head = "network | one process | with randomness | 2 and 3 processes | compiled, `aot_eager` | compiled, `inductor`"
    return table(head, lines)


def rounding() -> str:
    """Both distances to fp64, side by side."""
    rows, lines = load("microbatch-rounding")["rows"], []
    for network in dict.fromkeys(r["network"] for r in rows):
        own = [r for r in rows if r["network"] == network]
        parts = [small(pick(r["error_to_fp64"] for r in own)) for pick in (min, max)]
        lines.append([network, small(own[0]["full_batch_fp32_rounding"]), " to ".join(parts), worst(own, "float32")])
    head = "network | full batch to fp64 | micro-batches to fp64 | micro-batches to full batch"
    return table(head, lines)


def training() -> str:
    runs = load("microbatch-training")["weights_apart"]
    return table(
        "run | after 1 step | after 50 steps",
        [[name, small(apart[0]), small(apart[-1])] for name, apart in runs.items()],
    )


def memory() -> str:
    rows = load("microbatch-memory")["peak_saved_for_backward"]
    keys = [f"{way}_bytes" for way in ("whole", "micro_batch_8", "micro_batch_1", "micro_batch_1_loss_in_pieces")]
    head = "network, MiB | whole batch | micro-batch 8 | micro-batch 1 | ... `loss_in_pieces` | whole / least | logits"
    lines = []
    for r in rows:
        best = r["whole_bytes"] / min(r[k] for k in keys)
        cells = [f"{r[k] / MIB:.2f}" for k in keys]
        lines.append([r["network"], *cells, f"{best:.1f}", f"{r['logits_bytes'] / MIB:.2f}"])
    return table(head, lines)


def accuracy() -> str:
    sizes = (1, 2, 4, 16, 64)
    of = {(r["method"], r["micro_batch"]): r["accuracy"] for r in load("microbatch-accuracy")["rows"]}
    methods = list(dict.fromkeys(m for m, _ in of))
    lines = [
        [m, *(f"{100 * statistics.mean(of[m, s]):.1f}" if (m, s) in of else "error" for s in sizes)] for m in methods
    ]
    return table("method, mean accuracy in % | 1 | 2 | 4 | 16 | 64", lines)


def compared(name: str) -> str:
    methods = load(f"compare-cifar100-{name}")["methods"]
    rows = []
    for m in methods:
        accuracy, found = m["accuracy"], m["accuracy"]["difference"]
        spread = f" ± {100 * accuracy['sd']:.1f}" if accuracy["sd"] is not None else ""
        reached = "diverged" if accuracy["mean"] is None else f"{100 * accuracy['mean']:.1f}{spread}"
        against = f"{100 * found['value']:+.1f} [{100 * found['low']:.1f}, {100 * found['high']:.1f}]" if found else ""
        kept, time = m["memory"]["saved_ratio"], m["time"]["ratio"]
        rows.append((f"`{m['label']}`", m["seeds"], reached, against, f"{kept:.3f}", f"{time['value']:.2f}"))
    head = "method | seeds | accuracy, % | against BatchNorm, points | saved per image, ratio | time per step, ratio"
    return table(head, rows)


def compared_resnet18() -> str:
    return compared("resnet18")


def compared_vgg11() -> str:
    return compared("vgg11")


def start() -> str:
    rows = []
    for row in load("training-start")["rows"]:
        changes = ", ".join(f"{k}={v}" if k != "settings" else v[0] for k, v in row["changes"].items())
        variance = (row["last_norm_variance"] or {}).get("median")
        shown = "" if variance is None else f"{variance:.0f}" if variance < 1e4 else f"{variance:.0e}"
        rows.append(
            (f"`{row['method']}`", changes or "-", f"{100 * row['top1']:.1f}", f"{row['train_loss']:.2f}", shown)
        )
    return table("method | changed | accuracy, % | training loss | variance of the logits", rows, left=2)


def speed() -> str:
    rows = load("speed")["rows"]
    methods = list(dict.fromkeys(m for r in rows for m in r["batchnorm_over"] if m != "batchnorm"))

    def cell(row: dict, method: str) -> str:
        ratio = row["batchnorm_over"].get(method)
        return "" if ratio is None else f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"

    head = " | ".join(("BatchNorm's time / ...", *(_cell_name(r["cell"]) for r in rows)))
    return table(head, [(named(m), *(cell(r, m) for r in rows)) for m in methods])


def signal() -> str:
    rows = load("signal")["rows"]
    head = (
        "network | layers that owned a BatchNorm, on another batch | largest of any layer, worst seed "
        "| largest of any module, sums included: median, worst seed"
    )
    lines = []
    for network in dict.fromkeys(r["network"] for r in rows if r["init"] == "calibrate"):
        own = [r for r in rows if r["network"] == network]
        least, most = (f(r[f"{n}_on_another_batch"] for r in own) for f, n in ((min, "least"), (max, "most")))
        layers, modules = ([r[name] for r in own] for name in ("largest_of_layers", "largest_variance"))
        among = f"{statistics.median(modules):.1f}, {max(modules):.1f}"
        lines.append((f"`{network}`", f"{least:.2f} to {most:.2f}", f"{max(layers):.1f}", among))
    return table(head, lines)


def attention() -> str:
    rows = load("attention-start")["rows"]
    rates = list(dict.fromkeys(r["rate"] for r in rows))
    lines = []
    for way in dict.fromkeys(r["way"] for r in rows):
        cells = []
        for rate in rates:
            runs = [r for r in rows if (r["way"], r["rate"]) == (way, rate)]
            diverged = sum("accuracy" not in r for r in runs)
            mean = statistics.mean(r["accuracy"] for r in runs) if not diverged else 0.0
            cells.append(f"{diverged} of {len(runs)} diverged" if diverged else f"{100 * mean:.1f} %")
        lines.append((way.replace("batchnorm", named("batchnorm")).replace("mimicnorm", named("mimicnorm")), *cells))
    return table(" | ".join(("learning rate", *map(str, rates))), lines)


def centring() -> str:
    rows = []
    for row in load("speed")["rows"]:
        cells = [_cell_name(row["cell"])]
        for method, share in row["centring_share"].items():
            over = row["over_nonorm"][method]
            cells += [f"{100 * share['value']:.1f} %", f"{over['value']:.3f} [{over['low']:.3f}, {over['high']:.3f}]"]
        rows.append(tuple(cells))
    head = "network, batch, pixels | forward: share of a step | time / no norm | backward: share | time / no norm"
    return table(head, rows)


def planning() -> str:
    if not (ROOT / "results" / "planning.json").exists():
        return "Not measured yet: `python benchmarks/planning.py`."
    rows = load("planning")["rows"]
    cells = [(f"`{r['model']}`", str(r["batch_norms"]), f"{r['before']:.1f}", f"{r['now']:.1f}") for r in rows]
    return table("network | BatchNorms | before, s | now, s", cells)


def _cell_name(cell: str) -> str:
    name, batch, pixels, *layout = cell.split("-")
    return f"{named(name)}, {batch}, {pixels} px{''.join(f', {kind}' for kind in layout)}"


# -- docs/compress.md --------------------------------------------------------------------------------------------


def not_yet(part: str) -> str:
    return f"Not measured yet: `python benchmarks/compress.py {part}`."


def compress_bytes() -> str:
    rows = load("compress-bytes")["rows"]
    first = {r["network"]: r for r in rows if (r["method"], r["bits"]) == ("batchnorm", 0)}
    lines = []
    for r in rows:
        base = first[r["network"]]
        ratio = f"{r['saved_mib_per_image'] / base['saved_mib_per_image']:.3f}"
        width = {0: "as PyTorch", 32: "32, lossless"}.get(r["bits"], r["bits"])
        peak = f"{r['peak_bytes'] / base['peak_bytes']:.3f}"
        saved = f"{r['saved_mib_per_image']:.2f}"
        lines.append([named(r["network"]), named(r["method"]), width, saved, f"**{ratio}**", peak, r["largest_batch"]])
    head = "network | method | bits | saved MiB per image | / BatchNorm | peak / BatchNorm | largest batch in 16 GiB"
    return table(head, lines, left=2)


def compress_exactness() -> str:
    lines = []
    for r in load("compress-exactness")["rows"]:
        scalar = "-" if r["worst_scalar_error"] is None else f"{100 * r['worst_scalar_error']:.1f} %"
        equal = f"{r['equal_biases']} of {r['biases']}"
        lines.append([named(r["network"]), named(r["method"]), r["bits"], equal, f"{r['cosine']:.5f}", scalar])
    return table("network | method | bits | bit-equal biases | cosine | worst residual scalar", lines, left=2)


def compress_time() -> str:
    if not (ROOT / "results" / "compress-time.json").exists():
        return not_yet("time")
    rows = load("compress-time")["rows"]
    ways = [way for way in rows[0]["over_mimicnorm"] if way != "mimicnorm"]

    def cell(ratio: dict) -> str:
        return f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"

    head = " | ".join(("time / `mimicnorm`", *(_cell_name(r["cell"]) for r in rows)))
    return table(head, [[f"`{way}`", *(cell(r["over_mimicnorm"][way]) for r in rows)] for way in ways])


def compress_accuracy() -> str:
    if not (ROOT / "results" / "compress-accuracy.json").exists():
        return not_yet("accuracy")
    of = {(r["method"], r["bits"]): r["accuracy"] for r in load("compress-accuracy")["rows"]}

    def cell(tops: list) -> str:
        if None in tops:
            return f"{tops.count(None)} of {len(tops)} diverged"
        spread = f" ± {100 * statistics.stdev(tops):.1f}" if len(tops) > 1 else ""
        return f"{100 * statistics.mean(tops):.1f}{spread}"

    widths = sorted({bits for _, bits in of}, reverse=True)
    lines = [[named(m), *(cell(of.get((m, b), [None])) for b in widths)] for m in dict.fromkeys(m for m, _ in of)]
    return table(" | ".join(("bits", *map(str, widths))), lines)


# -- docs/integer.md ---------------------------------------------------------------------------------------------


def _integer_rows(part: str) -> list[dict] | None:
    path = ROOT / "results" / f"integer-{part}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else None


def _integer_missing(part: str) -> str:
    return f"Not measured yet: `python benchmarks/integer.py {part}`."


def _tops(rows: Iterable[dict], **wanted: object) -> list[float]:
    return [100 * r["top1"] for r in rows if all(r[k] == v for k, v in wanted.items()) and r["top1"] is not None]


def _mean_and_spread(tops: list[float]) -> str:
    spread = f" ± {statistics.stdev(tops):.1f}" if len(tops) > 1 else ""
    return f"{statistics.mean(tops):.1f}{spread}" if tops else "diverged"


def _integer_accuracy(part: str) -> str:
    rows = _integer_rows(part)
    if rows is None:
        return _integer_missing(part)
    lines = []
    for network in dict.fromkeys(r["network"] for r in rows):
        pair = [_tops(rows, network=network, kind=kind) for kind in ("fp32", "integers")]
        apart = f"{statistics.mean(pair[1]) - statistics.mean(pair[0]):+.1f}" if all(pair) else "-"
        lines.append([named(network), len(pair[1]), *map(_mean_and_spread, pair), apart])
    return table("network | seeds | fp32, % | integers, % | difference", lines)


def integer_digits() -> str:
    return _integer_accuracy("digits")


def integer_cifar100() -> str:
    return _integer_accuracy("cifar100")


def integer_ablation() -> str:
    rows = _integer_rows("ablation")
    if rows is None:
        return _integer_missing("ablation")
    ways = dict.fromkeys(r["way"] for r in rows)
    cells = [[way, *(_mean_and_spread(_tops(rows, way=way, kind=k)) for k in ("integers", "fp32"))] for way in ways]
    twins = {r["way"] for r in rows if r["kind"] == "fp32"}
    return table("ResNet-18 | integers, % | fp32, %", [[w, i, f if w in twins else "-"] for w, i, f in cells])


def integer_matmul() -> str:
    rows = _integer_rows("matmul")
    if rows is None:
        return _integer_missing("matmul")
    lines = []
    for r in rows:
        faster = r["gflops"]["int8"] / r["gflops"]["fp32"]  # the fastest of many rounds: the machine is shared
        lines.append([r["channels"], *(f"{r['gflops'][w]:.0f}" for w in ("fp32", "bf16", "int8")), f"{faster:.2f}"])
    head = "channels | fp32, 10^9 operations/s | bf16 | int8 | int8 / fp32"
    return table(head, lines)


def integer_step() -> str:
    rows = _integer_rows("step")
    if rows is None:
        return _integer_missing("step")
    lines = []
    for r in rows:
        speed, ratio = r["images_per_second"], r["over_fp32"]["integers"]["ratio"]
        share = f"{100 * r['share_of_products']:.0f} %"
        rates = [f"{speed[way]:.0f}" for way in ("fp32", "integers")]
        gain = f"{1 / ratio['value']:.2f} ({1 / ratio['high']:.2f} to {1 / ratio['low']:.2f})"
        lines.append([r["width"], r["batch"], *rates, gain, share])
    return table("width | batch | fp32, images/s | integers | integers / fp32 | products' share of the step", lines)


def integer_bytes() -> str:
    rows = _integer_rows("bytes")
    if rows is None:
        return _integer_missing("bytes")
    names = {
        "saved": "saved for backward, MiB",
        "state": "weights, momentum and gradients, MiB",
        "moved": "read and written by operations, MiB",
    }
    lines = []
    for r in rows:
        for what, name in names.items():
            pair = [r[kind][what] / MIB for kind in ("fp32", "integers")]
            lines.append([r["width"], name, *(f"{n:.1f}" for n in pair), f"{pair[1] / pair[0]:.2f}"])
    return table("width | what | fp32 | integers | integers / fp32", lines, left=2)


# -- README ----------------------------------------------------------------------------------------------------------


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
    slow = [f"{_cell_name(cell)} {100 / r['value'] - 100:.0f} %" for cell, r in fast.items() if r["high"] < 1]
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


# -- docs/deploy.md ----------------------------------------------------------------------------------------------


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
    lines, missing = [], []
    for data in ("digits", "cifar100"):
        if not (ROOT / "results" / f"deploy-int8-{data}.json").exists():
            missing.append(f"Not measured yet: `python benchmarks/deploy.py int8 {data}`.")
            continue
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
    return "\n\n".join([prose(text), table(head, lines), prose(caveat), *missing])


def inference() -> str:
    if not (ROOT / "results" / "deploy-time.json").exists():
        return "Not measured yet: `python benchmarks/deploy.py time`."
    lines = []
    for r in load("deploy-time")["rows"]:
        ratios = [r["folded_over_fused"][way] for way in ("eager", "onnxruntime")]
        cells = [f"{c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in ratios]
        sizes = r["onnx_bytes"]["folded"] / r["onnx_bytes"]["fused"]
        lines.append([NAMES.get(r["network"], r["network"]), r["batch"], *cells, f"{sizes:.3f}"])
    text = (
        "Time of the folded network over PyTorch's fusion of the BatchNorm one, run in turns on a CPU, 224 pixels: "
        "median with its 95 % interval; and the size of the ONNX file over the other's:"
    )
    return f"{prose(text)}\n\n{table('network | batch | eager | onnxruntime | file size', lines)}"


# -- docs/keep.md ------------------------------------------------------------------------------------------------


def kept_equal() -> str:
    rows = load("keep-equal")["rows"]
    done = [r for r in rows if "refused" not in r]
    exact = [r for r in done if "fp64" in r]
    after = [r for r in done if not r["affines"]]
    beside = [r for r in done if r["affines"]]
    counts = {source: sum(r["source"] == source for r in done) for source in ("torchvision", "timm")}
    refused = "".join(
        f" {r['name']} is refused: {r['refused'].splitlines()[-1].strip(' -')}" for r in rows if r not in done
    )
    text = prose(
        f"{counts['torchvision']} classifiers of torchvision and {counts['timm']} networks of timm, one per module, "
        "with statistics and affine maps drawn at random (`benchmarks/keep.py equal`). No sample sees another in "
        f"training mode in {sum(not r['other samples'] for r in done)} of {len(done)}. Saved bytes are those at the "
        "network's own image size and batch 8, over those of the network without norms. "
        f"{len(done) - len(exact)} of them, too large for fp64 here, compared in fp32 only.{refused}"
    )
    lines = [
        [
            "output, fp32, relative error",
            small(max(max(r["fp32 nonorm"], r["fp32 mimicnorm"]) for r in done)),
            len(done),
        ],
        ["output, fp64", small(max(r["fp64"] for r in exact)), len(exact)],
        ["gradients of W, b, gamma and beta, fp64", small(max(r["gradients"] for r in exact)), len(exact)],
        ["saved bytes, all BatchNorms in layers", f"{max(r['saved keep'] for r in after):.4f}", len(after)],
        ["saved bytes, some as affine maps", f"{max(r['saved keep'] for r in beside):.3f}", len(beside)],
    ]
    costly = sorted((r for r in beside if r["saved keep"] > 1.005), key=lambda r: -r["saved keep"])
    named_rows = [[r["name"], r["affines"], f"{r['saved keep']:.3f}", f"{r['saved batchnorm']:.3f}"] for r in costly]
    costs = table("affine maps that save their inputs | maps | saved, keep | saved, BatchNorm", named_rows)
    return "\n\n".join([text, table("what | worst | networks", lines), *[costs] * bool(costly)])


def kept_tuning() -> str:
    if not (ROOT / "results/keep-tuning.json").exists():
        return "The runs are not finished."
    data = load("keep-tuning")
    ways = list(dict.fromkeys(r["way"] for r in data["rows"]))
    cell = {(r["way"], r["batch"]): r for r in data["rows"]}
    lines = []
    for way in ways:
        shown = [f"{statistics.mean(cell[way, b]['top1']):.1%}" if (way, b) in cell else "-" for b in (2, 4, 32)]
        last = cell.get((way, 32)) or next(r for r in data["rows"] if r["way"] == way)
        lines.append(
            [
                way,
                *shown,
                f"{last['saved_bytes'] / MIB:.1f}",
                f"{statistics.median(last['seconds']):.0f}" if last["seconds"] else "-",
            ]
        )
    return table("way | batch 2 | batch 4 | batch 32 | MiB saved, batch 32 | seconds per epoch, batch 32", lines)


def kept_alternatives() -> str:
    rows = load("keep-alternatives")["rows"]
    base = rows[0]["saved_bytes"]
    lines = [[r["name"], f"{r['saved_bytes'] / base:.3f}", f"{r['seconds']:.2f}"] for r in rows]
    return table("way | saved bytes / BatchNorm | time of a step / BatchNorm", lines)


# -- docs/results.md ---------------------------------------------------------------------------------------------


def paper() -> str:
    from mimicnorm.paper.page import markdown

    text = markdown(ROOT / "results", "../results/paper/")
    return text.split("\n\n", 2)[2].strip()  # the title and what it is about are on the page


# -- examples/README.md ------------------------------------------------------------------------------------------


def opacus_cost() -> str:
    rows = load("opacus")["costs"]
    first = {r["network"]: r for r in reversed(rows)}  # GroupNorm, which the others are compared with

    def ratio(r: dict) -> str:
        time = r["ratio"]
        return "1" if r is first[r["network"]] else f"{time['value']:.2f} [{time['low']:.2f}, {time['high']:.2f}]"

    head = "network | method | saved MiB | peak MiB | time / GroupNorm"
    return table(
        head,
        (
            [r["network"], r["method"], f"{r['saved_bytes'] / MIB:.1f}", f"{r['peak_bytes'] / MIB:.1f}", ratio(r)]
            for r in rows
        ),
        left=2,
    )


def opacus_accuracy() -> str:
    rows = load("opacus")["accuracy"]
    seeds = [[f"{100 * a:.1f} %" for a in r["accuracy"]] for r in rows]
    head = "method | learning rate | seed 0 | seed 1 | seed 2 | mean"
    lines = [[r["method"], r["lr"], *s, f"{100 * r['mean']:.1f} %"] for r, s in zip(rows, seeds, strict=True)]
    return table(head, lines)


MAKERS: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        *(opacus_cost, opacus_accuracy),
        *(ratios, peak, prediction, inductor, alternatives),
        *(accumulation, time, exactness, rounding, training, memory, accuracy),
        *(compress_bytes, compress_exactness, compress_time, compress_accuracy),
        *(integer_digits, integer_cifar100, integer_ablation, integer_matmul, integer_step, integer_bytes),
        *(coverage, measured, shortfalls),
        *(compared_resnet18, compared_vgg11, start, speed, centring, planning, signal, attention),
        *(folded, quantised, inference),
        *(kept_equal, kept_tuning, kept_alternatives),
        *(paper,),
    )
}


def filled(text: str) -> str:
    """A page with every block as its result file has it."""
    return re.sub(
        r"(<!-- results: (\w+) -->\n\n).*?(\n*<!-- end -->)",
        lambda block: block[1] + MAKERS[block[2]]() + "\n\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(path.read_text()))
