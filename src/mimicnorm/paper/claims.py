"""The paper's claims: for each item, a function from its rows to judgements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mimicnorm.paper.published import TABLE1, Cell
from mimicnorm.paper.scales import Rows
from mimicnorm.paper.signals import BAND, STABLE_GAIN
from mimicnorm.paper.tables import DEPTHWISE
from mimicnorm.paper.verdicts import TRAINS, WITHIN_NOISE, Judgement, at_least, below_all, every

LIGHTWEIGHT = ("squeezenet", "shufflenetv2", "shufflenetv2_x0_5")

# -- Tables 1 to 3 -----------------------------------------------------------------------------------------------


def accuracies(rows: Rows) -> list[Judgement]:
    """Tables 1 and 3: equal to BatchNorm; Fixup and no norm below; what diverges; lightweight networks."""
    judged = []
    top1 = {(r["network"], r["method"]): r["top1"] for r in rows}
    diverged = {(r["network"], r["method"]): r["diverged"] for r in rows}
    ran = dict.fromkeys(r["network"] for r in rows if r["top1"] or r["diverged"])
    for network in ran:
        ours, theirs = (top1.get((network, m), []) for m in ("mimicnorm", "batchnorm"))
        lost = diverged.get((network, "mimicnorm"), 0)
        claim = f"{network}: MimicNorm is within noise of BatchNorm"
        judged.append(at_least(claim, ours, theirs, -WITHIN_NOISE, lost))
        for method, name in (("fixup", "Fixup"), ("nonorm", "no norm")):
            low = top1.get((network, method), [])
            if low or diverged.get((network, method)):
                judged.append(
                    below_all(f"{network}: {name} is below both", low, (theirs, ours), diverged[network, method])
                )
        if network in LIGHTWEIGHT:
            mean = {"accuracy": sum(ours) / len(ours)} if ours else {}
            claim = f"{network}: a lightweight network trains without BatchNorm"
            judged.append(every(claim, {"MimicNorm, %": (mean, ("accuracy",))}, lambda a: a > TRAINS))
        if (network, DEPTHWISE) in top1:
            claim = f"{network}: centring depthwise layers, too, makes up for its deficit"
            judged.append(at_least(claim, top1[network, DEPTHWISE], ours, 0.0, diverged[network, DEPTHWISE]))
    return judged


def starred(rows: Rows) -> list[Judgement]:
    """The cells that the authors mark as unstable: whether a run diverged there, and only there."""
    cells = {f"{r['network']} {r['method']}": r for r in rows if r["top1"] or r["diverged"]}
    marked = {f"{n} {m}" for n, methods in TABLE1.items() for m, cell in methods.items() if cell.starred}
    there = {name: (dict(cells[name]), ("diverged",)) for name in marked if name in cells}
    elsewhere = {
        name: (dict(row), ("diverged",))
        for name, row in cells.items()
        if name not in marked and row["method"] in ("batchnorm", "mimicnorm")
    }
    return [
        every("the starred cells fail to converge sometimes (runs that diverged)", there, lambda n: n > 0),
        every("BatchNorm and MimicNorm always converge (runs that diverged)", elsewhere, lambda n: n == 0),
    ]


def memory(published: Mapping[str, Mapping[str, Cell]]) -> Any:
    """Return the claims about predicted peaks, in MiB, of a table's networks."""

    def claims(rows: Rows) -> list[Judgement]:
        peaks: dict[str, dict[str, float]] = {}
        for row in rows:
            if "peak_mib" in row:
                peaks.setdefault(row["network"], {})[row["method"]] = row["peak_mib"]
        judged = []
        for network, cells in published.items():
            saving = 1 - cells["mimicnorm"].memory / cells["batchnorm"].memory
            claim = f"{network}: MimicNorm saves at least {saving:.0%} of the memory (peaks in MiB)"
            case = {"MimicNorm / BatchNorm": (peaks.get(network, {}), ("mimicnorm", "batchnorm"))}
            judged.append(every(claim, case, lambda ours, theirs, s=saving: ours <= (1 - s) * theirs))
        with_fixup = {
            n: (peaks.get(n, {}), ("fixup", "batchnorm")) for n, cells in published.items() if "fixup" in cells
        }
        both = {n: (peaks.get(n, {}), ("nonorm", "batchnorm")) for n in published}
        last = {n: (peaks.get(n, {}), ("mimicnorm", "nonorm")) for n, cells in published.items() if "nonorm" in cells}
        return [
            *judged,
            every("Fixup takes more memory than BatchNorm", with_fixup, lambda fixup, theirs: fixup > theirs),
            every("BatchNorm's share of the memory is 20 % or more", both, lambda none, bn: none <= 0.8 * bn),
            every("the last BN costs 20 MB at most over no norm", last, lambda ours, none: ours - none <= 20),
        ]

    return claims


def table1(rows: Rows) -> list[Judgement]:
    """All claims about training in Table 1."""
    return [*accuracies(rows), *starred(rows)]


def rates(rows: Rows) -> list[Judgement]:
    """Table 2: which learning rates each method trains at."""
    at = {row["lr"]: row for row in rows}
    small, large = [lr for lr in at if lr <= 0.05], [lr for lr in at if lr >= 0.2]
    return [
        every(
            "from a learning rate of 0.2 on, no norm and weight mean do not train, and MimicNorm does",
            {lr: (at[lr], ("nonorm", "weight-mean", "mimicnorm")) for lr in large},
            lambda none, mean, ours: max(none, mean) < TRAINS <= ours,
        ),
        every(
            "MimicNorm is ahead of BatchNorm in the first ten epochs, at every learning rate",
            {lr: (row, ("mimicnorm", "batchnorm")) for lr, row in at.items()},
            lambda ours, theirs: ours > theirs,
        ),
        every(
            "at small learning rates weight mean trains faster than no norm",
            {lr: (at[lr], ("weight-mean", "nonorm")) for lr in small},
            lambda mean, none: mean > none,
        ),
    ]


def ablations(rows: Rows) -> list[Judgement]:
    """The ablations: both parts count, weight mean at the start, the last BN in shallow networks."""
    judged = []
    curve = {(r["network"], r["method"]): r["top1"] for r in rows}
    for network in dict.fromkeys(r["network"] for r in rows):
        of = {method: top1 for (n, method), top1 in curve.items() if n == network and top1}
        final = {method: top1[-1] for method, top1 in of.items()}
        early = {method: top1[min(1, len(top1) - 1)] for method, top1 in of.items()}
        judged += [
            every(
                f"{network}: both parts are better than either alone",
                {"last epoch": (final, ("mimicnorm", "weight-mean", "last-bn"))},
                lambda both, mean, last: both > max(mean, last),
            ),
            every(
                f"{network}: weight mean is faster than no norm in the first epochs",
                {"second epoch": (early, ("weight-mean", "nonorm"))},
                lambda mean, none: mean > none,
            ),
        ]
        if network in ("resnet18", "resnet50"):
            better, worse = ("last-bn", "weight-mean") if network == "resnet18" else ("weight-mean", "last-bn")
            claim = f"{network}: {better} alone is better than {worse} alone"
            judged.append(every(claim, {"last epoch": (final, (better, worse))}, lambda one, other: one > other))
    return judged


def parity(rows: Rows) -> list[Judgement]:
    """Each method at its own best rate: accuracy and calibration."""
    judged = []
    of = {(r["labels"], r["method"]): r for r in rows}
    for labels in dict.fromkeys(r["labels"] for r in rows):
        ours, theirs = (of.get((labels, m), {}) for m in ("mimicnorm", "batchnorm"))
        claim = f"{labels}: MimicNorm is within noise of BatchNorm, each at its best rate"
        pair = ours.get("top1", []), theirs.get("top1", [])
        judged.append(at_least(claim, *pair, -WITHIN_NOISE, ours.get("diverged", 0)))
        errors = {m: r["calibration_error"] for m, r in (("ours", ours), ("theirs", theirs)) if r.get("top1")}
        means = {m: sum(values) / len(values) for m, values in errors.items()}
        claim = f"{labels}: MimicNorm's calibration error is no larger than BatchNorm's"
        judged.append(every(claim, {"MimicNorm / BatchNorm": (means, ("ours", "theirs"))}, lambda a, b: a <= b))
    return judged


# -- figures -----------------------------------------------------------------------------------------------------


def shift(rows: Rows) -> list[Judgement]:
    """Figure 2: channels drift apart with depth, and inputs become alike within a channel."""
    within = {str(r["layer"]): r["within"] for r in rows}
    share = {str(r["layer"]): r["between"] ** 2 / (r["between"] ** 2 + r["within"] ** 2) for r in rows}
    case = "layers 20 / 50"
    return [
        every("straight: within a channel, inputs become alike", {case: (within, ("20", "50"))}, lambda a, b: b < a),
        every(
            "straight: the share of the variance between channels grows",
            {case: (share, ("20", "50"))},
            lambda a, b: b > a,
        ),
    ]


def unfrozen(rows: Rows) -> list[Judgement]:
    """Figure 3: under BatchNorm and weight mean, channels follow the same distribution."""
    at = {r["kind"]: r["between"] / r["within"] for r in rows if r["layer"] == 50}
    return [
        every(
            f"layer 50, {name}: every channel follows the same distribution (between / within below 0.5)",
            {"ratio": (at, (kind,))},
            lambda ratio: ratio < 0.5,
        )
        for kind, name in (("batch_norm", "BatchNorm"), ("weight_mean", "weight mean"))
    ]


def operator(rows: Rows) -> list[Judgement]:
    """Figure 4: fixed points and slopes of the transition operators."""
    stable = {r["kind"]: {p["rho"] for p in r["fixed_points"] if p["stability"] != "unstable"} for r in rows}
    chi1 = {r["kind"]: r["chi1"] for r in rows}
    at = {kind: max(points) for kind, points in stable.items() if len(points) == 1}
    return [
        every("straight: the only stable fixed point is 1", {"rho": (at, ("straight",))}, lambda r: math.isclose(r, 1)),
        every(
            "weight mean: the only stable fixed point is 0", {"rho": (at, ("weight_mean",))}, lambda r: abs(r) < 1e-9
        ),
        every("straight: chi_1 = 1", {"chi_1": (chi1, ("straight",))}, lambda c: math.isclose(c, 1)),
        every(
            f"weight mean: chi_1 = 1/(1 - 1/pi) = {STABLE_GAIN:.4f}",
            {"chi_1": (chi1, ("weight_mean",))},
            lambda c: math.isclose(c, STABLE_GAIN, rel_tol=1e-9),
        ),
    ]


def correlations(rows: Rows) -> list[Judgement]:
    """Appendix B.1: correlations freeze at 1 in a straight network, and stay around 0 in the others."""
    last = {r["kind"]: {k: r[k] for k in ("low", "median", "high")} for r in rows if r["layer"] == 30}
    judged = [
        every(
            "straight: correlations of all pairs tend to 1 (5 % quantile at layer 30)",
            {"straight": (last.get("straight", {}), ("low",))},
            lambda low: low > 0.9,
        )
    ]
    for kind, name in (("batch_norm", "BatchNorm"), ("weight_mean", "weight mean")):
        claim = f"{name}: correlations concentrate in [-0.2, 0.2] (5 and 95 % quantiles at layer 30)"
        case = {kind: (last.get(kind, {}), ("low", "high"))}
        judged.append(every(claim, case, lambda low, high: low >= -1.1 * BAND and high <= 1.1 * BAND))
    return judged


def residual(rows: Rows) -> list[Judgement]:
    """Figure 5: BatchNorm downscales the l-th branch by 1/l; the scalar 1/sqrt(l) does the same."""
    of = {(r["kind"], r["scale"], r["blocks"]): r for r in rows}
    judged = []
    for kind, scale, name in (("batch_norm", "none", "BatchNorm"), ("weight_mean", "sqrt", "the scalar 1/sqrt(l)")):
        cases = {f"{b} blocks": (dict(of[k, s, b]), ("value", "blocks")) for k, s, b in of if (k, s) == (kind, scale)}
        claim = f"{name}: the variance after b blocks is b + 1"
        judged.append(every(claim, cases, lambda value, blocks: abs(value / (blocks + 1) - 1) < 0.1))
    return judged


def variance(rows: Rows) -> list[Judgement]:
    """Appendix B.2: the straight network's variance surges and it diverges; a last BN holds the surge."""
    judged = []
    for network in dict.fromkeys(r["network"] for r in rows):
        of = {r["method"]: r for r in rows if r["network"] == network}
        plain = of.get("nonorm", {})
        lost = {"step": plain["diverged_at"]} if plain.get("diverged_at") else {"step": math.inf} if plain else {}
        judged.append(
            every(
                f"{network}: without a norm, training at 0.1 diverges within several steps",
                {"diverged at step": (lost, ("step",))},
                lambda step: step < 100,
            )
        )
        ours = of.get("mimicnorm", {})
        steady: dict[str, float] = {}
        if ours.get("median"):
            half = len(ours["median"]) // 2
            steady = {"peak": max(ours["median"]), "first half": max(ours["median"][: half or 1])}
            steady |= {"end": ours["median"][-1], "diverged": float(ours["diverged_at"] is not None)}
        judged.append(
            every(
                f"{network}: with a last BN the variance rises and becomes stable (median over classes)",
                {"peak, peak of the first half, end, diverged": (steady, ("peak", "first half", "end", "diverged"))},
                lambda peak, first, end, diverged: not diverged and end <= 2 * first and math.isfinite(peak),
            )
        )
    return judged


def appendix_c(rows: Rows) -> list[Judgement]:
    """Appendix C, and two remarks of the main text."""
    at = {r["name"]: r["value"] for r in rows}
    folded, apart = (f"peak over BatchNorm, scalars {word}" for word in ("folded", "not folded"))
    centring = {name: (at, (name,)) for name in at if name.startswith("centring")}
    exact = {
        "micro-batches of one give the whole batch's gradient": "gradient from micro-batches of one, relative error",
        "the last BN can be folded into the loss": "gradient with the last BN in the loss, relative error",
    }
    return [
        every(
            "folding the scalar of a branch into its layer saves a further 5 to 10 % (more counts, too)",
            {"peaks over BatchNorm": (at, (folded, apart))},
            lambda ours, theirs: theirs - ours >= 0.05,
        ),
        every("centring once, forward or backward, is enough: the same steps", centring, lambda far: far < 1e-10),
        *(every(claim, {"error": (at, (name,))}, lambda far: far < 1e-10) for claim, name in exact.items()),
    ]


def theorems(rows: Rows) -> list[Judgement]:
    """Each theorem against real networks: within four standard errors."""
    return [
        every(
            f"{r['name']} ({r['statement']})",
            {"measured, predicted, standard error": (dict(r), ("value", "predicted", "standard_error"))},
            lambda value, predicted, error: abs(value - predicted) <= 4 * error,
        )
        for r in rows
    ]
