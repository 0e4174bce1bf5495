"""docs/keep.md."""

from __future__ import annotations

from blocks.text import MIB, load, percent, prose, small, table

OUTPUTS, GRADIENTS = 1e-4, 1e-9
"""Relative errors that are to be expected of rounding: of outputs in fp32, of gradients in fp64."""


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
            small(max(map(_error, done))),
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
    sensitive = [r for r in exact if _error(r) > OUTPUTS or r["gradients"] > GRADIENTS]
    beyond = table(
        f"above {small(OUTPUTS)} or {small(GRADIENTS)} | output, fp32 | the original's in fp32, against fp64 | "
        "gradients, fp64 | the original's, input moved by 1e-15",
        [
            [
                r["name"],
                small(_error(r)),
                small(r["fp32 of the original"]),
                small(r["gradients"]),
                small(r[own]) if (own := "gradients of the original, input moved") in r else "",
            ]
            for r in sensitive
        ],
    )
    shown = [table("what | worst | networks", lines), *[beyond] * bool(sensitive), *[costs] * bool(costly)]
    return "\n\n".join([text, *shown])


def _error(row: dict) -> float:
    """The error of the output in fp32, under the worse of the two methods."""
    return max(row["fp32 nonorm"], row["fp32 mimicnorm"])


def kept_tuning() -> str:
    rows = load("keep-tuning")["rows"]
    cell = {(r["way"], r["batch"]): r for r in rows}
    lines = []
    for way in dict.fromkeys(r["way"] for r in rows):
        last = cell.get((way, 32)) or next(r for r in rows if r["way"] == way)
        costs = f"{last['saved_bytes'] / MIB:.1f}", f"{min(last['seconds']):.1f}" if last["seconds"] else ""
        lines.append([way, *(_tuned(cell.get((way, batch))) for batch in (2, 4, 32)), *costs])
    head = "way | batch 2 | batch 4 | batch 32 | MiB saved, batch 32 | seconds of the fastest epoch, batch 32"
    return f"{table(head, lines)}\n\n{_searched()}"


def _searched() -> str:
    """The search for learning rates: accuracy on images held out."""
    tried = {(r["way"], r["batch"], r["rate"]): r["top1"] for r in load("keep-tuning")["search"]}
    cells = sorted({(batch, rate) for _, batch, rate in tried})
    ways = dict.fromkeys(way for way, _, _ in tried)
    lines = [[way, *(percent([tried[way, batch, rate] or None]) for batch, rate in cells)] for way in ways]
    return table(" | ".join(["held out", *(f"batch {b}, {r * b / 32:.2g}" for b, r in cells)]), lines)


def _tuned(row: dict | None) -> str:
    """Accuracy over the seeds, and the learning rate."""
    if row is None:
        return ""
    lost = f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{percent(top1 or None for top1 in row['top1'])} ({row['lr']:.2g}{lost})"


def kept_alternatives() -> str:
    rows = load("keep-alternatives")["rows"]
    base = rows[0]["saved_bytes"]
    lines = [[r["name"], f"{r['saved_bytes'] / base:.3f}", f"{r['seconds']:.2f}"] for r in rows]
    return table("way | saved bytes / BatchNorm | time of a step / BatchNorm", lines)
