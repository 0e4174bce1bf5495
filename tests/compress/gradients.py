"""Gradients of a network with and without compression, and what autograd came to hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.compress import saved_activations


def saved_in(bits: int | None, **settings: Any) -> AbstractContextManager:
    """Compress to so many bits inside; None does nothing."""
    return nullcontext() if bits is None else saved_activations(bits, **settings)


def gradients(
    model: nn.Module, x: Tensor, bits: int | None, loss: Callable[[Any], Tensor] | None = None, **settings: Any
) -> dict[str, Tensor]:
    """The gradient of every parameter, and of the input as "input"."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(0)
    with saved_in(bits, **settings):
        value = (loss or mixed)(model(x * 1))  # not a leaf, as in the middle of a network
    value.backward()
    return {"input": x.grad, **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def mixed(y: Tensor) -> Tensor:
    """A loss with a gradient of its own for every output."""
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return (y * weights).sum() + (y * y).sum() / 7


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    one, other = (torch.cat([g[n].double().flatten() for n in a]) for g in (a, b))
    return torch.nn.functional.cosine_similarity(one, other, dim=0).item()


@contextmanager
def counted() -> Iterator[dict[int, int]]:
    """By address, the bytes of each storage that autograd comes to hold, payloads included: hooks outside of ours."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
