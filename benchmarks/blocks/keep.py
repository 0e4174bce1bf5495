"""docs/keep.md."""

from __future__ import annotations

import statistics

from blocks.text import MIB, load, prose, small, table


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
