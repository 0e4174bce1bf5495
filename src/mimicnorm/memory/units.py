"""Bytes, to and from what people write."""

from __future__ import annotations

import re
from fractions import Fraction

from mimicnorm.errors import MemoryPredictionError

_FACTORS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
    for power, prefix in enumerate("KMGT")
}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _FACTORS.items()}


def parse_bytes(amount: str | int | float) -> int:
    """Read an amount of memory: a number of bytes, or a number with a unit.

    Binary units (KiB, MiB, GiB, TiB) and decimal ones (KB, MB, GB, TB) are different; a letter alone (16G) is binary,
    as for Docker, Slurm and Java. Case does not matter.

    Example:
        >>> parse_bytes("16 GiB"), parse_bytes("16G"), parse_bytes("1.5kb"), parse_bytes("1e9")
        (17179869184, 17179869184, 1500, 1000000000)
    """
    match = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,2})?)\s*([A-Za-z]*)\s*", str(amount))
    factor = _BY_LOWER_CASE.get(match[2].lower()) if match else None
    count = round(Fraction(match[1]) * factor) if match and factor else 0
    if not 1 <= count < 2**63:
        raise MemoryPredictionError(
            f"{amount!r} is not an amount of memory: write a number of bytes from 1 to 2^63 - 1, or a number with one "
            f"of {', '.join(unit for unit in _FACTORS if unit)}, as in '16 GiB'"
        )
    return count


def format_bytes(count: int) -> str:
    """Write a number of bytes with the binary unit that leaves one to four digits before the point.

    Example:
        >>> format_bytes(40_862_000), format_bytes(17)
        ('38.97 MiB', '17 B')
    """
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(count) >= _FACTORS[unit]:
            return f"{count / _FACTORS[unit]:.2f} {unit}"
    return f"{count} B"
