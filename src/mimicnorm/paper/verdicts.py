"""A verdict per claim of the paper: a pure function of what was published and what was measured.

Claims about several seeds are decided by the 95 % interval of a difference; those about one run each by the numbers
themselves. Desk scale can confirm a direction, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mimicnorm.compare.intervals import Estimate, difference
from mimicnorm.paper.items import GUESSING

HOLDS, DIRECTION = "holds", "holds in direction at desk scale"
FAILS, UNDECIDED, NEEDS_GPUS = "does not hold here", "undecided", "needs GPUs, recipe ready"

WITHIN_NOISE = 1.0
"""Points of accuracy that a method may be behind BatchNorm and still count as equal; the paper's Table 1 has -0.62."""
TRAINS = 3 * GUESSING
"""Accuracy in percent from which on a run counts as trainable; the paper's failures have 1.00 to 1.77."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Judgement:
    """What became of a claim.

    Attributes:
        claim: The paper's statement.
        verdict: One of the five above.
        evidence: The numbers it rests on.
    """

    claim: str
    verdict: str
    evidence: str


def judge(item: str, scale: str, rows: Rows) -> list[Judgement]:
    """Judge the claims of an item.

    Args:
        item: A name of ``ITEMS``.
        scale: "desk" or "paper".
        rows: What the item measured; empty if nothing was.

    Example:
        >>> rows = [{"network": "vgg11", "method": m, "top1": [60.0, 60.4, 60.2], "diverged": 0}
        ...         for m in ("batchnorm", "mimicnorm")]
        >>> judge("table1", "paper", rows)[0].verdict
        'holds'
    """
    if not rows:
        return [Judgement("every claim of this item", NEEDS_GPUS if item == "table3" else UNDECIDED, "not run")]
    return [
        Judgement(claim, DIRECTION if verdict == HOLDS and scale == "desk" else verdict, evidence)
        for claim, verdict, evidence in _CLAIMS[item](rows)
    ]


_Claim = tuple[str, str, str]


def _accuracies(rows: Rows) -> list[_Claim]:
    """Table 1 and 3: equal to BatchNorm; Fixup and no norm below; which runs diverge."""
    claims = []
    top1 = {(r["network"], r["method"]): r["top1"] for r in rows}
    diverged = {(r["network"], r["method"]): r["diverged"] for r in rows}
    for network in dict.fromkeys(r["network"] for r in rows):
        ours, theirs = (top1.get((network, m), []) for m in ("mimicnorm", "batchnorm"))
        gap = difference(ours, theirs)
        lost = diverged.get((network, "mimicnorm"), 0)
        verdict = FAILS if lost else _at_least(gap, -WITHIN_NOISE)
        claims.append((f"{network}: MimicNorm is within noise of BatchNorm", verdict, _points(gap, lost)))
        for method, claim in (("fixup", "Fixup is below both"), ("nonorm", "no norm is below both")):
            if (network, method) in top1:
                claims.append((f"{network}: {claim}", *_below_both(top1, diverged, network, method)))
    return claims


def _below_both(top1: dict, diverged: dict, network: str, method: str) -> tuple[str, str]:
    lost = diverged[network, method]
    if not top1[network, method]:
        return HOLDS, f"all {lost} runs diverged"
    gaps = [difference(top1[network, method], top1.get((network, m), [])) for m in ("batchnorm", "mimicnorm")]
    evidence = "; ".join(_points(gap, 0) for gap in gaps) + (f"; {lost} diverged" if lost else "")
    if any(gap is None for gap in gaps):
        return UNDECIDED, evidence
    known = [gap for gap in gaps if gap is not None]
    if all(gap.high < 0 for gap in known):
        return HOLDS, evidence
    return (FAILS if any(gap.low > 0 for gap in known) else UNDECIDED), evidence


def _at_least(gap: Estimate | None, least: float) -> str:
    if gap is None:
        return UNDECIDED
    return HOLDS if gap.low >= least else FAILS if gap.high < 0 else UNDECIDED


def _points(gap: Estimate | None, diverged: int) -> str:
    if diverged:
        return f"{diverged} runs diverged"
    return "fewer than two runs" if gap is None else f"{gap.value:+.2f} points [{gap.low:+.2f}, {gap.high:+.2f}]"


def _rates(rows: Rows) -> list[_Claim]:
    """Table 2: which learning rates each method trains at."""
    at = {row["lr"]: row for row in rows}
    small, large = [lr for lr in at if lr <= 0.05], [lr for lr in at if lr >= 0.2]
    return [
        _every(
            "from a learning rate of 0.2 on, no norm and weight mean do not train, and MimicNorm does",
            {lr: (at[lr], ("nonorm", "weight-mean", "mimicnorm")) for lr in large},
            lambda none, mean, ours: max(none, mean) < TRAINS <= ours,
        ),
        _every(
            "MimicNorm is ahead of BatchNorm in the first ten epochs, at every learning rate",
            {lr: (row, ("mimicnorm", "batchnorm")) for lr, row in at.items()},
            lambda ours, theirs: ours > theirs,
        ),
        _every(
            "at small learning rates weight mean trains faster than no norm",
            {lr: (at[lr], ("weight-mean", "nonorm")) for lr in small},
            lambda mean, none: mean > none,
        ),
    ]


def _every(
    claim: str,
    cases: Mapping[Any, tuple[Mapping[str, Any], tuple[str, ...]]],
    holds: Callable[..., bool],
) -> _Claim:
    """Judge a claim about single runs: it holds if it does in every case; evidence is what each case has."""
    if not cases or any(method not in row for row, methods in cases.values() for method in methods):
        return claim, UNDECIDED, "runs are missing"
    values = {case: [row[method] for method in methods] for case, (row, methods) in cases.items()}
    wrong = [case for case in values if not holds(*values[case])]
    shown = "; ".join(f"{case}: {' / '.join(f'{v:.1f}' for v in values[case])}" for case in wrong or values)
    return claim, FAILS if wrong else HOLDS, f"not at {shown}" if wrong else shown


def _ablations(rows: Rows) -> list[_Claim]:
    """The ablations: both parts count, weight mean at the start, the last BN in shallow networks."""
    claims = []
    curve = {(r["network"], r["method"]): r["top1"] for r in rows}
    for network in dict.fromkeys(r["network"] for r in rows):
        of = {method: top1 for (n, method), top1 in curve.items() if n == network and top1}
        final = {method: top1[-1] for method, top1 in of.items()}
        early = {method: top1[min(1, len(top1) - 1)] for method, top1 in of.items()}
        claims += [
            _every(
                f"{network}: both parts are better than either alone",
                {"last epoch": (final, ("mimicnorm", "weight-mean", "last-bn"))},
                lambda both, mean, last: both > max(mean, last),
            ),
            _every(
                f"{network}: weight mean is faster than no norm in the first epochs",
                {"second epoch": (early, ("weight-mean", "nonorm"))},
                lambda mean, none: mean > none,
            ),
        ]
        if network in ("resnet18", "resnet50"):
            better, worse = ("last-bn", "weight-mean") if network == "resnet18" else ("weight-mean", "last-bn")
            claims.append(
                _every(
                    f"{network}: {better} alone is better than {worse} alone",
                    {"last epoch": (final, (better, worse))},
                    lambda one, other: one > other,
                )
            )
    return claims


_CLAIMS: dict[str, Callable[[Rows], list[_Claim]]] = {
    "table1": _accuracies,
    "table2": _rates,
    "table3": _accuracies,
    "figure-vgg-ablation": _ablations,
    "figure-resnet-ablation": _ablations,
}
