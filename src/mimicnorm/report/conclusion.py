"""The conclusion of a comparison in a sentence per method: accuracy, memory and time against the first one.

A difference in accuracy is stated where its interval does not hold 0. Where it does, the sentence says "same accuracy
within noise" if the interval is narrow, and "undecided" if it is not.
"""

from __future__ import annotations

from typing import Any

from mimicnorm.surgery.plan import count

NARROW = 0.02
"""Accuracies whose interval holds 0 and stays within this are the same within noise; in wider ones much could hide."""
EQUAL_BYTES = 0.01
TINY_STEP = 0.1
"""Seconds of a step below which the work per layer outweighs the arithmetic."""


def conclusions(data: dict[str, Any]) -> list[str]:
    """Return a sentence for each method except the first; methods without a result are left out.

    Example:
        >>> a = {"label": "a", "runs": [], "accuracy": None, "memory": {"saved_ratio": 1.0}, "time": None}
        >>> conclusions({"methods": [a, a | {"label": "b", "memory": {"saved_ratio": 0.47}}]})
        ['b against a: 53 % less memory saved for backward.']
    """
    first, *others = data["methods"]
    lines = [(m, [part for part in (_accuracy(m, first), _memory(m), _time(m)) if part]) for m in others]
    return [f"{m['label']} against {first['label']}: {', '.join(parts)}." for m, parts in lines if parts]


def about_time(data: dict[str, Any]) -> str:
    """Say that the times of a tiny network say nothing about large ones; return "" for others."""
    timed = [m["time"]["seconds"] for m in data["methods"] if m["time"]]
    if not timed or timed[0] >= TINY_STEP:
        return ""
    return (
        f"A step of this network takes {1000 * timed[0]:.0f} ms, most of it work per layer and not arithmetic: its "
        "times say nothing about those of a large network."
    )


def _accuracy(m: dict[str, Any], first: dict[str, Any]) -> str:
    ours, theirs = m["accuracy"], first["accuracy"]
    if not ours or not theirs:
        return ""
    diverged = [
        f"{label}{a['diverged']} of {count(len(entry['runs']), 'run')} diverged"
        for label, a, entry in (("", ours, m), (f"{first['label']}: ", theirs, first))
        if a["diverged"]
    ]
    if ours["mean"] is None or theirs["mean"] is None:
        return ", ".join(diverged)
    return ", ".join([*diverged, _difference(ours, theirs)])


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    gap = ours["difference"]
    if gap is None:
        points = 100 * (ours["mean"] - theirs["mean"])
        return f"accuracy undecided ({points:+.1f} points, too few seeds for an interval)"
    value, low, high = (100 * gap[key] for key in ("value", "low", "high"))
    numbers = f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"
    if low > 0 or high < 0:
        return f"{'higher' if value > 0 else 'lower'} accuracy ({numbers})"
    narrow = max(abs(low), abs(high)) <= 100 * NARROW
    return f"same accuracy within noise ({numbers})" if narrow else f"accuracy undecided ({numbers})"


def _memory(m: dict[str, Any]) -> str:
    ratio = (m["memory"] or {}).get("saved_ratio")
    if ratio is None:
        return ""
    if abs(ratio - 1) <= EQUAL_BYTES:
        return "same memory"
    return f"{100 * abs(ratio - 1):.0f} % {'less' if ratio < 1 else 'more'} memory saved for backward"


def _time(m: dict[str, Any]) -> str:
    if not m["time"]:
        return ""
    value, low, high = (m["time"]["ratio"][key] for key in ("value", "low", "high"))
    if low <= 1 <= high:
        return "same speed within noise"
    return f"{100 * abs(value - 1):.0f} % {'less' if value < 1 else 'more'} time per step"
