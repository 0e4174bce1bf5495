"""The passes of ``microbatch.backward``, tracked: one micro-batch's activations at a time.

These are its own passes. What is left out are its checks of values, which fake tensors do not have, and the test
whether the loss is a mean over samples: it has to be one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mimicnorm.errors import MemoryPredictionError, MicroBatchError
from mimicnorm.memory.passes import Passes
from mimicnorm.microbatch.batches import MicroBatch, split
from mimicnorm.microbatch.guards import heads_of
from mimicnorm.microbatch.heads import Replay
from mimicnorm.microbatch.passes import Root, Run, WholeOutputs, first_pass, graph_pass


@dataclass
class _TrackedRun(Run):
    """Micro-batches whose forward and backward passes are tracked."""

    passes: Passes = field(kw_only=True)

    def forward(self, piece: MicroBatch, detach: bool = False) -> list[Any]:
        with self.passes.forward(), self.passes.explained():
            return super().forward(piece, detach)

    def backward(self, roots: list[Root]) -> None:
        with self.passes.tracker.during("backward"), self.passes.explained("the backward pass"):
            super().backward(roots)


@dataclass
class MicroBatchPasses(Passes):
    """The passes of one step in micro-batches of ``size`` samples."""

    size: int = field(kw_only=True)

    def run(self) -> Any:
        """Run all micro-batches; returns the outputs of the whole batch."""
        try:
            heads, pieces = heads_of(self.model), split(self.kwargs or self.args, None, self.size)
        except MicroBatchError as error:
            raise MemoryPredictionError(f"micro_batch={self.size}: {error}") from error
        run = _TrackedRun(self.model, heads, pieces, None, has_values=False, passes=self)
        with self.tracker.during("forward"):
            return self._in_two_passes(run) if heads else self._in_one_pass(run)

    def _in_one_pass(self, run: Run) -> Any:
        parts = []

        def roots(_piece: MicroBatch, outputs: list[Any], _replay: Replay) -> list[Root]:
            parts.append([t.detach() if isinstance(t, Tensor) else t for t in outputs])
            with self.forward():
                return [(self.value(run.copied(outputs)), None)]

        graph_pass(run, roots)
        return run.structure(run.joined(parts))

    def _in_two_passes(self, run: Run) -> Any:
        first_pass(run)
        with self.forward():
            for head in run.calls.values():
                head.normalise()
            whole = WholeOutputs(run)
            value = self.value(run.copied(whole.leaves))
        self.backward(value)
        del value
        with self.tracker.during("backward"):
            for head in run.calls.values():
                head.backward()
        graph_pass(run, whole.roots())
        return run.structure(whole.leaves)
