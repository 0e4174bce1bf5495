"""Run the micro-batches: once without a graph for the logits, once with a graph for the gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch, require_joinable, to_device
from mimicnorm.microbatch.guards import is_inexact, require_finite, require_inputs_unchanged, unchanged
from mimicnorm.microbatch.heads import Call, Capture, Replay, WholeBatch, feed, gradient_of, require_same, standing_in
from mimicnorm.microbatch.replay import RandomState, accelerators, full_precision
from mimicnorm.microbatch.trees import Tree, leaves, map_tensors

Root = tuple[Tensor, Tensor | None]
"""A tensor to differentiate, with its gradient."""
Roots = Callable[[MicroBatch, list[Any], Replay], list[Root]]
"""From a micro-batch, the leaves of its output and its replay to what is differentiated."""

COMPUTED = object()
_MOVED = (
    "the forward pass of {} changed this buffer, so the samples that come later, or again, meet another network. Put "
    "the module that owns it into eval mode, or take it out"
)
_STEPPED = (
    "the backward pass of {} changed this parameter, so the samples that come later meet another network. Step the "
    "optimizer after backward, not in a hook on gradients"
)


@dataclass
class Run:
    """A model and its micro-batches.

    Attributes:
        heads: The LastNorms of the model, by name.
        joins: Whether the outputs are joined, so that all must have the same structure.
        has_values: Whether the tensors have values to look at; fake ones have none.
        has_added: Whether gradients of this batch may have been added.
        starts: The random state from which each micro-batch started in the first pass.
        calls: The logits of each call of a head in the first pass, in an order that is the same on all ranks.
        outputs: The leaves of each micro-batch's output in the first pass. In a model with heads, the place of a tensor
            has the call of the head that returned it, or ``COMPUTED`` if something else did.
    """

    model: nn.Module
    heads: dict[str, LastNorm]
    pieces: list[MicroBatch]
    device: torch.device | None
    joins: bool = True
    has_values: bool = True
    has_added: bool = False
    starts: list[RandomState] = field(default_factory=list)
    calls: dict[Call, WholeBatch] = field(default_factory=dict)
    outputs: list[list[Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._accelerators = accelerators(self.model)
        self._trees: dict[int, Tree] = {}
        self._first: list[Any] | None = None

    @property
    def samples(self) -> int:
        return sum(p.size for p in self.pieces)

    def random_state(self) -> RandomState:
        return RandomState.now(self._accelerators)

    def forward(self, piece: MicroBatch, detach: bool = False) -> list[Any]:
        """Run the model on a micro-batch; return the leaves of its output in the order of the first micro-batch's."""
        args, kwargs = to_device((piece.args, piece.kwargs), self.device)
        if detach:
            args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
        with unchanged(self.model.named_buffers, _MOVED.format(piece)):
            output = self.model(*args, **kwargs)
        in_order = self._in_order(output, piece)
        if self.joins:
            self._first = self._first or [t.to("meta") if isinstance(t, Tensor) else t for t in in_order]
            for i, (part, like) in enumerate(zip(in_order, self._first, strict=True)):
                require_joinable(f"output {i} of the model", part, piece, like)
        return in_order

    def backward(self, roots: list[Root]) -> None:
        """Add the gradients of a micro-batch."""
        self.has_added = True
        with full_precision(self.device):
            torch.autograd.backward([t for t, _ in roots], [grad for _, grad in roots])

    def _in_order(self, output: Any, piece: MicroBatch) -> list[Any]:
        if not any(isinstance(t, Tensor) for t in leaves(output)):
            raise MicroBatchError(
                f"the model returned a {type(output).__name__} without tensors in it; return a tensor, or a tuple, "
                "list, dict, dataclass or SimpleNamespace of tensors"
            )
        if piece.index in self._trees:
            return self._trees[piece.index].leaves(output, f"{piece} when it ran again")
        tree = Tree(output, str(piece) if piece.index else "the first micro-batch")
        if self.joins:
            tree = self._trees.get(0, tree)
        self._trees[piece.index] = tree
        return tree.leaves(output, str(piece))

    def join_outputs(self) -> None:
        """Let the outputs of all micro-batches be joined from here on, in the order of the first one's leaves."""
        self.joins, self._trees = True, {i: tree for i, tree in self._trees.items() if i == 0}

    def structure(self, leaves: list[Any], piece: MicroBatch | None = None) -> Any:
        """Build the model's output from its leaves, for a micro-batch or for the whole batch."""
        return self._trees[0 if piece is None else piece.index].structure(leaves)

    def copied(self, leaves: list[Any], piece: MicroBatch | None = None) -> Any:
        """Build the model's output from copies of its leaves: a loss may write into them."""
        return map_tensors(Tensor.clone, self.structure(leaves, piece))

    def joined(self, parts: list[list[Any]]) -> list[Any]:
        """Join the leaves of all micro-batches."""
        return [torch.cat(c) if isinstance(c[0], Tensor) else c[0] for c in zip(*parts, strict=True)]


def first_pass(run: Run) -> None:
    """Run every micro-batch without a graph and store the raw logits in ``run.calls``, or without heads the outputs."""
    logits = []
    with torch.no_grad():
        for piece in run.pieces:
            run.starts.append(run.random_state())
            capture, versions = Capture(), piece.versions()
            with standing_in(run.heads, capture):
                in_order = run.forward(piece)
            require_inputs_unchanged(piece, versions)
            for i, t in enumerate(in_order):
                if isinstance(t, Tensor):  # detached: it may be an input that requires a gradient
                    in_order[i] = capture.source(t) or COMPUTED if run.heads else t.detach()
            run.outputs.append(in_order)
            logits.append(capture.logits)
    torch.clear_autocast_cache()  # weights that were cast without a graph must not be used in the pass with one
    for piece, of_piece, in_order in zip(run.pieces, logits, run.outputs, strict=True):
        if of_piece.keys() != logits[0].keys():
            names = sorted({call.head for call in of_piece.keys() ^ logits[0].keys()})
            raise MicroBatchError(
                f"{', '.join(names)}: called a different number of times in {piece} than in the first micro-batch, "
                "so the logits of the whole batch cannot be joined. Let every sample take the same way"
            )
        for call, of_call in of_piece.items() if run.has_values else ():
            require_finite(call.head, [of_call], piece)
        if not run.heads:
            require_finite("", in_order, piece)
    run.calls = {c: WholeBatch(run.heads[c.head], [of_piece[c] for of_piece in logits]) for c in sorted(logits[0])}


def outputs_of(run: Run) -> Iterator[list[Any]]:
    """Yield the leaves of each micro-batch's output, attached to the normalised logits."""
    sources = [{t for t in outputs if isinstance(t, Call) or t is COMPUTED} for outputs in run.outputs]
    if all(s == run.calls.keys() for s in sources):  # the outputs are normalised logits and nothing else, or no heads
        for i, outputs in enumerate(run.outputs):
            yield [run.calls[t].normed_parts[i] if isinstance(t, Call) else t for t in outputs]
        return
    # Something follows the LastNorms, or does not pass them: run it on the normalised logits. Only that part builds a
    # graph, because all parameters are frozen.
    now = run.random_state()
    for i, piece in enumerate(run.pieces):
        run.starts[i].restore()
        with _frozen(run.model), torch.enable_grad(), standing_in(run.heads, feed(piece, run.calls)):
            outputs = run.forward(piece, detach=True)
        yield outputs
    torch.clear_autocast_cache()
    now.restore()


class WholeOutputs:
    """The joined outputs of all micro-batches, at which the loss of the whole batch is differentiated.

    Attributes:
        leaves: The leaves of the joined output.
    """

    def __init__(self, run: Run, trains: bool = True):
        self._sizes = [p.size for p in run.pieces]
        self.leaves = run.joined(list(outputs_of(run)))
        self._learning = [i for i, t in enumerate(self.leaves) if trains and isinstance(t, Tensor) and is_inexact(t)]
        for t in (self.leaves[i] for i in self._learning):
            t.retain_grad() if t.requires_grad else t.requires_grad_()

    def part(self, piece: MicroBatch) -> list[Any]:
        """Return the leaves of one micro-batch's output."""
        return [t.split(self._sizes)[piece.index] if isinstance(t, Tensor) else t for t in self.leaves]

    def roots(self) -> Roots:
        """Return what the graph pass differentiates, after the backward pass of the loss: the outputs."""
        grads = {i: gradient_of(self.leaves[i]).split(self._sizes) for i in self._learning}
        self.leaves = [t.detach() if isinstance(t, Tensor) else t for t in self.leaves]
        values = {i: self.leaves[i].split(self._sizes) for i in self._learning}

        def roots(piece: MicroBatch, outputs: list[Any], replay: Replay) -> list[Root]:
            for i in grads:
                replay.compare(f"output {i} of the model: the values", outputs[i].detach(), values[i][piece.index])
            return [(outputs[i], grads[i][piece.index]) for i in grads]

        return roots


def graph_pass(run: Run, roots: Roots) -> None:
    """Run every micro-batch with a graph, and add its part of the gradient.

    This is the only pass if the loss is a mean over samples that do not depend on each other, else the second one,
    in which the LastNorms are replaced by the values and gradients that are known from the first.
    """
    replays, end = [], run.random_state()
    for i, piece in enumerate(run.pieces):
        if run.starts:
            run.starts[i].restore()
        replay = Replay(piece, run.calls)
        with standing_in(run.heads, replay):
            outputs = run.forward(piece)
            chosen = [root for root in roots(piece, outputs, replay) if root[0].requires_grad]
            del outputs
            if chosen:
                with unchanged(run.model.named_parameters, _STEPPED.format(piece)):
                    run.backward(chosen)
            del chosen  # the next micro-batch needs the memory
        replays.append(replay)
    if run.starts:
        end.restore()
    if run.has_values:
        require_same(replays)


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Let a forward pass build no graph for the model's own parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)
