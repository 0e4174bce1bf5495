"""What callers pass, checked in one place: each error is one sentence that says what is wrong and what to do."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mimicnorm.errors import TheoryError


def whole(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of at least `least`; True is none."""
    try:
        count = operator.index(value)
    except TypeError:
        count = least - 1
    if isinstance(value, bool) or count < least:
        raise TheoryError(f"{name} must be an integer of at least {least}, not {value!r}.")
    return count


def number(name: str, value: Any, least: float = -math.inf, above: float = -math.inf) -> float:
    """Return a finite number within bounds; strings and booleans are none, tensors of one number are."""
    try:
        found = math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        found = math.nan
    if not (math.isfinite(found) and found >= least and found > above):
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise TheoryError(f"{name} must be a finite number{bound}, not {value!r}.")
    return found


def reals(name: str, value: Any, dims: int | None = None) -> Tensor:
    """Return a dense float64 tensor of finite real numbers, at least one of them, apart from any graph."""
    try:
        # Python's numbers are float64, where torch would make them float32
        found = (value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        got = repr(value) if isinstance(value, str) else type(value).__name__
        raise TheoryError(f"{name} must be a tensor of numbers, not {got}.") from error
    if found.is_complex() or found.layout != torch.strided or found.is_meta:
        kind = "complex" if found.is_complex() else "meta" if found.is_meta else "sparse"
        raise TheoryError(f"{name} is a {kind} tensor: pass a dense one of real numbers.")
    if found.numel() == 0 or (dims is not None and found.dim() != dims):
        wish = "at least one number" if dims is None else f"{dims} dimension(s) and at least one number"
        raise TheoryError(f"{name} must have {wish}, not shape {tuple(found.shape)}.")
    found = found.to(torch.float64)
    if not bool(torch.isfinite(found).all()):
        raise TheoryError(f"there are non-finite entries in {name}; look for NaN or infinity in the inputs.")
    return found


@contextmanager
def running(what: str, *inputs: Any) -> Iterator[None]:
    """Turn what a callable of the caller's raises on unfit inputs into one sentence."""
    try:
        yield
    except TheoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        got = ", ".join(f"{a.dtype} {tuple(a.shape)}" if isinstance(a, Tensor) else type(a).__name__ for a in inputs)
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise TheoryError(
            f"{what} does not run on what it is given ({got or 'nothing'}): {reason}. Pass what it takes."
        ) from error
