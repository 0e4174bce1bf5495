"""The pass without a graph: raw logits of all micro-batches, and the outputs that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch.guards import BufferGuard, require_finite, require_inputs_unchanged
from mimicnorm.microbatch.heads import Call, Capture, Feed, WholeBatch, standing_in
from mimicnorm.microbatch.run import Run, frozen


@dataclass
class First:
    """What the first pass leaves: raw logits, and whether the outputs are nothing but normalised logits."""

    logits: list[dict[Call, Tensor]] = field(default_factory=list)
    sources: list[dict[int, Call | None]] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)


def first_pass(run: Run) -> First:
    """Run every micro-batch without a graph, with the LastNorms stood in for."""
    first, shapes = First(), None
    guard = BufferGuard(run.inner)
    with torch.no_grad():
        for piece in run.pieces:
            run.starts.append(run.random_state())
            capture, versions = Capture(), piece.versions()
            with standing_in(run.heads, capture):
                leaves = run.call(run.inner, piece)
            guard.require_unchanged(piece)
            require_inputs_unchanged(piece, versions)
            if run.joins:
                shapes = shapes or [t.to("meta") if isinstance(t, Tensor) else t for t in leaves]
                run.require_joinable(leaves, piece, shapes)
            if run.heads:
                first.logits.append(capture.logits)
                first.sources.append({j: capture.source(t) for j, t in enumerate(leaves) if isinstance(t, Tensor)})
            first.outputs.append([None if isinstance(t, Tensor) and run.heads else t for t in leaves])
    torch.clear_autocast_cache()  # weights that were cast without a graph must not serve the pass with one
    calls = first.logits[0].keys() if run.heads else ()
    for piece, logits in zip(run.pieces, first.logits, strict=False):
        if logits.keys() != calls:
            names = sorted({name for name, _ in logits.keys() ^ calls})
            raise MicroBatchError(
                f"{', '.join(names)}: called a different number of times in {piece} than in the first micro-batch, "
                "so the whole batch's logits cannot be put together. Let every sample take the same way"
            )
    for i, piece in enumerate(run.pieces):
        found = {n: [t] for (n, _), t in first.logits[i].items()} if run.heads else {"": first.outputs[i]}
        require_finite(found, piece, "; no gradient was added")
    return first


def whole_heads(run: Run, first: First) -> dict[Call, WholeBatch]:
    """Normalise the logits of the whole batch; those of the micro-batches are not needed any more."""
    calls = list(first.logits[0]) if run.heads else []
    heads = {c: WholeBatch(run.heads[c[0]], [logits[c] for logits in first.logits]) for c in calls}
    first.logits.clear()
    return heads


def outputs_of(run: Run, first: First, normed: dict[Call, list[Tensor]]) -> Iterator[list[Any]]:
    """The model's output leaves for each micro-batch, attached to the normalised logits."""
    if not run.heads:
        yield from first.outputs
        return
    sources = {j: call for j, call in first.sources[0].items() if call is not None}
    if all(s == sources for s in first.sources) and normed.keys() == set(sources.values()):
        for i, o in enumerate(first.outputs):
            yield [normed[sources[j]][i] if j in sources else t for j, t in enumerate(o)]
        return
    # Something follows the LastNorms, or goes past them: run it on the normalised logits. Only that part builds a
    # graph, for all parameters are frozen.
    now = run.random_state()
    for i, piece in enumerate(run.pieces):
        run.starts[i].restore()
        feed = Feed({c: p[i] for c, p in normed.items()})
        with frozen(run.inner), torch.enable_grad(), standing_in(run.heads, feed):
            leaves = run.call(run.inner, piece, detach=True)
        yield leaves
    torch.clear_autocast_cache()
    now.restore()
