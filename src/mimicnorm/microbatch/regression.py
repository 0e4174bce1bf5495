"""Warn where a regression loss meets a last BN of the model: the graph is in two parts here, loss and tail."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mimicnorm.layers.regression_loss import reaches, regression_on, warn_of_regression
from mimicnorm.microbatch.heads import Call, WholeBatch
from mimicnorm.microbatch.run import Run


def warn_of_whole(run: Run, heads: dict[Call, WholeBatch], whole: list[Any], leaves: list[Any], loss: Tensor) -> None:
    """Look at the loss of the whole batch.

    Args:
        run: The micro-batches.
        heads: The normalised logits.
        whole: Outputs as the tail makes them of the normalised logits.
        leaves: The same, as the loss got them.
        loss: The loss.
    """
    for (name, _), head in _unseen(run, heads):
        normed = head.normed.grad_fn
        pairs = [(t, leaf) for t, leaf in zip(whole, leaves, strict=True) if isinstance(t, Tensor)]
        _look(name, loss, [leaf for t, leaf in pairs if reaches(t.grad_fn, lambda node, end=normed: node is end)])


def warn_in_pieces(run: Run, heads: dict[Call, WholeBatch], fed: dict[Call, Tensor], loss: Tensor) -> None:
    """Look at the loss of one micro-batch, whose heads were fed these leaves."""
    for call, _ in _unseen(run, heads):
        _look(call[0], loss, [fed[call]])


def _unseen(run: Run, heads: dict[Call, WholeBatch]) -> list[tuple[Call, WholeBatch]]:
    unseen = [(call, head) for call, head in heads.items() if not run.heads[call[0]]._accumulation.loss_was_seen]
    for (name, _), _ in unseen:
        run.heads[name]._accumulation.loss_was_seen = True
    return unseen


def _look(name: str, loss: Tensor, outputs: list[Tensor]) -> None:
    kind = regression_on(loss.grad_fn, lambda node: any(getattr(node, "variable", None) is t for t in outputs))
    if kind:
        warn_of_regression(kind, name)
