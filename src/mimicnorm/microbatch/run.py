"""A batch on its way through a model: the micro-batches with their random states, and the user's loss."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch, join, require_joinable, to_device
from mimicnorm.microbatch.replay import RandomState, accelerators
from mimicnorm.microbatch.trees import Tree

Denominator = float | Tensor | Callable[[Any], float | Tensor]


@dataclass
class Run:
    """The model and its micro-batches, each with the random state it starts from.

    Attributes:
        joins: Whether outputs are put together, so that all must have the same structure.
    """

    model: nn.Module
    inner: nn.Module
    heads: dict[str, LastNorm]
    pieces: list[MicroBatch]
    device: torch.device | None
    joins: bool = True
    starts: list[RandomState] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accelerators = accelerators(self.inner)
        self._trees: dict[int, Tree] = {}

    @property
    def samples(self) -> int:
        return sum(p.size for p in self.pieces)

    def random_state(self) -> RandomState:
        return RandomState.now(self.accelerators)

    def output_of(self, model: nn.Module, piece: MicroBatch, detach: bool = False) -> Any:
        """The model's output for a micro-batch, as it comes."""
        args, kwargs = to_device((piece.args, piece.kwargs), self.device)
        if detach:
            args, kwargs = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs))
        return model(*args, **kwargs)

    def call(self, model: nn.Module, piece: MicroBatch, detach: bool = False) -> list[Any]:
        """The leaves of the model's output for a micro-batch, in the order of the first micro-batch's output."""
        output = self.output_of(model, piece, detach)
        leaves = pytree.tree_leaves(output)
        if not any(isinstance(t, Tensor) for t in leaves):
            raise MicroBatchError(
                f"the model returned a {type(leaves[0]).__name__ if leaves else 'structure'} without tensors in it; "
                "return a tensor, or a tuple, list or dict of tensors"
            )
        if piece.index in self._trees:
            return self._trees[piece.index].leaves(output, f"{piece} when it ran again")
        own = Tree(output, str(piece) if piece.index else "the first micro-batch")
        first = self._trees.get(0, own)
        try:
            leaves, self._trees[piece.index] = first.leaves(output, str(piece)), first
        except MicroBatchError:
            if self.joins:
                raise
            self._trees[piece.index] = own  # nobody puts them together
        return leaves

    def structure(self, leaves: list[Any], piece: MicroBatch | None = None) -> Any:
        """The model's output from its leaves, of a micro-batch or of the whole batch."""
        return self._trees[0 if piece is None else piece.index].structure(leaves)

    def copied(self, leaves: list[Any], piece: MicroBatch | None = None) -> Any:
        """The model's output from its leaves, as copies: a loss may write into them."""
        return self.structure([t.clone() if isinstance(t, Tensor) else t for t in leaves], piece)

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
        for i, (part, like) in enumerate(zip(leaves, first, strict=True)):
            require_joinable(f"output {i} of the model", part, piece, like)


@dataclass
class Loss:
    """The user's loss with its weight: a mean counts by its samples, a sum by nothing.

    Attributes:
        why_whole: Why the loss sees the whole batch, if it might do without.
    """

    loss_fn: Callable[[Any, Any], Tensor]
    targets: Any
    scaler: Any
    weight: float
    is_mean: bool
    why_whole: str = ""

    def __call__(self, outputs: Any, targets: Any, samples: int, where: str) -> tuple[Tensor, Tensor]:
        """(the loss to differentiate, its value)."""
        try:
            loss = self.loss_fn(outputs, targets)
        except Exception as error:
            if self.why_whole:
                error.add_note(f"loss_fn was given the whole batch, because {self.why_whole}")
            raise
        require_one_number(loss, where)
        if not loss.requires_grad:
            raise MicroBatchError("the loss depends on nothing that requires a gradient: is this inside no_grad?")
        if not bool(loss.isfinite()):
            raise NonFiniteError(f"the loss is {loss.item()} for {where}")
        loss = loss * (self.weight * samples if self.is_mean else self.weight)
        return (loss if self.scaler is None else self.scaler.scale(loss)), loss.detach()


def require_one_number(loss: Any, where: str) -> None:
    """Raise for a loss that is not one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise MicroBatchError(
            f"loss_fn must return one number, a mean over samples (or a sum, with denominator=); got {got} for {where}"
        )


def value_of(denominator: Denominator, targets: Any) -> float:
    """What the sum of the losses is divided by."""
    value = denominator(targets) if callable(denominator) else denominator
    number = value.item() if isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) == 1 else value
    if not isinstance(number, Real) or isinstance(number, bool):
        raise MicroBatchError(
            f"denominator: give a number, or a function of the targets that returns one; got {value!r}"
        )
    return float(number)


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
