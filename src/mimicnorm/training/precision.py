"""The precision of a run: autocast, and bf16 on processors that have no instructions for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_aten = torch.ops.aten
_PRODUCTS = (
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.addmm.default,
    _aten.mm.default,
    _aten.bmm.default,
)


@contextmanager
def autocast(device: torch.device, precision: str, compiled: bool = False) -> Iterator[None]:
    """Run the forward and backward pass of a step in "fp32", "bf16" or "fp16".

    Args:
        device: Where the network is.
        precision: Of its products.
        compiled: Whether the network is compiled, so that Python does not see its products.

    Example:
        >>> with autocast(torch.device("cpu"), "bf16"):
        ...     torch.nn.functional.linear(torch.ones(1, 2), torch.ones(1, 2)).dtype
        torch.bfloat16
    """
    dtype = DTYPES.get(precision)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        slow = dtype is torch.bfloat16 and device.type == "cpu" and not _has_bf16()
        with _ProductsInSingle() if slow and not compiled else nullcontext():
            yield


def _has_bf16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


class _ProductsInSingle(TorchDispatchMode):
    """Computes products of bf16 tensors in fp32 and rounds the result to bf16.

    That is what bf16 instructions do: the product of two bf16 numbers is exact in fp32, where they are summed. Without
    such instructions, PyTorch's own bf16 convolutions take many times as long as those in fp32.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        del types
        if func not in _PRODUCTS or not any(map(_is_bf16, args)):
            return func(*args, **kwargs or {})
        result = func(*pytree.tree_map(_widened, args), **kwargs or {})
        return pytree.tree_map(_narrowed, result)


def _is_bf16(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype is torch.bfloat16


def _widened(value: Any) -> Any:
    return value.float() if _is_bf16(value) else value


def _narrowed(value: Any) -> Any:
    return value.bfloat16() if isinstance(value, Tensor) else value
