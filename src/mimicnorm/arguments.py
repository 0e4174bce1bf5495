"""Number checks shared by every public function: the value comes back, or an error says what to pass.

Nothing here imports torch, so that the command line can check numbers before it loads.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from mimicnorm.errors import MimicNormError


def positive_int(value: Any, name: str, *, least: int = 1, error: type[MimicNormError] = MimicNormError) -> int:
    """Return a whole number of at least ``least``; booleans, floats and strings are refused.

    Example:
        >>> positive_int(3, "depth")
        3
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise error(f"{name}={value!r}: use a whole number of at least {least}")
    return number


def finite(
    value: Any,
    name: str,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    error: type[MimicNormError] = MimicNormError,
) -> float:
    """Return a finite number with value >= least and value > above; a tensor of one number is accepted.

    Example:
        >>> finite(0.5, "lr", above=0)
        0.5
    """
    try:
        number = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not (math.isfinite(number) and number >= least and number > above):
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise error(f"{name}={value!r}: use a finite number{bound}")
    return number
