"""Is a loss a mean over samples? Compare the loss of two micro-batches together with their losses apart.

Only a mean (or a sum, with a ``denominator``) may be computed one micro-batch at a time. A loss that compares samples
with each other, or divides by a weight that differs between micro-batches, gives something else together than apart:
in its value or in its gradient at the outputs. The targets are the actual ones. Where outputs are not computed yet,
mixtures of the first micro-batch's samples are used. Nothing of this leaves a trace: random generators, and the buffers
and attributes of the modules that a loss calls, are put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.layers.last_norm import refused
from mimicnorm.microbatch.batches import MicroBatch, counts_samples, join, mix, to_device
from mimicnorm.microbatch.guards import is_inexact
from mimicnorm.microbatch.heads import Call, standing_in
from mimicnorm.microbatch.replay import RandomState, full_precision
from mimicnorm.microbatch.snapshot import Snapshot
from mimicnorm.microbatch.trees import leaves, map_leaves

ROUNDING = 2 / 3
"""How much may differ: the machine precision to this power (2.4e-5 in fp32, 3.7e-11 in fp64)."""

IN_PARTS = "this LastNorm is inside loss_fn, where it would see one micro-batch at a time"


class CannotTellError(Exception):
    """A loss cannot be compared: it raises, is not finite, draws random numbers or keeps a state."""


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

    Args:
        loss_fn: The user's loss.
        as_sum: Whether it has to be a sum over samples, else a mean.
        modules: The modules that it can call, without those of the model.
        random_state: Returns the present state of all random generators.
        device: Where the outputs are.

    Attributes:
        stateful: Classes of the modules whose state a call of the loss changes.
    """

    def __init__(
        self,
        loss_fn: Callable,
        as_sum: bool,
        modules: list[nn.Module],
        random_state: Callable[[], RandomState],
        device: torch.device | None,
    ):
        self.loss_fn, self.as_sum, self.modules, self.device = loss_fn, as_sum, modules, device
        self._norms = {str(i): m for i, m in enumerate(modules) if isinstance(m, LastNorm)}
        self._random_state, self._random = random_state, random_state()
        self.stateful: set[str] = set()
        self._first: tuple[_Samples, Tensor, list[Tensor]] | None = None

    def begin(self, outputs: Any, piece: MicroBatch) -> None:
        """Take the first micro-batch; whatever its loss raises is raised."""
        first = self._samples(outputs, piece.targets, piece.size, str(piece))
        self._first = first, *self._evaluate(first)
        if not bool(self._first[1].isfinite()):
            raise NonFiniteError(f"the loss is {self._first[1].item()} for {piece}")

    def compare(self, piece: MicroBatch, outputs: Any, power: float) -> str:
        """Compare the first micro-batch with another one; return what differs, or nothing.

        Args:
            piece: The other one.
            outputs: Its outputs.
            power: The machine precision to this power may differ.
        """
        actual = self._samples(outputs, piece.targets, piece.size, str(piece))
        return self._compare(actual, actual, power)

    def compare_targets(self, targets: Any, size: int, name: str) -> str:
        """Compare the first micro-batch with mixtures of its samples that have other targets."""
        assert self._first is not None
        return self._compare(self._mixed(self._first[0], targets, size, name), self._first[0], ROUNDING)

    def _compare(self, other: _Samples, actual: _Samples, power: float) -> str:
        """Compare the first micro-batch with another one or, if they cannot be joined, ``actual`` with itself."""
        assert self._first is not None
        one, loss_of_one, grads_of_one = self._first
        try:
            both = _both(one, other)
            if both is None:
                one = actual
                loss_of_one, grads_of_one = self._evaluate(one)
                other = self._mixed(one, one.targets, one.size, "mixtures of its samples")
                both = _both(one, other)
                assert both is not None
            loss_of_other, grads_of_other = self._evaluate(other)
            together, grads = self._evaluate(both)
        except Exception as error:
            raise CannotTellError(f"it raised {type(error).__name__} for {other.name} ({error})") from error
        shares = [1.0, 1.0] if self.as_sum else [one.size / both.size, other.size / both.size]
        apart = [share * g for share, part in zip(shares, (grads_of_one, grads_of_other), strict=True) for g in part]
        why = _loss_differs(together, [loss_of_one, loss_of_other], shares, both.leaves, grads, power)
        why = why or _gradient_differs(grads, apart, together, power)
        if why and not torch.equal(self._evaluate(one)[0], self._evaluate(one, calls=2)[0]):
            raise CannotTellError("it draws random numbers or keeps a state")
        return f"{both.name}, {why}" if why else ""

    def _evaluate(self, samples: _Samples, calls: int = 1) -> tuple[Tensor, list[Tensor]]:
        """Return the loss and its gradient at the outputs, always from the same random state."""
        now, snapshot = self._random_state(), Snapshot(self.modules)
        for module in self.modules:  # it would wait for the other ranks
            module.training = module.training and not isinstance(module, nn.SyncBatchNorm)
        try:
            self._random.restore()
            # A LastNorm of the loss sees the batch of all ranks: what is left to compare is what follows it.
            with torch.enable_grad(), refused(IN_PARTS), standing_in(self._norms, _unchanged):
                losses = [self.loss_fn(*map_leaves(_copy, (samples.outputs, samples.targets))) for _ in range(calls)]
            loss = losses[-1]
            require_one_number(loss, samples.name)
            if not loss.requires_grad or not samples.leaves:
                return loss.detach(), [torch.zeros_like(t) for t in samples.leaves]
            with full_precision(self.device):
                grads = torch.autograd.grad(loss, samples.leaves, materialize_grads=True)
            return loss.detach(), list(grads)
        finally:
            self.stateful.update(snapshot.restore())
            now.restore()

    def _samples(self, outputs: Any, targets: Any, size: int, name: str) -> _Samples:
        def leaf(t: Any) -> Any:
            return t.detach().clone().requires_grad_(is_inexact(t)) if isinstance(t, Tensor) else t

        outputs = map_leaves(leaf, outputs)
        at = [t for t in leaves(outputs) if counts_samples(t, Tensor) and t.requires_grad]
        return _Samples(outputs, to_device(targets, self.device), size, name, at)

    def _mixed(self, like: _Samples, targets: Any, size: int, name: str) -> _Samples:
        return self._samples(mix(like.outputs, like.size, size), targets, size, name)


def require_one_number(loss: Any, where: str) -> None:
    """Raise for a loss that is not one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise MicroBatchError(
            f"loss_fn must return one number, a mean over samples (or a sum, with denominator=); got {got} for {where}"
        )


def _copy(t: Any) -> Any:
    return t.clone() if isinstance(t, Tensor) else t  # a loss may write into its arguments


def _unchanged(_call: Call, logits: Tensor) -> Tensor:
    return logits


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


def _loss_differs(
    together: Tensor, parts: list[Tensor], shares: list[float], leaves: list[Tensor], grads: list[Tensor], power: float
) -> str:
    # Terms may cancel in the loss: their size is that of outputs times gradients.
    terms = sum(((t.detach() * g).abs().sum() for t, g in zip(leaves, grads, strict=True)), torch.zeros_like(together))
    whole, first, second, size = torch.stack([together, *parts, terms.to(together)]).flatten().tolist()
    apart = shares[0] * first + shares[1] * second
    if not math.isfinite(whole + apart):
        raise CannotTellError(f"it is {whole:.6g} for two micro-batches together and {apart:.6g} apart")
    if abs(whole - apart) <= _precision(together, power) * max(abs(whole), abs(first), abs(second), size):
        return ""
    return f"the loss is {whole:.6g}, but {apart:.6g} from each by itself"


def _gradient_differs(together: list[Tensor], apart: list[Tensor], loss: Tensor, power: float) -> str:
    largest = max((_largest(g) for g in together), default=0.0)
    for got, expected in zip(together, apart, strict=True):
        same = (got == expected) | (got.isnan() & expected.isnan())
        off, scale = _largest((got - expected).masked_fill(same, 0)), max(_largest(got), _largest(expected))
        if not off <= max(_precision(got, power), _precision(loss, power)) * scale + _precision(got, 1) * largest:
            return f"the gradient at the outputs differs by {off / scale:.2g} (relative) from that of each by itself"
    return ""


def _largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.numel() else 0.0


def _precision(t: Tensor, power: float) -> float:
    return torch.finfo(t.dtype).eps ** power
