"""Is a loss a mean over samples? Compare the loss of two micro-batches together with their losses apart.

Only a mean (or a sum, with a ``denominator``) may be computed one micro-batch at a time. A loss that compares samples
with each other, or divides by a weight that differs between micro-batches, gives something else together than apart:
in its value or in its gradient at the outputs. The targets are the actual ones. Outputs that are not there yet are
stood in for by mixtures of samples that are, and compared once more when they are there. Nothing of this leaves a
trace: random generators, and the buffers and attributes of the modules that a loss calls, are put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.layers.last_norm import refused
from mimicnorm.microbatch.batches import MicroBatch, resampled, side_by_side, to_device
from mimicnorm.microbatch.guards import BufferGuard
from mimicnorm.microbatch.heads import is_inexact, standing_in
from mimicnorm.microbatch.journal import Journal, modules_in
from mimicnorm.microbatch.known_losses import Verdict, unwrapped
from mimicnorm.microbatch.replay import full_precision
from mimicnorm.microbatch.run import Run, require_one_number

ROUNDING = 2 / 3
"""What may differ: the machine precision to this power (2.4e-5 in fp32, 3.7e-11 in fp64)."""


class CannotTellError(Exception):
    """A loss cannot be compared: it raises, is not finite, draws random numbers or keeps a state."""


@dataclass
class _Samples:
    """Outputs and targets; ``leaves`` are the tensors of the outputs at which gradients are compared."""

    outputs: Any
    targets: Any
    size: int
    name: str
    leaves: list[Tensor]

    def copies(self) -> tuple[Any, Any]:
        """What a loss may write into."""
        return pytree.tree_map_only(Tensor, Tensor.clone, (self.outputs, self.targets))


@dataclass
class _Result:
    loss: Tensor
    grads: dict[Tensor, Tensor]


class LossProbe:
    """Compares micro-batches with the first.

    Args:
        run: The micro-batches.
        loss_fn: The user's loss.
        as_sum: Whether it has to be a sum over samples, else a mean.
        foreign: Targets of another rank, and their number of samples.

    Attributes:
        stateful: Names of modules whose state a call of the loss changes.
    """

    def __init__(self, run: Run, loss_fn: Callable, as_sum: bool, foreign: tuple[Any, int] | None = None):
        self.run, self.loss_fn, self.as_sum, self.foreign = run, loss_fn, as_sum, foreign
        loss = unwrapped(loss_fn)[0]
        owner = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
        self._owner = owner if isinstance(owner, nn.Module) else nn.Module()
        self._norms = {str(i): m for i, m in enumerate(self._owner.modules()) if isinstance(m, LastNorm)}
        self._modules = modules_in(loss_fn)
        self._random = run.random_state()
        self.stateful: set[str] = set()
        self._first: _Samples | None = None
        self._of_first: _Result | None = None

    def begin(self, outputs: Any, piece: MicroBatch) -> None:
        """Take the outputs of the first micro-batch; whatever its loss raises is raised."""
        self._first = self._samples(outputs, piece)
        self._of_first = self._evaluate(self._first)
        _require_finite(self._of_first, self._first)

    def compare(self, outputs: Any, piece: MicroBatch, power: float = ROUNDING) -> Verdict:
        """Compare the first micro-batch with another; ``power`` of the machine precision may differ."""
        other = self._samples(outputs, piece)
        return self._compare(other, other, power)

    def compare_all(self) -> Verdict:
        """Compare the first micro-batch with all others before their outputs are there."""
        assert self._first is not None
        outputs, size = self._first.outputs, self._first.size
        if size == 1 and len(self.run.pieces) > 1:  # of a single sample, there is no mixture
            second = self.run.pieces[1]
            with contextlib.suppress(MicroBatchError, RuntimeError), torch.no_grad():  # other shapes than the first
                outputs = side_by_side([outputs, tried(self.run, second)], [1, second.size])
                size += second.size
        for piece in self.run.pieces[1:]:
            verdict = self._compare(self._mixed(outputs, size, piece.targets, piece.size, str(piece)))
            if not verdict.in_pieces:
                return verdict
        return self.compare_foreign()

    def compare_foreign(self) -> Verdict:
        """Compare the first micro-batch with that of another rank."""
        if self.foreign is None:
            return Verdict(True)
        assert self._first is not None
        name = "the first micro-batch of rank 0"
        return self._compare(self._mixed(self._first.outputs, self._first.size, *self.foreign, name))

    def _compare(self, other: _Samples, actual: _Samples | None = None, power: float = ROUNDING) -> Verdict:
        """Compare; ``actual`` is the other micro-batch if its outputs are its own, not mixtures of the first's."""
        assert self._first is not None
        assert self._of_first is not None
        one, of_one, both = self._first, self._of_first, _both(self._first, other)
        try:
            if both is None:  # no whole batch can be made of them: compare the samples of one by themselves
                one = actual or self._first
                of_one = self._evaluate(one)
                other = self._mixed(one.outputs, one.size, one.targets, one.size, "mixtures of its samples")
                both = _both(one, other)
                assert both is not None
            of_other, of_both = self._evaluate(other), self._evaluate(both)
        except Exception as error:
            raise CannotTellError(f"it raised {type(error).__name__} for {other.name} ({error})") from error
        if actual is not None:
            _require_finite(of_other if other is actual else of_one, actual)
        shares = [1.0, 1.0] if self.as_sum else [one.size / both.size, other.size / both.size]
        why = _difference(list(zip((of_one, of_other), shares, strict=True)), of_both, power)
        if why and not torch.equal(self._evaluate(one).loss, self._evaluate(one, calls=2).loss):
            raise CannotTellError("it draws random numbers or keeps a state")
        return Verdict(not why, f"{both.name}, {why}" if why else "")

    def _evaluate(self, samples: _Samples, calls: int = 1) -> _Result:
        """The loss and its gradient at the outputs, always from the same random state."""
        now, journal = self.run.random_state(), Journal()
        journal.note(self._modules, self.run.inner)
        for module in self._owner.modules():  # it would wait for the other ranks
            module.training = module.training and not isinstance(module, nn.SyncBatchNorm)
        # A LastNorm that the loss owns sees the batch of all ranks: what is left to compare is what follows it.
        part = "this LastNorm is inside loss_fn, where it would see one micro-batch at a time"
        try:
            self._random.restore()
            with torch.enable_grad(), refused(part), standing_in(self._norms, _unchanged):
                for _ in range(calls - 1):
                    self.loss_fn(*samples.copies())
                loss = self.loss_fn(*samples.copies())
            require_one_number(loss, samples.name)
            if not loss.requires_grad or not samples.leaves:
                return _Result(loss.detach(), {})
            with full_precision(self.run.device):
                grads = torch.autograd.grad(loss, samples.leaves, allow_unused=True)
        finally:
            self.stateful.update(journal.put_back())
            now.restore()
        return _Result(loss.detach(), {t: g for t, g in zip(samples.leaves, grads, strict=True) if g is not None})

    def _samples(self, outputs: Any, piece: MicroBatch) -> _Samples:
        def leaf(t: Tensor) -> Tensor:
            return t.detach().clone().requires_grad_(is_inexact(t))

        outputs = pytree.tree_map_only(Tensor, leaf, outputs)
        return _Samples(outputs, to_device(piece.targets, self.run.device), piece.size, str(piece), _leaves(outputs))

    def _mixed(self, outputs: Any, size: int, targets: Any, wanted: int, name: str) -> _Samples:
        outputs = resampled(outputs, size, wanted)
        return _Samples(outputs, to_device(targets, self.run.device), wanted, name, _leaves(outputs))


def tried(run: Run, piece: MicroBatch) -> Any:
    """The model's output for a micro-batch, without a graph and without a trace."""
    now, guard = run.random_state(), BufferGuard(run.inner)
    args, kwargs = pytree.tree_map_only(Tensor, Tensor.clone, (piece.args, piece.kwargs))  # it may write into them
    with torch.no_grad():
        outputs = run.output_of(run.inner, replace(piece, args=args, kwargs=kwargs))
    guard.require_unchanged(piece)
    torch.clear_autocast_cache()  # weights that were cast without a graph must not serve a pass with one
    now.restore()
    return outputs


def _unchanged(_name: str, _call: int, logits: Tensor) -> Tensor:
    return logits


def _leaves(outputs: Any) -> list[Tensor]:
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.requires_grad]


def _require_finite(result: _Result, samples: _Samples) -> None:
    if not bool(result.loss.isfinite()):
        raise NonFiniteError(f"the loss is {result.loss.item()} for {samples.name}")


def _both(one: _Samples, other: _Samples) -> _Samples | None:
    """Two micro-batches as one, or None if they have no whole: other shapes, other values for all samples."""
    sizes = [one.size, other.size]
    try:
        with torch.enable_grad():
            outputs = side_by_side([one.outputs, other.outputs], sizes)
        targets = side_by_side([one.targets, other.targets], sizes)
    except (MicroBatchError, RuntimeError, TypeError, ValueError):
        return None
    leaves = list({id(t): t for t in one.leaves + other.leaves}.values())
    return _Samples(outputs, targets, sum(sizes), f"{one.name} and {other.name} together", leaves)


def _difference(parts: list[tuple[_Result, float]], both: _Result, power: float) -> str:
    """How the loss together differs from that of the parts, each with its share, or nothing."""
    losses = [float(part.loss) for part, _ in parts]
    together, apart = float(both.loss), sum(share * loss for (_, share), loss in zip(parts, losses, strict=True))
    if not math.isfinite(together + apart):
        raise CannotTellError(f"it is {together:.6g} for two micro-batches together and {apart:.6g} apart")
    # Terms may cancel in the value: their size is that of outputs times gradients.
    terms = sum(float((t.detach() * g).abs().sum()) for t, g in both.grads.items())
    size = max(abs(together), *map(abs, losses), terms)
    if abs(together - apart) > _precision(both.loss, power) * size:
        return f"the loss is {together:.6g}, but {apart:.6g} from each by itself"
    largest = max((_largest(g) for g in both.grads.values()), default=0.0)
    for t in {id(t): t for result in (both, *(part for part, _ in parts)) for t in result.grads}.values():
        got, expected = both.grads.get(t, torch.zeros_like(t)), torch.zeros_like(t)
        for part, share in parts:
            expected = expected + share * part.grads[t] if t in part.grads else expected
        same = (got == expected) | (got.isnan() & expected.isnan())
        off, scale = _largest((got - expected).masked_fill(same, 0)), max(_largest(got), _largest(expected))
        if not off <= max(_precision(t, power), _precision(both.loss, power)) * scale + _precision(t, 1) * largest:
            return f"the gradient at the outputs differs by {off / scale:.2g} (relative) from that of each by itself"
    return ""


def _largest(t: Tensor) -> float:
    return float(t.detach().abs().max()) if t.numel() else 0.0


def _precision(t: Tensor, power: float) -> float:
    return torch.finfo(t.dtype).eps ** power
