"""Stand in for the LastNorms of a model while micro-batches run: note their logits, hand out what they would give."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch

Call = tuple[str, int]
"""A head's name and which of its calls in one forward pass."""


class StandIn:
    """What a LastNorm calls instead of normalising. One class for all passes, so compiled code stays valid."""

    def __init__(self, name: str, behaviour: Any):
        self.name = name
        self.behaviour = behaviour
        self.calls = 0

    def __call__(self, logits: Tensor) -> Tensor:
        """Count the call and pass it on."""
        self.calls += 1
        return self.behaviour(self.name, self.calls - 1, logits)


@contextlib.contextmanager
def standing_in(heads: dict[str, LastNorm], behaviour: Any) -> Iterator[None]:
    """Let ``behaviour(name, call, logits)`` answer for every head inside."""
    for name, norm in heads.items():
        norm.intercept = StandIn(name, behaviour)
    try:
        yield
    finally:
        for norm in heads.values():
            norm.intercept = None


class Capture:
    """Keeps the raw logits of one micro-batch and returns them as they are."""

    def __init__(self) -> None:
        self.logits: dict[Call, Tensor] = {}
        self._returned: list[tuple[Tensor, int, Call]] = []

    def __call__(self, name: str, call: int, logits: Tensor) -> Tensor:
        """Note a copy: what follows the head may write into its output."""
        self.logits[name, call] = logits.detach().clone()
        self._returned.append((logits, logits._version, (name, call)))
        return logits

    def source(self, output: Any) -> Call | None:
        """Which call an output of the model is the untouched result of, if any."""
        return next((c for t, version, c in self._returned if t is output and t._version == version), None)


class WholeBatch:
    """One call of one head over all micro-batches: raw logits in, normalised logits out, both in pieces.

    Attributes:
        raw: All logits, (1, classes, values), a leaf of the graph. The values of a class lie side by side, which is
            how fp32 sums lose least.
        normed: What the LastNorm makes of them.
    """

    def __init__(self, norm: LastNorm, parts: list[Tensor]):
        self.dim = norm.dim
        self.shapes = [p.movedim(self.dim, -1).shape for p in parts]
        self.raw = self.joined(parts).requires_grad_()
        # Not a call: hooks on the LastNorm run when the model calls it, once.
        self.normed = norm.forward(self.raw.movedim(1, self.dim)).movedim(self.dim, 1)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Pieces as the micro-batches had them, in the shape of ``raw``."""
        rows = torch.cat([p.movedim(self.dim, -1).flatten(0, -2) for p in parts])
        return rows.T.contiguous()[None]

    def pieces(self, values: Tensor) -> list[Tensor]:
        """Values of all classes, shaped like ``raw``, as the micro-batches had them."""
        parts = values[0].T.split([s[:-1].numel() for s in self.shapes])
        return [p.reshape(s).movedim(-1, self.dim) for p, s in zip(parts, self.shapes, strict=True)]


class Feed:
    """Gives each head of one micro-batch its normalised logits, still attached to the whole batch's graph."""

    def __init__(self, normed: dict[Call, Tensor]):
        self.normed = normed

    def __call__(self, name: str, call: int, logits: Tensor) -> Tensor:
        """Return a copy, which the model may write into."""
        if logits.requires_grad:  # all parameters are frozen in this pass: only another head's output can be it
            raise MicroBatchError(
                f"{name}: the logits of this head depend on the normalised output of another LastNorm, so two "
                "passes are not enough. Convert with last_norm=False, or with head= naming one of them"
            )
        return self.normed[name, call].clone()


class Replay:
    """Gives the normalised logits forward and the known gradient backward; watches that nothing has changed."""

    def __init__(
        self, piece: MicroBatch, raw: dict[Call, Tensor], normed: dict[Call, Tensor], grads: dict[Call, Tensor]
    ):
        self.piece = piece
        self.raw, self.normed, self.grads = raw, normed, grads
        self.deviations: dict[str, tuple[Tensor, float]] = {}

    def __call__(self, name: str, call: int, logits: Tensor) -> Tensor:
        """Stand in for the LastNorm in the pass with a graph."""
        key = (name, call)
        if key not in self.raw:  # activation checkpointing runs the head again, during the backward pass
            if (name, 1) in self.raw:
                raise MicroBatchError(
                    f"{name}: this head is called several times in one forward and recomputed by activation "
                    "checkpointing, so its calls cannot be told apart. Leave the head out of the checkpoint"
                )
            key = (name, 0)
        self.compare(f"{name}: the logits", logits.detach(), self.raw[key])
        return _KnownGradient.apply(logits, self.normed[key], self.grads.get(key))

    def compare(self, what: str, now: Tensor, then: Tensor) -> None:
        """Note how far something is from what it was the first time."""
        if now.shape != then.shape or now.dtype != then.dtype:
            raise _differs(what, self.piece, f"in shape or type ({tuple(then.shape)}, now {tuple(now.shape)})")
        if not then.numel():
            return
        off = (now - then).abs().masked_fill((now == then) | (now.isnan() & then.isnan()), 0)  # masks may be -inf
        size = then.abs().nan_to_num(0, 0, 0).amax().clamp_min(torch.finfo(then.dtype).tiny)
        # The same kernels on the same shapes: only atomic sums and compiled fusions differ, by rounding.
        self.deviations[what] = (off.amax() / size).double(), torch.finfo(then.dtype).eps ** 0.5


def require_same(replays: list[Replay]) -> None:
    """Raise if a micro-batch gave something else the second time: its gradient is that of another network."""
    flat = [(r.piece, what, off, allowed) for r in replays for what, (off, allowed) in r.deviations.items()]
    if not flat:
        return
    for (piece, what, _, allowed), off in zip(flat, torch.stack([d for _, _, d, _ in flat]).tolist(), strict=True):
        if not off <= allowed:
            raise _differs(what, piece, f"by {off:.2g} (relative)")


def _differs(what: str, piece: MicroBatch, how: str) -> MicroBatchError:
    return MicroBatchError(
        f"{what} of {piece} differed {how} when it ran the second time, so the model keeps state, branches on values, "
        "or draws random numbers that are not torch's, Python's or NumPy's global ones. The gradients are wrong: "
        "clear them"
    )


def is_inexact(t: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return t.is_floating_point() or t.is_complex()


class _KnownGradient(torch.autograd.Function):
    """Values and gradient of the LastNorm, both computed before.

    The output stays attached to the logits, so that DistributedDataParallel finds every parameter in use.
    """

    @staticmethod
    def forward(ctx: Any, _logits: Tensor, value: Tensor, grad: Tensor | None) -> Tensor:
        ctx.grad = grad
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        # What arrives from the rest of the model is part of the whole batch's answer already.
        return ctx.grad, None, None
