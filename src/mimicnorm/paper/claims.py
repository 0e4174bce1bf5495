"""The paper's claims: for each item, a function from its rows to judgements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from mimicnorm.paper.figures import NAMES
from mimicnorm.paper.parity import SEEDS
from mimicnorm.paper.published import (
    BATCH_NORM_SHARE,
    CORRELATIONS,
    FOLDED_SCALAR,
    INTEGER_SPEED,
    LAST_NORM_MB,
    TABLE1,
    TABLE3,
    Cell,
)
from mimicnorm.paper.scales import Rows
from mimicnorm.paper.signals import STABLE_GAIN
from mimicnorm.paper.verdicts import (
    FAILS,
    HOLDS,
    TRAINS,
    UNDECIDED,
    WITHIN_NOISE,
    Judgement,
    at_least,
    below_all,
    every,
    of,
)

LIGHTWEIGHT = ("squeezenet", "shufflenetv2", "shufflenetv2_x0_5")
CENTRED = ("batch_norm", "weight_mean")
NEVER_RAN: dict[str, Any] = {"top1": [], "diverged": 0}

# -- Tables 1 to 3 -----------------------------------------------------------------------------------------------


def accuracies(published: Mapping[str, Mapping[str, Cell]], single: bool = False) -> Any:
    """Return the claims about a table's accuracies.

    They are: equal to BatchNorm; Fixup and no norm below both; lightweight networks train.

    Args:
        published: The table.
        single: Whether it has one run each.
    """

    def claims(rows: Rows) -> list[Judgement]:
        judged = []
        cells = {(r["network"], r["method"]): r for r in rows}
        for network in published:
            ours, theirs = (cells.get((network, m), NEVER_RAN) for m in ("mimicnorm", "batchnorm"))
            claim = f"{network}: MimicNorm is within {WITHIN_NOISE:g} point of BatchNorm, or ahead"
            judged.append(at_least(claim, ours, theirs, -WITHIN_NOISE, single=single))
            for method, name in (("fixup", "Fixup"), ("nonorm", "no norm")):
                if method in published[network]:
                    other = cells.get((network, method), NEVER_RAN)
                    judged.append(below_all(f"{network}: {name} is below both", other, ours, theirs))
            if network in LIGHTWEIGHT:
                claim = f"{network}: a lightweight network trains without BatchNorm (to 0.9 of its accuracy)"
                judged.append(every(claim, {"%": _means("top1", ours, theirs)}, lambda a, b: a > 0.9 * b))
        return judged

    return claims


def starred(rows: Rows) -> list[Judgement]:
    """Judge the cells that the authors mark as unstable: a run fails there sometimes, and nowhere else.

    A run fails if its loss is not finite or its accuracy stays that of guessing.
    """
    failures: dict[tuple[str, str], tuple[int, int]] = {}  # failed runs, and all runs
    for row in rows:
        failed = row["diverged"] + sum(top1 < TRAINS for top1 in row["top1"])
        total = row["diverged"] + len(row["top1"])
        if total:
            failures[row["network"], row["method"]] = failed, total

    def evidence(cells: list[tuple[str, str]]) -> str:
        return "; ".join(f"{n} {m}: {failures[n, m][0]} of {failures[n, m][1]}" for n, m in cells)

    cells = [(n, m) for n in TABLE1 for m in TABLE1[n] if (n, m) in failures]
    marked = [(n, m) for n, m in cells if TABLE1[n][m].starred]
    normalised = [(n, m) for n, m in cells if m in ("batchnorm", "mimicnorm")]
    unstable = HOLDS if marked and all(failures[c][0] for c in marked) else UNDECIDED  # a few runs refute nothing
    stable = UNDECIDED if not normalised else FAILS if any(failures[c][0] for c in normalised) else HOLDS
    return [
        Judgement("the starred cells fail sometimes (failed runs)", unstable, evidence(marked)),
        Judgement("BatchNorm and MimicNorm never fail (failed runs)", stable, evidence(normalised)),
    ]


def table1(rows: Rows) -> list[Judgement]:
    """All claims about training in Table 1."""
    return [*accuracies(TABLE1)(rows), *starred(rows)]


def table3(rows: Rows) -> list[Judgement]:
    """All claims about training in Table 3."""
    return accuracies(TABLE3, single=True)(rows)


def memory(published: Mapping[str, Mapping[str, Cell]]) -> Any:
    """Return the claims about the predicted peaks of a table's networks, in MiB."""

    def claims(rows: Rows) -> list[Judgement]:
        peaks: dict[str, dict[str, float]] = {n: {} for n in published}
        for row in rows:
            if "peak_mib" in row:
                peaks[row["network"]][row["method"]] = row["peak_mib"]
        judged = []
        for network, cells in published.items():
            saving = 1 - cells["mimicnorm"].memory / cells["batchnorm"].memory
            claim = f"{network}: MimicNorm saves {saving:.0%} of the peak memory, or more"
            case = {"MiB, MimicNorm / BatchNorm": of(peaks[network], "mimicnorm", "batchnorm")}
            judged.append(every(claim, case, lambda ours, theirs, s=saving: ours <= (1 - s) * theirs))
        fixup = {n: of(peaks[n], "fixup", "batchnorm") for n, cells in published.items() if "fixup" in cells}
        judged.append(every("Fixup takes more memory than BatchNorm (MiB)", fixup, lambda a, b: a > b))
        judged.append(_share({n: p for n, p in peaks.items() if {"nonorm", "batchnorm"} <= p.keys()}))
        if published is TABLE1:
            case = {n: of(peaks[n], "mimicnorm", "nonorm") for n, cells in published.items() if "nonorm" in cells}
            claim = f"the last BN costs {LAST_NORM_MB} MB at most over no norm (MiB)"
            judged.append(every(claim, case, lambda ours, none: ours - none <= LAST_NORM_MB))
        return judged

    return claims


def _share(peaks: Mapping[str, Mapping[str, float]]) -> Judgement:
    shares = {n: 1 - p["nonorm"] / p["batchnorm"] for n, p in peaks.items()}
    wide = [n for n in shares if shares[n] >= BATCH_NORM_SHARE]
    verdict = UNDECIDED if not shares else HOLDS if len(wide) == len(shares) else FAILS
    evidence = "; ".join(f"{n}: {share:.0%}" for n, share in shares.items())
    return Judgement(
        f"BatchNorm takes {BATCH_NORM_SHARE:.0%} of the memory, or more, in every network", verdict, evidence
    )


def rates(rows: Rows) -> list[Judgement]:
    """Table 2: which learning rates each method trains at."""
    at = {row["lr"]: row for row in rows}
    small, large = [lr for lr in at if lr <= 0.05], [lr for lr in at if lr >= 0.2]
    return [
        every(
            "from a learning rate of 0.2 on, no norm and weight mean do not train, and MimicNorm does",
            {lr: of(at[lr], "nonorm", "weight-mean", "mimicnorm") for lr in large},
            lambda none, mean, ours: max(none, mean) < TRAINS <= ours,
        ),
        every(
            "MimicNorm is ahead of BatchNorm in the first ten epochs, at every learning rate",
            {lr: of(row, "mimicnorm", "batchnorm") for lr, row in at.items()},
            lambda ours, theirs: ours > theirs,
        ),
        every(
            "at small learning rates weight mean trains faster than no norm",
            {lr: of(at[lr], "weight-mean", "nonorm") for lr in small},
            lambda mean, none: mean > none,
        ),
    ]


def ablations(rows: Rows) -> list[Judgement]:
    """Judge the ablations: both parts count, weight mean at the start, the last BN in shallow networks."""
    judged = []
    for network in dict.fromkeys(r["network"] for r in rows):
        curves = {r["method"]: r["top1"] for r in rows if r["network"] == network}
        final = {method: top1[-1] for method, top1 in curves.items()}
        early = {method: top1[min(1, len(top1) - 1)] for method, top1 in curves.items()}
        claim = f"{network}: both parts are better than either alone (last epoch, %)"
        judged.append(_ahead(claim, final, "mimicnorm", "weight-mean", "last-bn"))
        claim = f"{network}: weight mean is faster than no norm in the first epochs (second epoch, %)"
        judged.append(_ahead(claim, early, "weight-mean", "nonorm"))
        claim = f"{network}: the last BN improves accuracy (last epoch, %)"
        judged.append(_ahead(claim, final, "mimicnorm", "weight-mean"))
        if network in ("resnet18", "resnet50"):
            better, worse = ("last-bn", "weight-mean") if network == "resnet18" else ("weight-mean", "last-bn")
            claim = f"{network}: {better} alone is better than {worse} alone (last epoch, %)"
            judged.append(every(claim, {f"{better} / {worse}": of(final, better, worse)}, lambda a, b: a > b))
            claim = f"{network}: MimicNorm is ahead of Fixup (last epoch, %)"
            judged.append(_ahead(claim, final, "mimicnorm", "fixup"))
    return judged


def _ahead(claim: str, accuracy: Mapping[str, float], first: str, *others: str) -> Judgement:
    """Judge whether the first method has a higher accuracy than all others."""
    label = " / ".join(NAMES[method] for method in (first, *others))
    return every(claim, {label: of(accuracy, first, *others)}, lambda ours, *theirs: ours > max(theirs))


def _means(quantity: str, *rows: Mapping[str, Any]) -> list[float | None]:
    """Return the mean over each row's runs; None for a row without runs."""
    return [statistics.mean(row[quantity]) if row["top1"] else None for row in rows]


def parity(rows: Rows) -> list[Judgement]:
    """Judge each method at its own best rate: accuracy and calibration."""
    judged = []
    cells = {(r["labels"], r["method"]): r for r in rows}
    for labels in dict.fromkeys(labels for labels, _ in SEEDS):
        ours, theirs = (cells.get((labels, m), NEVER_RAN) for m in ("mimicnorm", "batchnorm"))
        claim = f"{labels}: MimicNorm is within {WITHIN_NOISE:g} point of BatchNorm, or ahead, each at its best rate"
        judged.append(at_least(claim, ours, theirs, -WITHIN_NOISE, single=SEEDS[labels, "mimicnorm"] == 1))
        claim = f"{labels}: MimicNorm's calibration error is no larger than BatchNorm's"
        case = {"MimicNorm / BatchNorm": _means("calibration_error", ours, theirs)}
        judged.append(every(claim, case, lambda a, b: a <= b))
    return judged


def depthwise(rows: Rows) -> list[Judgement]:
    """Judge what the paper blames for ShuffleNet's deficit: its depthwise layers are not centred."""
    at = {r["way"]: r for r in rows}
    theirs, ours, centred = (
        at.get(way, NEVER_RAN) for way in ("batchnorm", "mimicnorm", "mimicnorm, depthwise centred")
    )
    return [
        below_all("ShuffleNet is a little below BatchNorm under MimicNorm", ours, theirs),
        at_least("... because its depthwise layers are not centred: with them it is better", centred, ours, 0.0),
    ]


def integers(rows: Rows) -> list[Judgement]:
    """Judge the outlook on integer training: it is possible; four times the throughput."""
    judged = []
    for network in dict.fromkeys(r["network"] for r in rows):
        at = {r["precision"]: r for r in rows if r["network"] == network}
        ours, theirs = (at.get(precision, NEVER_RAN) for precision in ("int8", "fp32"))
        claim = f"{network}: training in integers alone is possible (within {WITHIN_NOISE:g} point of fp32)"
        judged.append(at_least(claim, ours, theirs, -WITHIN_NOISE))
        speeds = {precision: r["images_per_second"] for precision, r in at.items()}
        claim = f"{network}: integers have {INTEGER_SPEED} times the throughput (images a second, CPU)"
        case = {"integers / fp32": of(speeds, "int8", "fp32")}
        judged.append(every(claim, case, lambda fast, slow: fast >= INTEGER_SPEED * slow))
    return judged


# -- figures -----------------------------------------------------------------------------------------------------


def shift(rows: Rows) -> list[Judgement]:
    """Judge Figure 2: channels drift apart with depth, and inputs become alike within a channel."""
    between, within = ({str(r["layer"]): r[key] for r in rows} for key in ("between", "within"))
    share = {layer: between[layer] ** 2 / (between[layer] ** 2 + within[layer] ** 2) for layer in between}
    claims = {
        "straight: within a channel, inputs become alike (standard deviation)": (within, lambda a, b: b < a),
        "straight: the variation between channels increases (standard deviation)": (between, lambda a, b: b > a),
        "straight: the share of the variance that is between channels increases": (share, lambda a, b: b > a),
    }
    return [every(claim, {"layers 20 / 50": of(at, "20", "50")}, holds) for claim, (at, holds) in claims.items()]


def unfrozen(rows: Rows) -> list[Judgement]:
    """Judge Figure 3: every channel follows the same distribution. Under BatchNorm that is so by construction."""
    at = {r["kind"]: r["between"] / r["within"] for r in rows if r["layer"] == 50}
    claim = "layer 50, {}: every channel follows the same distribution (between / within below 0.5)"
    return [every(claim.format(NAMES[kind]), {"ratio": of(at, kind)}, lambda ratio: ratio < 0.5) for kind in CENTRED]


def operator(rows: Rows) -> list[Judgement]:
    """Figure 4: fixed points and slopes of the transition operators."""
    stable = {r["kind"]: {p["rho"] for p in r["fixed_points"] if p["stability"] != "unstable"} for r in rows}
    chi1 = {r["kind"]: r["chi1"] for r in rows}
    at = {kind: max(points) for kind, points in stable.items() if len(points) == 1}
    return [
        every("straight: the only stable fixed point is 1", {"rho": of(at, "straight")}, lambda r: math.isclose(r, 1)),
        every("weight mean: the only stable fixed point is 0", {"rho": of(at, "weight_mean")}, lambda r: abs(r) < 1e-9),
        every("straight: chi_1 = 1", {"chi_1": of(chi1, "straight")}, lambda c: math.isclose(c, 1)),
        every(
            f"weight mean: chi_1 = 1/(1 - 1/pi) = {STABLE_GAIN:.4f}",
            {"chi_1": of(chi1, "weight_mean")},
            lambda c: math.isclose(c, STABLE_GAIN, rel_tol=1e-9),
        ),
    ]


def correlations(rows: Rows) -> list[Judgement]:
    """Appendix B.1: correlations freeze at 1 in a straight network, and stay around 0 in the others."""
    last = {r["kind"]: r for r in rows if r["layer"] == 30}
    claim = "straight: correlations of all pairs tend to 1 (5 % quantile at layer 30)"
    judged = [every(claim, {"straight": of(last.get("straight", {}), "low")}, lambda low: low > 0.9)]
    for kind in CENTRED:
        claim = f"{NAMES[kind]}: correlations concentrate in ±{CORRELATIONS:g} (5 and 95 % quantiles at layer 30)"
        case = {kind: of(last.get(kind, {}), "low", "high")}
        judged.append(every(claim, case, lambda low, high: max(-low, high) <= CORRELATIONS))
    return judged


def residual(rows: Rows) -> list[Judgement]:
    """Judge Figure 5: BatchNorm downscales the l-th branch by 1/l, and the scalar 1/sqrt(l) does the same."""
    judged = []
    for kind, scale, name in (("batch_norm", "none", "BatchNorm"), ("weight_mean", "sqrt", "the scalar 1/sqrt(l)")):
        cases = {
            f"{row['blocks']}: measured / expected / standard error": [
                row["value"],
                row["blocks"] + 1,
                row["standard_error"],
            ]
            for row in rows
            if (row["kind"], row["scale"]) == (kind, scale)
        }
        judged.append(every(f"{name}: the variance after b blocks is b + 1", cases, _within_four_errors))
    return judged


def _within_four_errors(value: float, expected: float, error: float) -> bool:
    return abs(value - expected) <= 4 * error


def variance(rows: Rows) -> list[Judgement]:
    """Judge Appendix B.2: the straight network's variance surges and it diverges; a last BN holds the surge."""
    judged = []
    for network in dict.fromkeys(r["network"] for r in rows):
        of_method = {r["method"]: r for r in rows if r["network"] == network}
        plain = of_method.get("nonorm")
        if plain is not None:
            step = plain["diverged_at"]
            evidence = "it did not" if step is None else f"at step {step}"
            claim = f"{network}: without a norm, training at a learning rate of 0.1 diverges in the first two epochs"
            judged.append(Judgement(claim, FAILS if step is None else HOLDS, evidence))
        for method, name in (("last-bn", "a last BN"), ("mimicnorm", "MimicNorm")):
            row = of_method.get(method)
            if row is not None and row["median"]:
                medians = row["median"]
                early = max(medians[: len(medians) // 2 + 1])
                rises, stable = max(medians) > medians[0], row["diverged_at"] is None and medians[-1] <= 2 * early
                claim = f"{network}: with {name} the variance rises and becomes stable (median over classes)"
                shown = f"first {medians[0]:.3g}, largest of the first half {early:.3g}, last {medians[-1]:.3g}"
                judged.append(Judgement(claim, HOLDS if rises and stable else FAILS, shown))
    return judged


def appendix_c(rows: Rows) -> list[Judgement]:
    """Judge Appendix C and a remark of the conclusion; and what this library makes of micro-batches."""
    at = {r["name"]: r["value"] for r in rows}
    folded, apart = (f"peak over BatchNorm, scalars {word}" for word in ("folded", "not folded"))
    centring = {name: [far] for name, far in at.items() if name.startswith("centring")}
    exact = {
        "ours: micro-batches of one give the batch's gradient": "gradient from micro-batches of one, relative error",
        "the last BN can be folded into the loss": "gradient with the last BN in the loss, relative error",
    }
    return [
        every(
            f"folding the scalar of a branch into its layer saves {FOLDED_SCALAR:.0%} of the memory, or more",
            {"peaks over BatchNorm, folded / not": of(at, folded, apart)},
            lambda ours, theirs: theirs - ours >= FOLDED_SCALAR,
        ),
        every("centring once is enough, forward or backward: the same steps", centring, lambda far: far < 1e-10),
        *(every(claim, {"error": of(at, name)}, lambda far: far < 1e-10) for claim, name in exact.items()),
    ]


def theorems(rows: Rows) -> list[Judgement]:
    """Each theorem against real networks: within four standard errors."""
    label, numbers = "measured / predicted / standard error", ("value", "predicted", "standard_error")
    return [every(row["statement"], {label: of(row, *numbers)}, _within_four_errors) for row in rows]
