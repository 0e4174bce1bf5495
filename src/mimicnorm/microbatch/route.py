"""What the loss may see: the whole batch, or one micro-batch at a time where that is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.last_norm import world_size
from mimicnorm.microbatch.batches import MicroBatch
from mimicnorm.microbatch.known_losses import Verdict, judge, mixes_samples
from mimicnorm.microbatch.probe_loss import ROUNDING, CannotTellError, LossProbe, tried
from mimicnorm.microbatch.run import Run

_DENOMINATOR = "Let loss_fn return a sum over samples and give what to divide by: denominator=lambda targets: ..."


class Route:
    """How many passes a batch takes and what the loss sees in them.

    Args:
        run: The micro-batches.
        loss_fn: The user's loss.
        targets: All targets, in any structure.
        as_sum: Whether the loss has to be a sum over samples (with a denominator), else a mean.
        loss_in_pieces: As given to ``backward``.

    Attributes:
        two_passes: Whether a pass without a graph comes first.
        in_pieces: Whether the loss sees one micro-batch at a time.
        unknown: Whether the loss has to be compared with itself to find out if it may be computed in parts.
        why_whole: Why the loss sees the whole batch although the model has no last BN.
        stateful: Whether each call of the loss changes its state, so that it must not be called once per micro-batch.
    """

    def __init__(self, run: Run, loss_fn: Callable, targets: Any, as_sum: bool, loss_in_pieces: bool | None):
        self.run, self.loss_fn, self.as_sum, self.asked = run, loss_fn, as_sum, loss_in_pieces
        mixing = mixes_samples(loss_fn)
        if loss_in_pieces and mixing:
            raise MicroBatchError("loss_in_pieces=True: this loss normalises over the batch, so it must see it whole")
        self.confined = "loss_in_pieces=True" if loss_in_pieces else "several ranks" if world_size() > 1 else ""
        verdict = judge(loss_fn, targets, as_sum)
        fits = verdict is None or verdict.in_pieces
        if self.confined and verdict is not None and not fits:
            raise self._known_not_to_fit(verdict)
        self.two_passes = bool(run.heads) or mixing or loss_in_pieces is False or not fits
        self.in_pieces = bool(loss_in_pieces) or not self.two_passes
        self.why_whole = "" if fits or verdict is None else f"with {verdict.why} it is not a {self._kind} over samples"
        alone = world_size() == 1 and len(run.pieces) == 1
        self.unknown = verdict is None and not alone and (bool(self.confined) or not self.two_passes)
        self.stateful = False
        self._probe: LossProbe | None = None

    def settle(self, foreign: tuple[Any, int] | None) -> None:
        """Find out whether one pass is exact; in two passes the loss is compared when the outputs are there.

        Args:
            foreign: Targets of another rank, and their number of samples.
        """
        if not self.unknown:
            return
        self._probe = LossProbe(self.run, self.loss_fn, self.as_sum, foreign)
        if self.two_passes:
            return
        probe, piece = self._probe, self.run.pieces[0]
        outputs = tried(self.run, piece)
        if self.confined:
            probe.begin(outputs, piece)
            self._require(probe.compare_all)
        else:
            try:
                probe.begin(outputs, piece)
                verdict = probe.compare_all()
                if not verdict.in_pieces:
                    self.see_whole(f"it is not a {self._kind} over samples: for {verdict.why}")
            except Exception as error:
                word = "(if it is, say so with loss_in_pieces=True)"
                self.see_whole(f"it cannot be told whether it is a {self._kind} over samples {word}: {error}")
        self.stateful = not self.two_passes and len(self.run.pieces) > 1 and bool(probe.stateful)
        if self.stateful and self.asked:
            names = ", ".join(sorted(probe.stateful))
            raise MicroBatchError(
                f"loss_in_pieces=True: each call of loss_fn changes the state of {names}, so later micro-batches would "
                "meet another loss than the first. Leave loss_in_pieces out"
            )

    def see_whole(self, why: str) -> None:
        """Let the loss see all that is here at once."""
        self.two_passes, self.in_pieces, self.why_whole = True, False, why
        if not self.confined:
            self._probe = None

    def check(self, outputs: Any, piece: MicroBatch) -> None:
        """Compare a micro-batch, whose outputs are there now, with the first; raises if the loss does not fit."""
        if self._probe is None:
            return
        if self.two_passes:
            if piece.index == 0:
                self._probe.begin(outputs, piece)
            probe, compared = self._probe, self._probe.compare
            self._require(lambda: compared(outputs, piece, ROUNDING) if piece.index else probe.compare_foreign())
        elif piece.index:  # it was compared before, on mixtures of the first outputs
            try:
                verdict = self._probe.compare(outputs, piece, power=1 / 2)
            except CannotTellError:
                return
            if not verdict.in_pieces:
                way_out = _DENOMINATOR if self.confined else "Give loss_in_pieces=False"
                raise MicroBatchError(f"loss_fn is not a {self._kind} over samples: for {verdict.why}. {way_out}")

    def check_whole(self, leaves: list[Any]) -> None:
        """Compare all micro-batches, given the leaves of the outputs of all of them."""
        sizes = [p.size for p in self.run.pieces]
        for i, piece in enumerate(self.run.pieces if self._probe is not None else ()):
            parts = [t.split(sizes)[i] if isinstance(t, Tensor) else t for t in leaves]
            self.check(self.run.structure(parts), piece)

    def _require(self, compare: Callable[[], Verdict]) -> None:
        """Raise if the loss is not a mean; where that cannot be told, the user's word counts."""
        try:
            verdict = compare()
        except CannotTellError as error:
            self._probe = None
            if self.asked:
                return
            raise MicroBatchError(
                f"over {self.confined} loss_fn must be a {self._kind} over samples, and it cannot be told whether it "
                f"is: {error}. If it is, say so with loss_in_pieces=True"
            ) from error
        if not verdict.in_pieces:
            advice = "With denominator=, loss_fn must return the sum over its samples" if self.as_sum else _DENOMINATOR
            if world_size() == 1:
                advice += "; or leave loss_in_pieces out, so that it sees the whole batch"
            raise MicroBatchError(
                f"loss_fn is not a {self._kind} over samples, so it cannot be computed in parts ({self.confined}): for "
                f"{verdict.why}. {advice}"
            )

    @property
    def _kind(self) -> str:
        return "sum" if self.as_sum else "mean"

    def _known_not_to_fit(self, verdict: Verdict) -> MicroBatchError:
        if self.as_sum:
            advice = 'With denominator=, give it reduction="sum"'
        else:
            advice = _DENOMINATOR if "sum" not in verdict.why else f'Take reduction="mean". Or: {_DENOMINATOR}'
        return MicroBatchError(
            f"a loss with {verdict.why} is not a {self._kind} over samples, and here it is computed in parts "
            f"({self.confined}). {advice}"
        )
