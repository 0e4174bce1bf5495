"""docs/compress.md."""

from __future__ import annotations

from blocks.text import cell_name, interval, load, named, percent, table


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
    rows = load("compress-time")["rows"]
    ways = [way for way in rows[0]["over_mimicnorm"] if way != "mimicnorm"]
    head = " | ".join(("time / `mimicnorm`", *(cell_name(r["cell"]) for r in rows)))
    return table(head, [[f"`{way}`", *(interval(r["over_mimicnorm"][way]) for r in rows)] for way in ways])


def compress_accuracy() -> str:
    of = {(r["method"], r["bits"]): r["accuracy"] for r in load("compress-accuracy")["rows"]}

    def cell(tops: list) -> str:
        return f"{tops.count(None)} of {len(tops)} diverged" if None in tops else percent(tops)

    widths = sorted({bits for _, bits in of}, reverse=True)
    lines = [[named(m), *(cell(of.get((m, b), [None])) for b in widths)] for m in dict.fromkeys(m for m, _ in of)]
    return table(" | ".join(("bits", *map(str, widths))), lines)
