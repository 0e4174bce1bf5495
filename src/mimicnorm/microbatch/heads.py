"""Stand in for the LastNorms of a model while micro-batches run, and normalise the logits of the whole batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.layers.regression_loss import regression_on, warn_of_regression
from mimicnorm.microbatch.batches import MicroBatch


class Call(NamedTuple):
    """One call of a head in a forward pass."""

    head: str
    number: int


class _Intercept:
    """What a LastNorm calls instead of normalising. One class for all passes, so compiled code stays valid."""

    def __init__(self, name: str, stand_in: Callable[[Call, Tensor], Tensor]):
        self.name, self.stand_in = name, stand_in
        self.calls = 0

    def __call__(self, logits: Tensor) -> Tensor:
        self.calls += 1
        return self.stand_in(Call(self.name, self.calls - 1), logits)


@contextlib.contextmanager
def standing_in(heads: dict[str, LastNorm], stand_in: Callable[[Call, Tensor], Tensor]) -> Iterator[None]:
    """Let ``stand_in(call, logits)`` answer for every head inside."""
    for name, norm in heads.items():
        norm.intercept = _Intercept(name, stand_in)
    try:
        yield
    finally:
        for norm in heads.values():
            norm.intercept = None


class Capture:
    """Stand-in of the first pass: copies the raw logits of one micro-batch and returns them as they are."""

    def __init__(self) -> None:
        self.logits: dict[Call, Tensor] = {}
        self._returned: list[tuple[Tensor, int, Call]] = []

    def __call__(self, call: Call, logits: Tensor) -> Tensor:
        """Copy the logits: what follows the head may write into its output."""
        self.logits[call] = logits.detach().clone()
        self._returned.append((logits, logits._version, call))
        return logits

    def source(self, output: Any) -> Call | None:
        """Return the call that made an output of the model, if nothing has changed it since."""
        return next((c for t, version, c in self._returned if t is output and t._version == version), None)


class WholeBatch:
    """One call of one head over all micro-batches.

    Attributes:
        raw: All logits, (1, classes, values), a leaf of the graph. The values of a class lie side by side, which is
            how fp32 sums lose least.
        raw_parts: The logits of each micro-batch.
        normed_parts: The normalised logits of each, after ``normalise``: leaves, at which the loss is differentiated.
        grads: dL/dlogits of each, after ``backward``.
    """

    normed_parts: list[Tensor]
    grads: list[Tensor]

    def __init__(self, norm: LastNorm, parts: list[Tensor]):
        self.norm, self.dim = norm, norm.dim
        self.shapes = [p.movedim(self.dim, -1).shape for p in parts]
        self.raw = self.joined(parts).requires_grad_()
        self.raw_parts = self.pieces(self.raw)

    def normalise(self, requires_grad: bool = True) -> None:
        """Run the LastNorm, which communicates with the other ranks."""
        # Not a call: hooks on the LastNorm run when the model calls it, once.
        with torch.enable_grad():
            self._normed = self.norm.forward(self.raw.movedim(1, self.dim)).movedim(self.dim, 1)
        self.normed_parts = [p.requires_grad_(requires_grad) for p in self.pieces(self._normed)]

    def backward(self) -> None:
        """Go from the gradients of ``normed_parts`` to ``grads``; this communicates, too.

        The logit scale gets its gradient here, that of the whole batch.
        """
        scale = self.norm.logit_scale
        inputs = [self.raw] if scale is None or not scale.requires_grad else [self.raw, scale]
        of_normed = self.joined([gradient_of(p) for p in self.normed_parts])
        torch.autograd.backward(self._normed, of_normed, inputs=inputs)
        assert self.raw.grad is not None
        self.grads = self.pieces(self.raw.grad)
        self.normed_parts = [p.detach() for p in self.normed_parts]  # without their gradients

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Join what the micro-batches have, in the shape of ``raw``."""
        rows = torch.cat([p.movedim(self.dim, -1).flatten(0, -2) for p in parts])
        return rows.T.contiguous()[None]

    def pieces(self, values: Tensor) -> list[Tensor]:
        """Cut values of the shape of ``raw`` into those of each micro-batch."""
        parts = values.detach()[0].T.split([s[:-1].numel() for s in self.shapes])
        return [p.reshape(s).movedim(-1, self.dim) for p, s in zip(parts, self.shapes, strict=True)]


def gradient_of(t: Tensor) -> Tensor:
    """Return the gradient of a leaf, zeros if nothing depends on it."""
    return torch.zeros_like(t) if t.grad is None else t.grad


def feed(piece: MicroBatch, calls: dict[Call, WholeBatch]) -> Callable[[Call, Tensor], Tensor]:
    """Return the stand-in of the pass for outputs: it gives each head of one micro-batch its normalised logits."""

    def stand_in(call: Call, logits: Tensor) -> Tensor:
        if logits.requires_grad:  # all parameters are frozen in this pass: only another head's output can be it
            raise MicroBatchError(
                f"{call.head}: the logits of this head depend on the normalised output of another LastNorm, so two "
                "passes are not enough. Convert with last_norm=False, or with head= naming one of them"
            )
        return calls[call].normed_parts[piece.index].clone()  # a copy, which the model may write into

    return stand_in


class Replay:
    """Stand-in of the graph pass: gives the known values forward and the known gradient backward.

    It also records how much anything differs from the first time.
    """

    def __init__(self, piece: MicroBatch, calls: dict[Call, WholeBatch]):
        self.piece, self.calls = piece, calls
        self.deviations: dict[str, tuple[Tensor, float]] = {}

    def __call__(self, call: Call, logits: Tensor) -> Tensor:
        """Stand in for the LastNorm."""
        if call not in self.calls:  # activation checkpointing runs the head again, during the backward pass
            if Call(call.head, 1) in self.calls:
                raise MicroBatchError(
                    f"{call.head}: this head is called several times in one forward and recomputed by activation "
                    "checkpointing, so it is not clear which call is recomputed. Leave the head out of the checkpoint"
                )
            call = Call(call.head, 0)
        whole, i = self.calls[call], self.piece.index
        self.compare(f"{call.head}: the logits", logits.detach(), whole.raw_parts[i])
        return _KnownGradient.apply(logits, whole.normed_parts[i], whole.grads[i])

    def compare(self, what: str, now: Tensor, then: Tensor) -> None:
        """Record how far something is from what it was the first time."""
        if now.shape != then.shape or now.dtype != then.dtype:
            raise _differs(what, self.piece, f"in shape or type ({tuple(then.shape)}, now {tuple(now.shape)})")
        if not then.numel():
            return
        off = (now - then).abs().masked_fill((now == then) | (now.isnan() & then.isnan()), 0)  # masks may be -inf
        size = then.abs().nan_to_num(0, 0, 0).amax().clamp_min(torch.finfo(then.dtype).tiny)
        # The same kernels on the same shapes: only atomic sums and compiled fusions differ, by rounding.
        self.deviations[what] = (off.amax() / size).float(), torch.finfo(then.dtype).eps ** 0.5


def require_same(replays: list[Replay]) -> None:
    """Raise if a micro-batch gave something else the second time: its gradient is that of another network."""
    flat = [(r.piece, what, off, allowed) for r in replays for what, (off, allowed) in r.deviations.items()]
    if not flat:
        return
    measured = torch.stack([off.to(flat[0][2].device) for _, _, off, _ in flat]).tolist()  # one synchronisation
    for (piece, what, _, allowed), off in zip(flat, measured, strict=True):
        if not off <= allowed:
            raise _differs(what, piece, f"by {off:.2g} (relative)")


def _differs(what: str, piece: MicroBatch, how: str) -> MicroBatchError:
    return MicroBatchError(
        f"{what} of {piece} differed {how} when it ran the second time, so the model keeps state, branches on values, "
        "or draws random numbers that are not torch's, Python's or NumPy's global ones. The gradients are wrong: "
        "clear them"
    )


class _KnownGradient(torch.autograd.Function):
    """Values and gradient of the LastNorm, both computed before."""

    @staticmethod
    def forward(ctx: Any, _logits: Tensor, value: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_grads: Tensor) -> Any:
        # What arrives from the rest of the model is part of the whole batch's answer already.
        return ctx.grad, None, None


def warn_if_regression(calls: dict[Call, WholeBatch], loss: Tensor) -> None:
    """Warn, once per LastNorm, if a regression loss is computed from its outputs, leaves of the loss's graph."""
    for call, whole in calls.items():
        if whole.norm._accumulation.loss_was_seen:
            continue
        outputs = {id(t) for t in whole.normed_parts}
        kind = regression_on(loss.grad_fn, lambda node, ids=outputs: id(getattr(node, "variable", None)) in ids)
        if kind:
            warn_of_regression(kind, call.head)
    for whole in calls.values():
        whole.norm._accumulation.loss_was_seen = True
