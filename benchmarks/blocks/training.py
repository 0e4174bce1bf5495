"""docs/accuracy.md (`mimicnorm compare`), docs/speed.md and docs/start.md."""

from __future__ import annotations

import statistics

from blocks.text import cell_name, interval, load, named, table


def _compared(name: str) -> str:
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
    return _compared("resnet18")


def compared_vgg11() -> str:
    return _compared("vgg11")


def speed() -> str:
    rows = load("speed")["rows"]
    methods = list(dict.fromkeys(m for r in rows for m in r["batchnorm_over"] if m != "batchnorm"))

    def cell(row: dict, method: str) -> str:
        ratio = row["batchnorm_over"].get(method)
        return "-" if ratio is None else interval(ratio)

    head = " | ".join(("BatchNorm's time / that of", *map(named, methods)))
    return table(head, [(cell_name(r["cell"]), *(cell(r, m) for m in methods)) for r in rows])


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
        cells = [cell_name(row["cell"])]
        for method, share in row["centring_share"].items():
            over = row["over_nonorm"][method]
            cells += [f"{100 * share['value']:.1f} %", interval(over, 3)]
        rows.append(tuple(cells))
    head = "network, batch, pixels | forward: share of a step | time / no norm | backward: share | time / no norm"
    return table(head, rows)


def speed_grid() -> str:
    rows = []
    for row in load("speed-grid")["rows"]:
        _, batch, pixels = row["cell"].split("-")
        over = (interval(row["over_nonorm"][method]) for method in ("batchnorm", "mimicnorm, backward"))
        rows.append((batch, pixels, *over, interval(row["batchnorm_over"]["mimicnorm, backward"])))
    return table("batch | pixels | BatchNorm / no norm | MimicNorm / no norm | BatchNorm / MimicNorm", rows, left=0)


def planning() -> str:
    rows = [
        (f"`{r['model'].partition(':')[2]}`", r["batch_norms"], r["before"], r["now"], f"{r['now'] / r['before']:.2f}")
        for r in load("planning")["rows"]
    ]
    return table("network | BatchNorms | before, s | now, s | ratio", rows)
