"""Is a loss a mean over samples? Compare the loss of two micro-batches together with their losses apart.

A loss that compares samples with each other, or divides by a weight that differs between micro-batches, gives something
else together than apart: in its value or in its gradient at the outputs. The targets are the actual ones. Where outputs
are not computed yet, mixtures of the first micro-batch's samples are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.layers.last_norm import refused
from mimicnorm.microbatch.batches import MicroBatch, counts_samples, join, mix, tensors_of_all, to_device
from mimicnorm.microbatch.guards import is_inexact
from mimicnorm.microbatch.heads import standing_in
from mimicnorm.microbatch.passes import Run
from mimicnorm.microbatch.replay import full_precision
from mimicnorm.microbatch.snapshot import Snapshot
from mimicnorm.microbatch.trees import leaves, map_tensors

ROUNDING = 2 / 3
"""How much may differ: the machine precision to this power (2.4e-5 in fp32, 3.7e-11 in fp64)."""

IN_PARTS = "this LastNorm is inside loss_fn, where it would see one micro-batch at a time"


class CannotTellError(Exception):
    """A loss cannot be compared: it raises, is not finite, or draws random numbers."""


class HiddenStateError(MicroBatchError):
    """A loss keeps a state that cannot be restored: what it would compute now is wrong."""


def is_plain_cross_entropy(loss_fn: Any, pieces: list[MicroBatch]) -> bool:
    """Whether a loss is torch's own cross entropy, a mean over samples: no weights, and no target is ignored."""
    ignored = -100
    if type(loss_fn) is nn.CrossEntropyLoss:
        hooks = loss_fn._forward_hooks or loss_fn._forward_pre_hooks
        if hooks or loss_fn.weight is not None or loss_fn.reduction != "mean" or "forward" in vars(loss_fn):
            return False
        ignored = loss_fn.ignore_index
    elif loss_fn is not F.cross_entropy:
        return False
    if not all(counts_samples(p.targets, Tensor) and not bool((p.targets == ignored).any()) for p in pieces):
        return False
    return len({len(p.targets) / p.size for p in pieces}) == 1  # a loader may give one per token, and they may differ


@dataclass
class _Samples:
    """Outputs and targets to call a loss with; gradients are compared at ``leaves``, tensors of the outputs."""

    outputs: Any
    targets: Any
    size: int
    name: str
    leaves: list[Tensor]


class LossProbe:
    """Compares micro-batches with the first one.

    Attributes:
        as_sum: Whether the loss has to be a sum over samples, else a mean.
        modules: The modules that the loss can call, without those of the model.
        stateful: Classes of the modules whose state a call of the loss changes.
    """

    _first: _Samples

    def __init__(self, loss_fn: Callable, as_sum: bool, modules: list[nn.Module], run: Run):
        self.loss_fn, self.as_sum, self.modules, self.run = loss_fn, as_sum, modules, run
        self._norms = {str(i): m for i, m in enumerate(modules) if isinstance(m, LastNorm)}
        self._random = run.random_state()
        self.stateful: set[str] = set()

    def begin(self, outputs: Any, piece: MicroBatch) -> None:
        """Take the first micro-batch; whatever its loss raises is raised."""
        self._first = self._samples(outputs, piece.targets, piece.size, str(piece))
        loss, grads = self._evaluate(self._first)
        if not bool(loss.isfinite()):
            raise NonFiniteError(f"the loss is {loss.item()} for {piece}")
        of_all = {id(t) for t in tensors_of_all(self._first.outputs, piece.size)}
        for t, grad in zip(self._first.leaves, grads, strict=True):
            if id(t) in of_all and bool(grad.any()):
                raise CannotTellError(f"it reads an output of shape {tuple(t.shape)}, which does not count the samples")

    def compare(self, targets: Any, size: int, name: str, outputs: Any = None, power: float = ROUNDING) -> str:
        """Compare the first micro-batch with other samples; return what differs by more than eps ** power, or nothing.

        Without outputs, mixtures of the first ones are taken. What cannot be joined with the first micro-batch is
        compared with mixtures of its own samples.
        """
        one = self._first
        other = self._samples(mix(one.outputs, one.size, size) if outputs is None else outputs, targets, size, name)
        both = _both(one, other)
        if both is None:
            one = one if outputs is None else other
            mixed = mix(one.outputs, one.size, one.size)
            other = self._samples(mixed, one.targets, one.size, "mixtures of its samples")
            both = _both(one, other)
        try:
            assert both is not None
            evaluated = [self._evaluate(samples) for samples in (one, other, both)]
        except Exception as error:
            raise CannotTellError(f"it raised {type(error).__name__} for {other.name} ({error})") from error
        shares = [1.0, 1.0] if self.as_sum else [one.size / both.size, other.size / both.size]
        why = _loss_differs(evaluated, shares, both.leaves, power) or _gradient_differs(evaluated, shares, power)
        if not why:
            return ""
        first, again, after_another = (e[0] for e in (evaluated[0], self._evaluate(one), self._evaluate(one, calls=2)))
        if abs(again - first) > _precision(first, ROUNDING) * abs(first):
            raise HiddenStateError(
                f"loss_fn gave {first.item():.6g}, then {again.item():.6g} for the same samples, so it keeps a state "
                "outside of modules. loss_in_pieces=False has it called once, with the whole batch"
            )
        if not torch.equal(first, after_another):
            raise CannotTellError("it draws random numbers")
        return f"{both.name}, {why}"

    def _evaluate(self, samples: _Samples, calls: int = 1) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and its gradient at the outputs, always from the same random state."""
        now, snapshot = self.run.random_state(), Snapshot(self.modules)
        for module in self.modules:  # it would wait for the other ranks
            module.training = module.training and not isinstance(module, nn.SyncBatchNorm)
        try:
            self._random.restore()
            # A LastNorm of the loss sees the batch of all ranks: what is left to compare is what follows it.
            with torch.enable_grad(), refused(IN_PARTS), standing_in(self._norms, lambda _, logits: logits):
                arguments = samples.outputs, samples.targets  # copied, because a loss may write into them
                *_, loss = [self.loss_fn(*map_tensors(Tensor.clone, arguments)) for _ in range(calls)]
            require_one_number(loss, samples.name)
            if not loss.requires_grad or not samples.leaves:
                return loss.detach(), [torch.zeros_like(t) for t in samples.leaves]
            with full_precision(self.run.device):
                grads = torch.autograd.grad(loss, samples.leaves, materialize_grads=True)
            return loss.detach(), list(grads)
        finally:
            self.stateful.update(snapshot.restore())
            now.restore()

    def _samples(self, outputs: Any, targets: Any, size: int, name: str) -> _Samples:
        outputs = map_tensors(lambda t: t.detach().clone().requires_grad_(is_inexact(t)), outputs)
        at = [t for t in leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]
        return _Samples(outputs, to_device(targets, self.run.device), size, name, at)


def require_one_number(loss: Any, where: str) -> None:
    """Raise for a loss that is not one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise MicroBatchError(
            f"loss_fn must return one number, a mean over samples (or a sum, with denominator=); got {got} for {where}"
        )


def _both(one: _Samples, other: _Samples) -> _Samples | None:
    """Join two micro-batches, or return None if they cannot be: other shapes, other values for all samples."""
    sizes = [one.size, other.size]
    try:
        with torch.enable_grad():
            outputs = join([one.outputs, other.outputs], sizes)
        targets = join([one.targets, other.targets], sizes)
    except (MicroBatchError, RuntimeError, TypeError, ValueError):
        return None
    name = f"{one.name} and {other.name} together"
    return _Samples(outputs, targets, sum(sizes), name, one.leaves + other.leaves)


def _loss_differs(evaluated: list[tuple[Tensor, list]], shares: list[float], leaves: list[Tensor], power: float) -> str:
    losses, grads = [loss for loss, _ in evaluated], evaluated[2][1]
    # Terms may cancel in the loss: their size is that of outputs times gradients.
    terms = [(t.detach() * g).abs().sum().to(losses[0]) for t, g in zip(leaves, grads, strict=True)]
    first, second, together, *sizes = torch.stack([t.flatten() for t in (*losses, *terms)]).flatten().tolist()
    apart = shares[0] * first + shares[1] * second
    if not math.isfinite(together + apart):
        raise CannotTellError(f"it is {together:.6g} for two micro-batches together and {apart:.6g} apart")
    if abs(together - apart) <= _precision(losses[2], power) * max(abs(together), abs(first), abs(second), sum(sizes)):
        return ""
    return f"the loss is {together:.6g}, but {apart:.6g} from each by itself"


def _gradient_differs(evaluated: list[tuple[Tensor, list]], shares: list[float], power: float) -> str:
    (_, of_one), (_, of_other), (loss, grads) = evaluated
    apart = [shares[0] * g for g in of_one] + [shares[1] * g for g in of_other]
    largest = max((_largest(g) for g in grads), default=0.0)
    for got, expected in zip(grads, apart, strict=True):
        same = (got == expected) | (got.isnan() & expected.isnan())
        off, scale = _largest((got - expected).masked_fill(same, 0)), max(_largest(got), _largest(expected))
        if not off <= max(_precision(got, power), _precision(loss, power)) * scale + _precision(got, 1) * largest:
            return f"the gradient at the outputs differs by {off / scale:.2g} (relative) from that of each by itself"
    return ""


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _precision(t: Tensor, power: float) -> float:
    return torch.finfo(t.dtype).eps ** power
