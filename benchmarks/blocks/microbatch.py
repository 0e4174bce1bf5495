"""docs/microbatch.md."""

from __future__ import annotations

import statistics

from blocks.text import MIB, load, prose, small, table, worst


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
    rows = {way: load(f"microbatch-{way}")["rows"] for way in ways}
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
