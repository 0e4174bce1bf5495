"""Checks of tensors and of callables that a caller passes; numbers are checked by `mimicnorm.arguments`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mimicnorm.errors import TheoryError


def reals(name: str, value: Any, dims: int | None = None) -> Tensor:
    """Return a dense float64 tensor of finite real numbers, at least one of them, detached from any graph."""
    try:
        # Python's numbers are float64, where torch would make them float32
        tensor = (value if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        got = repr(value) if isinstance(value, str) else type(value).__name__
        raise TheoryError(f"{name} must be a tensor of numbers, not {got}.") from error
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_meta:
        kind = "complex" if tensor.is_complex() else "meta" if tensor.is_meta else "sparse"
        raise TheoryError(f"{name} is a {kind} tensor: pass a dense one of real numbers.")
    if tensor.numel() == 0 or (dims is not None and tensor.dim() != dims):
        wish = "at least one number" if dims is None else f"{dims} dimension(s) and at least one number"
        raise TheoryError(f"{name} must have {wish}, not shape {tuple(tensor.shape)}.")
    tensor = tensor.to(torch.float64)
    if not bool(torch.isfinite(tensor).all()):
        raise TheoryError(f"there are non-finite entries in {name}; look for NaN or infinity in the inputs.")
    return tensor


@contextmanager
def running(what: str, *inputs: Any) -> Iterator[None]:
    """Turn an error that a caller's model, loss or activation raises on its inputs into a TheoryError of one line."""
    try:
        yield
    except TheoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        got = ", ".join(f"{a.dtype} {tuple(a.shape)}" if isinstance(a, Tensor) else type(a).__name__ for a in inputs)
        reason = str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise TheoryError(f"{what} does not run on its input ({got or 'nothing'}): {reason}.") from error
