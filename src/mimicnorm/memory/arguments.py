"""What callers pass to ``measure`` and its like, checked before anything is tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from mimicnorm.errors import MemoryPredictionError

Loss = Callable[[Any], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Settings(TypedDict, total=False):
    """What kind of step: arguments of ``measure`` that ``largest_batch`` and ``compare`` take, too."""

    loss: Loss | None
    optimizer: str | MakeOptimizer | None
    autocast: torch.dtype | None
    fake: bool
    device: str | torch.device | None


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
}
_HALVES = (torch.bfloat16, torch.float16)


def require_module(model: Any) -> None:
    """Raise if the model is not an ``nn.Module``."""
    if not isinstance(model, nn.Module):
        raise MemoryPredictionError(f"the model is a {type(model).__name__}: give an nn.Module")


def require_count(name: str, given: Any, otherwise: str) -> None:
    """Raise for a number of samples that does not count; None is ``otherwise``."""
    if given is not None and (not isinstance(given, Integral) or isinstance(given, bool) or given < 1):
        raise MemoryPredictionError(
            f"{name}={given!r}: give a whole number of samples from 1 on, or None for {otherwise}"
        )


def require_bool(name: str, given: Any) -> None:
    """Raise for what would pass as true or false without being either."""
    if not isinstance(given, bool):
        raise MemoryPredictionError(f"{name}={given!r}: give True or False")


def require_autocast(dtype: Any, device_type: str) -> None:
    """Raise for a type in which autocast does not run on a device: torch would warn and run without autocast."""
    if dtype is None:
        return
    if dtype not in _HALVES:
        raise MemoryPredictionError(
            f"autocast={dtype!r}: autocast runs in torch.bfloat16 or torch.float16; give one of them, or None for no "
            "autocast"
        )
    if not torch.amp.is_autocast_available(device_type):
        raise MemoryPredictionError(
            f"autocast={dtype!r}: there is no autocast on {device_type}, where the model is. Move the model to the CPU "
            "or a GPU, or give None"
        )


def predicted_device(device: Any, model: nn.Module, fake: bool) -> str:
    """The type of the device that a prediction is for: the model's own, unless another is given.

    A step on fake tensors of the CPU predicts one of a GPU, too, without what only the CPU's kernels allocate.
    """
    own = next((p.device.type for p in model.parameters()), "cpu")
    if device is None:
        return own
    try:
        wanted = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise MemoryPredictionError(f"device={device!r} is not a device: give 'cpu', 'cuda' or None") from error
    if wanted == own or (fake and own in ("cpu", "meta") and wanted not in ("cpu", "meta")):
        return wanted
    why = "" if fake else ", and fake=False runs the step where the model is"
    raise MemoryPredictionError(
        f"device={device!r}, but the model is on {own}{why}: move it first, model.to({wanted!r}), or give None"
    )


def fit_loss(loss: Any) -> Loss:
    """Return a loss, unless it cannot be called with the output alone, as a criterion that wants targets."""
    if loss is None:
        return default_loss
    if not callable(loss):
        raise MemoryPredictionError(
            f"loss={loss!r}: give a function from the model's output to a scalar, such as "
            "lambda output: criterion(output, targets), or None"
        )
    try:
        plain = getattr(loss, "_orig_mod", loss)
        signature = inspect.signature(plain.forward if isinstance(plain, nn.Module) else plain)
    except (TypeError, ValueError):  # written in C
        return loss
    try:
        signature.bind(None)
    except TypeError as error:
        raise MemoryPredictionError(
            f"the loss cannot be called with the model's output alone ({error}): give "
            "loss=lambda output: criterion(output, targets)"
        ) from error
    return loss


def default_loss(output: Any) -> Tensor:
    """Make a scalar of any output: cross entropy where there are classes, a sum elsewhere.

    Example:
        >>> default_loss({"logits": torch.zeros(5, 2, requires_grad=True)}).item()
        0.6931471824645996
    """
    terms = [
        F.cross_entropy(leaf, leaf.new_zeros((leaf.shape[0], *leaf.shape[2:]), dtype=torch.long))
        if leaf.dim() > 1
        else leaf.sum()
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not terms:
        raise MemoryPredictionError(
            f"the output ({type(output).__name__}) has no tensor that requires a gradient, so there is nothing "
            "to train: give loss=, a function from the output to a scalar"
        )
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def optimizer_maker(optimizer: str | MakeOptimizer | None) -> MakeOptimizer | None:
    """A function from parameters to an optimizer, from its name or from itself."""
    if optimizer is None or callable(optimizer):
        return optimizer
    if isinstance(optimizer, torch.optim.Optimizer):
        raise MemoryPredictionError(
            f"optimizer is {type(optimizer).__name__} made for the model's own parameters, but the step is tried on a "
            f"copy: give a function from parameters to an optimizer, lambda p: {type(optimizer).__name__}(p, ...)"
        )
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise MemoryPredictionError(
            f"optimizer {optimizer!r} is not known: give one of {', '.join(map(repr, OPTIMIZERS))}, None, or a "
            "function from parameters to an optimizer"
        )
    return OPTIMIZERS[optimizer]
