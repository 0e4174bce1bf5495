"""Find a regression loss on the outputs of a last BN, in the autograd graph of the loss.

A last BN gives every output mean 0 and variance 1 over the batch. Class scores are compared with each other, so they
lose little by that; a regression compares each output with a number, which it can no longer reach.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Node = Any
"""A node of the autograd graph."""

_LOSSES = {"MseLoss": "mean square error", "SmoothL1Loss": "smooth L1", "HuberLoss": "Huber"}
_OF_DIFFERENCES = {"Abs": "L1", "Pow": "squared difference"}
_DIFFERENCES = {"Sub", "Rsub"}
# Probabilities may be compared with numbers, and after another layer the outputs are no longer those of the last BN.
_PROBABILITIES = {"Softmax", "LogSoftmax", "Sigmoid", "LogSigmoid", "Logsumexp", "Exp"}
_CLASS_LOSSES = {"NllLoss", "NllLoss2D", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}
_LAYERS = {"Addmm", "Mm", "Bmm", "Baddbmm", "Convolution", "Embedding"}


class RegressionLossWarning(UserWarning):
    """A regression loss is trained through a last BN, which belongs on class scores."""


def warn_of_regression(kind: str, head: str) -> None:
    """Warn of a regression loss of some kind on the last BN of a head."""
    warnings.warn(
        f"{head}: a regression loss ({kind}) is computed from the outputs of a last BN. A last BN gives each output "
        "mean 0 and variance 1 over the batch, whatever the targets are, so it belongs on class scores only. For "
        "regression, convert with last_norm=False",
        RegressionLossWarning,
        stacklevel=3,
    )


def regression_on(loss: Node, is_output: Callable[[Node], bool]) -> str | None:
    """Name the regression loss that compares raw outputs with something else, or return None.

    To compare outputs with each other (consistency of two views, distance from their mean) is not a regression.
    """
    for node in nodes_from(loss, is_output):
        name, operands = _name(node), [node]
        kind = _LOSSES.get(name)
        if name in _OF_DIFFERENCES and (name != "Pow" or node._saved_exponent == 2):
            operands = _inputs(node)
            while operands and _name(operands[0]) == "ToCopy":
                operands = _inputs(operands[0])
            kind = _OF_DIFFERENCES[name] if operands and _name(operands[0]) in _DIFFERENCES else None
        if kind and sum(reaches(n, is_output) for n in _inputs(operands[0])) == 1:
            return kind
    return None


def reaches(node: Node, is_output: Callable[[Node], bool]) -> bool:
    """Whether a tensor is made of outputs without anything on the way that makes probabilities of them."""
    ends = _PROBABILITIES | _CLASS_LOSSES | _LAYERS
    return any(is_output(n) for n in nodes_from(node, lambda n: is_output(n) or _name(n) in ends))


def losses_under_way() -> list[Node]:
    """What is being differentiated, seen from a hook in the backward pass.

    On accelerators a hook runs in a thread of its own, so the frames of all threads are searched.
    """
    engine = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if engine is None:
        return []
    # No variable of this function may refer to a frame: its own is among them, and the cycle would keep the loss alive.
    return [
        t.grad_fn
        for innermost in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(innermost)
        if frame.f_code is engine.__code__
        for t in frame.f_locals.get("t_outputs", ())
        if isinstance(t, Tensor)
    ]


def nodes_from(start: Node, ends: Callable[[Node], bool] = lambda _: False) -> Iterator[Node]:
    """All nodes from one on, towards the leaves, the nearest first; nothing beyond a node that ``ends``."""
    queue, seen = deque([start]), set()
    while queue:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if not ends(node):
            queue += _inputs(node)


def _inputs(node: Node) -> list[Node]:
    return [n for n, _ in node.next_functions if n is not None]


def _name(node: Node) -> str:
    return node.name().partition("Backward")[0]
