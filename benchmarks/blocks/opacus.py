"""examples/README.md."""

from __future__ import annotations

from blocks.text import MIB, interval, load, table


def opacus_cost() -> str:
    rows = load("opacus")["costs"]
    first = {r["network"]: r for r in reversed(rows)}  # GroupNorm, which the others are compared with

    def ratio(r: dict) -> str:
        return "1" if r is first[r["network"]] else interval(r["ratio"])

    lines = (
        (r["network"], r["method"], f"{r['saved_bytes'] / MIB:.1f}", f"{r['peak_bytes'] / MIB:.1f}", ratio(r))
        for r in rows
    )
    return table("network | method | saved MiB | peak MiB | time / GroupNorm", lines, left=2)


def opacus_accuracy() -> str:
    lines = []
    for r in load("opacus")["accuracy"]:
        lines.append((r["method"], r["lr"], *(f"{100 * a:.1f} %" for a in r["accuracy"]), f"{100 * r['mean']:.1f} %"))
    return table("method | learning rate | seed 0 | seed 1 | seed 2 | mean", lines)
