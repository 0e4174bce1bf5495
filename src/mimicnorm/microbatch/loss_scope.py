"""What the loss sees: the whole batch, or one micro-batch at a time where that is exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.layers.last_norm import refused, world_size
from mimicnorm.microbatch.batches import MicroBatch, join_targets, to_device
from mimicnorm.microbatch.left_behind import LeftBehind, LeftBehindError
from mimicnorm.microbatch.passes import Run
from mimicnorm.microbatch.probe_loss import (
    IN_PARTS,
    ROUNDING,
    CannotTellError,
    HiddenStateError,
    LossProbe,
    is_plain_cross_entropy,
    require_one_number,
)
from mimicnorm.microbatch.trees import leaves

_DENOMINATOR = "Let loss_fn return a sum over samples and give what to divide by: denominator=lambda targets: ..."


class WholeBatchNeededError(Exception):
    """The loss is not a mean over samples, or cannot be shown to be one: it has to see the whole batch."""


class LossScope:
    """The user's loss, and how many passes it takes.

    Attributes:
        asked: ``loss_in_pieces`` as given to ``backward``.
        confined: Why the loss cannot see the whole batch, or nothing if it can.
        two_passes: Whether a pass without a graph comes first.
        in_pieces: Whether the loss sees one micro-batch at a time.
        probe: Compares the loss with itself, where it is to be computed in parts.
        weight: The factor of each loss, or with means of each sample.
        foreign: The first targets of rank 0, and their number of samples.
        left: What the forward passes left outside of the model's output.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Tensor],
        run: Run,
        modules: list[nn.Module],
        as_sum: bool,
        loss_in_pieces: bool | None,
        scaler: Any,
    ):
        self.loss_fn, self.run, self.asked, self.scaler = loss_fn, run, loss_in_pieces, scaler
        self.kind = "sum" if as_sum else "mean"
        normalises = any(isinstance(m, LastNorm) and m.training for m in modules)
        if loss_in_pieces and normalises:
            raise MicroBatchError("loss_in_pieces=True: this loss normalises over the batch, so it must see it whole")
        self.confined = "loss_in_pieces=True" if loss_in_pieces else "several ranks" if world_size() > 1 else ""
        self.two_passes = bool(run.heads) or normalises or loss_in_pieces is False
        self.in_pieces = bool(loss_in_pieces) or not self.two_passes
        self.why_whole, self.weight = "", 1.0
        self.foreign: tuple[Any, int] | None = None
        self.left = LeftBehind(run.model, loss_fn)
        alone = world_size() == 1 and len(run.pieces) == 1
        probed = not alone and (bool(self.confined) or not self.two_passes)
        self.probe = LossProbe(loss_fn, as_sum, modules, run) if probed else None
        self.is_known_mean = not as_sum and is_plain_cross_entropy(loss_fn, run.pieces)

    def __call__(self, outputs: Any, targets: Any, samples: int, where: str) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate, and its value."""
        reading = self.left.refused() if self.two_passes else contextlib.nullcontext()
        with refused(IN_PARTS) if self.in_pieces else self.explained(), reading:
            loss = self.loss_fn(outputs, targets)
        require_one_number(loss, where)
        if not loss.requires_grad:
            raise MicroBatchError(
                "the loss depends on nothing that requires a gradient: are all parameters frozen, or is this inside "
                "no_grad?"
            )
        if not bool(loss.isfinite()):
            raise NonFiniteError(f"the loss is {loss.item()} for {where}")
        loss = loss * (self.weight if self.kind == "sum" else self.weight * samples)
        return (loss if self.scaler is None else self.scaler.scale(loss)), loss.detach()

    def of_piece(self, outputs: list[Any], piece: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the same for one micro-batch, given the leaves of its output."""
        targets = to_device(piece.targets, self.run.device)
        return self(self.run.copied(outputs, piece), targets, piece.size, str(piece))

    def see_whole(self, why: str) -> None:
        """Let the loss see all samples of this rank at once."""
        self.two_passes, self.in_pieces, self.why_whole = True, False, why
        if not self.confined:
            self.probe = None

    def check(self, outputs: Any, piece: MicroBatch) -> None:
        """Compare a micro-batch with the first one, given its outputs; raise if the loss is not a mean.

        In one pass, the first micro-batch is compared with the targets of all others, before a gradient is added.
        Where the loss can see the whole batch, ``WholeBatchNeededError`` is raised.
        """
        probe, is_first = self.probe, piece.index == 0
        if probe is None:
            return
        again = not is_first and not self.two_passes  # it was compared before, with mixtures of the first outputs
        try:
            if is_first:
                why = self._compare_first(probe, outputs)
            else:
                why = probe.compare(piece.targets, piece.size, str(piece), outputs, 1 / 2 if again else ROUNDING)
        except HiddenStateError:
            raise
        except Exception as error:
            undecided = f"it cannot be decided whether it is a {self.kind} over samples"
            if is_first and not self.confined:
                raise WholeBatchNeededError(
                    f"{undecided} (if it is, say so with loss_in_pieces=True): {error}"
                ) from error
            if not isinstance(error, (CannotTellError, LeftBehindError)):
                raise
            if again:
                return
            self.probe = None
            if self.asked:
                return
            raise MicroBatchError(
                f"over {self.confined} loss_fn must be a {self.kind} over samples, and {undecided}: {error}. "
                "If it is, say so with loss_in_pieces=True"
            ) from error
        if why and not self.confined:
            raise WholeBatchNeededError(f"it is not a {self.kind} over samples: for {why}")
        if why:
            raise MicroBatchError(
                f"loss_fn is not a {self.kind} over samples, so it cannot be computed in parts ({self.confined}): for "
                f"{why}. {self._advice()}"
            )
        if probe.stateful and is_first and not self.two_passes:
            self._refuse_state(probe)

    def _compare_first(self, probe: LossProbe, outputs: Any) -> str:
        if not self.two_passes:
            self.left.find()
        with self.left.refused():
            probe.begin(outputs, self.run.pieces[0])
        dense = any(isinstance(t, Tensor) and t.dim() > 2 for t in leaves(outputs))  # then memory may be short
        groups = _groups(self.run.pieces[1:], least=1 if dense else 8)
        if self.two_passes:  # single micro-batches are compared when their outputs are there
            groups = [group for group in groups if len(group) > 1]
        compared = [samples for group in groups for samples in _joined(group)]
        if self.foreign is not None:
            compared.append((*self.foreign, "the first micro-batch of rank 0"))
        return next((why for samples in compared if (why := probe.compare(*samples))), "")

    def _refuse_state(self, probe: LossProbe) -> None:
        if not self.asked:
            raise WholeBatchNeededError("each call of it changes its state")
        if len(self.run.pieces) > 1:
            names = ", ".join(sorted(probe.stateful))
            raise MicroBatchError(
                f"loss_in_pieces=True: each call of loss_fn changes the state of {names}, so later micro-batches would "
                "meet another loss than the first. Leave loss_in_pieces out"
            )

    def _advice(self) -> str:
        causes = "Class weights, targets to ignore and another reduction are usual causes"
        of_sum = "With denominator=, loss_fn must return the sum over its samples"
        remedy = of_sum if self.kind == "sum" else _DENOMINATOR
        whole = "; or leave loss_in_pieces out, so that it sees the whole batch" if world_size() == 1 else ""
        return f"{causes}. {remedy}{whole}"

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Let an error say why the loss must see the whole batch."""
        try:
            yield
        except Exception as error:
            if self.why_whole:
                error.add_note(f"loss_fn must see the whole batch, because {self.why_whole}")
            raise


def _groups(pieces: list[MicroBatch], least: int) -> list[list[MicroBatch]]:
    """Group successive micro-batches: many a loss that compares samples with each other is zero for two of them."""
    groups: list[list[MicroBatch]] = []
    for piece in pieces:
        if groups and sum(p.size for p in groups[-1]) < least:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


def _joined(group: list[MicroBatch]) -> list[tuple[Any, int, str]]:
    """Return the targets, size and name of a group, or those of its micro-batches where targets cannot be joined."""
    each = [(p.targets, p.size, str(p)) for p in group]
    if len(group) == 1:
        return each
    try:
        names = f"micro-batches {group[0].index} to {group[-1].index}"
        return [(join_targets(group), sum(p.size for p in group), names)]
    except MicroBatchError:
        return each
