"""docs/integer.md."""

from __future__ import annotations

import statistics

from blocks.text import MIB, load, named, percent, table


def _tops(rows: list[dict], **wanted: object) -> list[float]:
    return [r["top1"] for r in rows if all(r[k] == v for k, v in wanted.items()) and r["top1"] is not None]


def _integer_accuracy(part: str) -> str:
    rows = load(f"integer-{part}")["rows"]
    lines = []
    for network in dict.fromkeys(r["network"] for r in rows):
        pair = [_tops(rows, network=network, kind=kind) for kind in ("fp32", "integers")]
        apart = f"{100 * (statistics.mean(pair[1]) - statistics.mean(pair[0])):+.1f}" if all(pair) else "-"
        lines.append([named(network), len(pair[1]), *map(percent, pair), apart])
    return table("network | seeds | fp32, % | integers, % | difference", lines)


def integer_digits() -> str:
    return _integer_accuracy("digits")


def integer_cifar100() -> str:
    return _integer_accuracy("cifar100")


def integer_ablation() -> str:
    rows = load("integer-ablation")["rows"]
    ways = dict.fromkeys(r["way"] for r in rows)
    cells = [[way, *(percent(_tops(rows, way=way, kind=k)) for k in ("integers", "fp32"))] for way in ways]
    twins = {r["way"] for r in rows if r["kind"] == "fp32"}
    return table("ResNet-18 | integers, % | fp32, %", [[w, i, f if w in twins else "-"] for w, i, f in cells])


def integer_matmul() -> str:
    rows = load("integer-matmul")["rows"]
    lines = []
    for r in rows:
        faster = r["gflops"]["int8"] / r["gflops"]["fp32"]  # the fastest of many rounds: the machine is shared
        lines.append([r["channels"], *(f"{r['gflops'][w]:.0f}" for w in ("fp32", "bf16", "int8")), f"{faster:.2f}"])
    head = "channels | fp32, 10^9 operations/s | bf16 | int8 | int8 / fp32"
    return table(head, lines)


def integer_step() -> str:
    rows = load("integer-step")["rows"]
    lines = []
    for r in rows:
        fp32 = f"{r['images_per_second']['fp32']:.0f}"
        for way, name in {"integers": "no", "compiled": "yes"}.items():
            speed, ratio = r["images_per_second"][way], r["over_fp32"][way]["ratio"]
            gain = f"{1 / ratio['value']:.2f} ({1 / ratio['high']:.2f} to {1 / ratio['low']:.2f})"
            share = f"{100 * r['share_of_products'][way]:.0f} %"
            lines.append([r["width"], r["batch"], name, fp32, f"{speed:.0f}", gain, share])
    head = "width | batch | compiled | fp32, images/s | integers | integers / fp32 | products' share of the step"
    return table(head, lines)


def integer_bytes() -> str:
    rows = load("integer-bytes")["rows"]
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
