"""What a verdict is, and the comparisons that verdicts rest on: pure functions of published and measured numbers.

Claims about several seeds are decided by the 95 % interval of a difference; those about one run each by the numbers
themselves. Desk scale can confirm a direction, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mimicnorm.compare.intervals import Estimate, difference
from mimicnorm.paper.scales import GUESSING

Row = Mapping[str, Any]
HOLDS, DIRECTION = "holds", "holds in direction at desk scale"
FAILS, UNDECIDED, NEEDS_GPUS = "does not hold here", "undecided", "needs GPUs, recipe ready"

WITHIN_NOISE = 1.0
"""Points of accuracy that a method may be behind BatchNorm and still count as equal; the paper's Table 1 has -0.62."""
TRAINS = 3 * GUESSING
"""Accuracy in percent from which on a run counts as trainable; the paper's failures have 1.00 to 1.77."""


class Judgement(NamedTuple):
    """What became of a claim.

    Attributes:
        claim: The paper's statement.
        verdict: One of the five above.
        evidence: The numbers it rests on.
    """

    claim: str
    verdict: str
    evidence: str


def at_desk(judgement: Judgement) -> Judgement:
    """Return what a judgement on desk-scale runs amounts to."""
    return judgement._replace(verdict=DIRECTION) if judgement.verdict == HOLDS else judgement


def at_least(claim: str, ours: Row, theirs: Row, least: float, *, single: bool = False) -> Judgement:
    """Judge "ours is at least theirs plus ``least``" by the interval of the difference; a divergence refutes it.

    Args:
        claim: The paper's statement.
        ours: The row of our method: accuracies ("top1") and how many runs "diverged".
        theirs: That of the other.
        least: In points; negative allows a deficit.
        single: Whether one run each is all there will be: it is judged by the numbers then.
    """
    if ours["diverged"]:
        return Judgement(claim, FAILS, f"{ours['diverged']} runs diverged")
    if single and ours["top1"] and theirs["top1"]:
        gap = ours["top1"][0] - theirs["top1"][0]
        return Judgement(claim, HOLDS if gap >= least else FAILS, f"{gap:+.2f} points, one run each")
    interval = difference(ours["top1"], theirs["top1"])
    if interval is None:
        return Judgement(claim, UNDECIDED, "fewer than two runs")
    verdict = HOLDS if interval.low >= least else FAILS if interval.high < least else UNDECIDED
    return Judgement(claim, verdict, points(interval))


def below_all(claim: str, low: Row, *others: Row) -> Judgement:
    """Judge "this method is below all others" by the intervals of the differences."""
    diverged = low["diverged"]
    if not low["top1"]:
        return Judgement(claim, HOLDS if diverged else UNDECIDED, f"all {diverged} runs diverged" if diverged else "-")
    gaps = [difference(low["top1"], other["top1"]) for other in others]
    known = [gap for gap in gaps if gap is not None]
    if len(known) < len(gaps):
        return Judgement(claim, UNDECIDED, "fewer than two runs")
    lost = f"; {diverged} diverged" if diverged else ""
    verdict = HOLDS if all(gap.high < 0 for gap in known) else FAILS if any(g.low > 0 for g in known) else UNDECIDED
    return Judgement(claim, verdict, "; ".join(map(points, known)) + lost)


def every(claim: str, cases: Mapping[Any, Sequence[Any]], holds: Callable[..., bool]) -> Judgement:
    """Judge a claim by the values of each case: it holds if it holds in all of them.

    The evidence lists the values of every case, or only of those that contradict the claim.

    Args:
        claim: The paper's statement.
        cases: By name, the numbers that ``holds`` is asked about; None for one that was not measured.
        holds: The claim as a predicate.
    """
    if not cases or any(None in values for values in cases.values()):
        return Judgement(claim, UNDECIDED, "runs are missing")
    wrong = [case for case in cases if not holds(*cases[case])]
    shown = "; ".join(f"{case}: {' / '.join(map(number, cases[case]))}" for case in wrong or cases)
    return Judgement(claim, FAILS if wrong else HOLDS, f"not at {shown}" if wrong else shown)


def of(row: Row, *keys: str) -> list[Any]:
    """Return a row's values as a case of ``every``: None where the row has none."""
    return [row.get(key) for key in keys]


def number(value: float) -> str:
    """Write a number with four digits, or whole if it is large."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def points(gap: Estimate) -> str:
    """Write a difference of accuracies with its interval."""
    return f"{gap.value:+.2f} points [{gap.low:+.2f}, {gap.high:+.2f}]"
