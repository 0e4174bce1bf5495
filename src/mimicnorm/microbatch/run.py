"""A batch on its way through a model: the micro-batches with their random states, and the user's loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch, join, require_joinable, to_device
from mimicnorm.microbatch.replay import RandomState, accelerators


@dataclass
class Run:
    """The model and its micro-batches, each with the random state it starts from."""

    model: nn.Module
    inner: nn.Module
    heads: dict[str, LastNorm]
    pieces: list[MicroBatch]
    device: torch.device | None
    starts: list[RandomState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accelerators = accelerators(self.inner)

    @property
    def samples(self) -> int:
        return sum(p.size for p in self.pieces)

    def random_state(self) -> RandomState:
        return RandomState.now(self.accelerators)

    def call(self, model: nn.Module, piece: MicroBatch, detach: bool = False) -> list[Any]:
        """The leaves of the model's output for a micro-batch; how they hang together goes to ``self.spec``."""
        args, kwargs = to_device((piece.args, piece.kwargs), self.device)
        if detach:
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        leaves, self.spec = pytree.tree_flatten(model(*args, **kwargs))
        if not any(isinstance(t, Tensor) for t in leaves):
            raise MicroBatchError(
                f"the model returned a {type(leaves[0]).__name__ if leaves else 'structure'} without tensors in it; "
                "return a tensor, or a tuple, list or dict of tensors"
            )
        return leaves

    def output(self, leaves: list[Any]) -> Any:
        """The model's output from its leaves, as copies: a loss may write into them."""
        return pytree.tree_unflatten([t.clone() if isinstance(t, Tensor) else t for t in leaves], self.spec)

    def joined(self, parts: list[list[Any]]) -> list[Any]:
        """Leaves of the whole batch from those of the micro-batches."""
        for leaves, piece in zip(parts, self.pieces, strict=True):
            self.require_joinable(leaves, piece, parts[0])
        columns = zip(*parts, strict=True)
        return [
            join(f"output {i} of the model", list(c), self.pieces) if isinstance(c[0], Tensor) else c[0]
            for i, c in enumerate(columns)
        ]

    def require_joinable(self, leaves: list[Any], piece: MicroBatch, first: list[Any]) -> None:
        """Raise if the leaves of a micro-batch and those of the first have no whole."""
        if len(leaves) != len(first):
            raise MicroBatchError(
                f"the model returned {len(leaves)} outputs for {piece} and {len(first)} for the first micro-batch: "
                "return the same from each"
            )
        for i, (part, like) in enumerate(zip(leaves, first, strict=True)):
            require_joinable(f"output {i} of the model", part, piece, like)


@dataclass
class Loss:
    """The user's loss with its weight: a mean counts by its samples, a sum by nothing."""

    loss_fn: Callable[[Any, Any], Tensor]
    targets: Any
    scaler: Any
    weight: float
    is_mean: bool

    def __call__(self, outputs: Any, targets: Any, samples: int, where: str) -> tuple[Tensor, Tensor]:
        """(the loss to differentiate, its value)."""
        loss = self.loss_fn(outputs, targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise MicroBatchError(
                f"loss_fn must return one number, a mean over samples (or a sum, with denominator=); got {got} for "
                f"{where}"
            )
        if not loss.requires_grad:
            raise MicroBatchError("the loss depends on nothing that requires a gradient: is this inside no_grad?")
        if not bool(loss.isfinite()):
            raise NonFiniteError(f"the loss is {loss.item()} for {where}")
        loss = loss * (self.weight * samples if self.is_mean else self.weight)
        return (loss if self.scaler is None else self.scaler.scale(loss)), loss.detach()


@contextlib.contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let a forward pass build no graph for the model's own parameters."""
    learnt = [p for p in model.parameters() if p.requires_grad]
    for p in learnt:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in learnt:
            p.requires_grad_(True)
