"""``backward``: from a batch of any size to its exact gradient, one micro-batch in memory at a time.

1. Every micro-batch runs without a graph; the LastNorms are stood in for and only the raw logits are kept.
2. The LastNorms and the loss see the logits of the whole batch, which gives dL/dlogits. Where something follows a
   LastNorm inside the model (an average of heads, pooling, softmax), that tail runs in between, one more pass. With
   ``loss_in_pieces`` the loss sees one micro-batch at a time, here and once more in the last pass.
3. Every micro-batch runs again, with a graph and the same random numbers, and takes its part of dL/dlogits.

Nothing is approximated: the gradient is that of the whole batch up to rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.last_norm import advising, refused, world_size
from mimicnorm.microbatch import ranks
from mimicnorm.microbatch.batches import MicroBatch, collect, split, to_device, together
from mimicnorm.microbatch.guards import (
    BufferGuard,
    heads_of,
    mixes_samples,
    require_finite,
    require_inputs_unchanged,
    require_mean,
)
from mimicnorm.microbatch.heads import Call, Capture, Feed, Replay, WholeBatch, is_inexact, require_same, standing_in
from mimicnorm.microbatch.replay import RandomState, full_precision, input_device
from mimicnorm.microbatch.run import Loss, Run, frozen

_ONE_VALUE = "This is all that backward was given: let the batch have two samples or more"
Denominator = float | Tensor | Callable[[Any], float | Tensor]


def backward(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any = None,
    *,
    micro_batch: int | None = None,
    scaler: Any = None,
    denominator: Denominator | None = None,
    loss_in_pieces: bool = False,
    return_outputs: bool = False,
) -> Any:
    """Add the gradient of a whole batch to ``.grad``, with the memory of one micro-batch.

    Use it in place of ``loss_fn(model(inputs), targets).backward()``, inside the same autocast context if there is
    one. The running statistics of a LastNorm move once. Under DistributedDataParallel each rank gives its share of
    the batch (shares may differ), gradients are synchronised once, and the average that DDP takes is the gradient of
    the batch of all ranks.

    Args:
        model: A converted network, or any without batch statistics; wrapped in DDP and compiled if you like.
        loss_fn: A function of the model's output and the targets that returns one number. With a LastNorm on one
            device it sees the whole batch and may be anything. In one pass (no LastNorm in training mode) it sees
            each micro-batch, over several ranks each share: there it must be a mean over samples, or a sum with a
            ``denominator``. What is known not to be either is refused (class weights, ignored targets,
            ``reduction="sum"``); of your own functions nothing is known, and a loss that compares samples with each
            other (contrastive, batch statistics) would be silently wrong.
        inputs: A tensor, a tuple of call arguments or a dict of keyword arguments; without ``micro_batch``, anything
            that yields micro-batches as (inputs, targets). May stay in host memory: each micro-batch is copied to
            the model's device when it runs.
        targets: Any structure of tensors or arrays that count the samples in their first dimension, and of numbers
            that belong to all samples.
        micro_batch: Samples to run at once.
        scaler: A ``torch.amp.GradScaler``; the gradients come out scaled.
        denominator: ``loss_fn`` returns a sum, to be divided by this: a number, or a function of the targets (class
            weights: ``lambda t: weight[t].sum()``). Over several ranks, the parts of all are added.
        loss_in_pieces: Let ``loss_fn`` see one micro-batch at a time, which it then has to be fit for as over several
            ranks. For outputs that are large beside the activations (dense prediction): neither they nor the loss's
            own graph are ever held for the whole batch.
        return_outputs: Return the model's output for the whole batch, too.

    Returns:
        The loss of the whole batch, detached; with ``return_outputs``, the pair of it and the outputs.

    Example:
        >>> from mimicnorm.layers import LastNorm
        >>> net = nn.Sequential(nn.Linear(3, 4), LastNorm(4))
        >>> x, y = torch.randn(32, 3), torch.randint(4, (32,))
        >>> loss = backward(net, nn.functional.cross_entropy, x, y, micro_batch=5)
        >>> net[0].weight.grad.shape
        torch.Size([4, 3])
    """
    scales = scaler is None or hasattr(scaler, "scale")
    if not (isinstance(model, nn.Module) and callable(loss_fn) and scales):
        kinds = ", ".join(type(given).__name__ for given in (model, loss_fn, scaler))
        raise MicroBatchError(
            f"model, loss_fn and scaler must be a module, a function and a torch.amp.GradScaler or None; got {kinds}"
        )
    inner = ranks.bare(model)
    device = input_device(inner)
    fault: Exception | None = None
    share, run, first = 0.0, None, None
    try:
        # An error on one rank must not leave the others waiting for it: it is raised after all have met.
        if micro_batch is None and targets is not None:
            raise MicroBatchError("targets beside a loader: without micro_batch=, inputs must yield (inputs, targets)")
        pieces = collect(inputs) if micro_batch is None else split(inputs, targets, micro_batch)
        run = Run(model, inner, heads_of(inner), pieces, device)
        mixing_loss = mixes_samples(loss_fn)
        if loss_in_pieces and mixing_loss:
            raise MicroBatchError("loss_in_pieces=True: this loss normalises over the batch, so it must see it whole")
        two_passes = bool(run.heads) or mixing_loss
        if denominator is None and (world_size() > 1 or not two_passes or loss_in_pieces):
            require_mean(loss_fn, [p.targets for p in pieces] if micro_batch is None else targets)
        if micro_batch is None and (callable(denominator) or (two_passes and not loss_in_pieces)):
            targets = together(pieces)  # where nobody looks at them all at once, they need not fit together
        targets = to_device(targets, device)
        if two_passes:
            first = _first_pass(run, joins=return_outputs or not loss_in_pieces)
        share = run.samples if denominator is None else _value(denominator, targets)
    except Exception as error:
        fault = error
    total = ranks.agree(share, fault, device)
    assert run is not None
    if not 0 < total < math.inf:
        raise MicroBatchError(f"denominator={total}: the sum of the losses must be divided by a positive finite number")
    loss = Loss(loss_fn, targets, scaler, world_size() / total, denominator is None)
    if first is None:
        value, outputs = _one_pass(run, loss, return_outputs)
    elif loss_in_pieces:
        value, outputs = _two_passes_in_pieces(run, loss, first, return_outputs)
    else:
        value, outputs = _two_passes(run, loss, first)
    value = ranks.mean_over_ranks(value)
    return (value, outputs) if return_outputs else value


def _value(denominator: Denominator, targets: Any) -> float:
    value = denominator(targets) if callable(denominator) else denominator
    number = value.item() if isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) == 1 else value
    if not isinstance(number, Real) or isinstance(number, bool):
        raise MicroBatchError(
            f"denominator: give a number, or a function of the targets that returns one; got {value!r}"
        )
    return float(number)


def _one_pass(run: Run, loss: Loss, return_outputs: bool) -> tuple[Tensor, Any]:
    """Nothing mixes samples: each micro-batch's own graph is all there is."""
    values, parts = [], []
    guard = BufferGuard(run.inner)

    def forward(piece: MicroBatch) -> Tensor:
        with guard.before_each(run.inner, run.model):
            leaves = run.call(run.model, piece)
        guard.require_unchanged(piece)
        require_finite({"": leaves}, piece)
        if return_outputs:  # a copy: the loss may write into its arguments
            run.require_joinable(leaves, piece, parts[0] if parts else leaves)
            parts.append([t.detach().clone() if isinstance(t, Tensor) else t for t in leaves])
        outputs, targets = pytree.tree_unflatten(leaves, run.spec), to_device(piece.targets, run.device)
        with refused("this LastNorm is inside loss_fn, where it would see one micro-batch at a time"):
            scaled, value = loss(outputs, targets, piece.size, str(piece))
        values.append(value)
        return scaled

    *earlier, last = run.pieces
    # The last backward waits for all ranks, so all must have come that far.
    with ranks.all_or_none(run.device, "Gradients of single micro-batches may have been added here: clear them"):
        for piece in earlier:
            with ranks.unsynchronised(run.model), _telling_what_was_added(piece):
                scaled = forward(piece)
                with full_precision(run.device):
                    scaled.backward()
        with _telling_what_was_added(last):
            scaled = forward(last)
    with full_precision(run.device):
        scaled.backward()
    outputs = pytree.tree_unflatten(run.joined(parts), run.spec) if return_outputs else None
    return torch.stack(values).sum(), outputs


@contextlib.contextmanager
def _telling_what_was_added(piece: MicroBatch) -> Iterator[None]:
    """Let an error in one pass say that the micro-batches before have left their gradients."""
    try:
        yield
    except Exception as error:
        added = "The gradients of the micro-batches before it have been added: clear them"
        if not piece.index:
            raise
        if isinstance(error, MicroBatchError):
            raise type(error)(f"{error}. {added}") from error.__cause__
        error.add_note(f"This was in {piece}. {added}")
        raise


@dataclass
class _First:
    """What the first pass leaves: raw logits, and whether the outputs are nothing but normalised logits."""

    logits: list[dict[Call, Tensor]] = field(default_factory=list)
    sources: list[dict[int, Call | None]] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)


def _first_pass(run: Run, joins: bool) -> _First:
    first, shapes = _First(), None
    guard = BufferGuard(run.inner)
    with torch.no_grad():
        for piece in run.pieces:
            run.starts.append(run.random_state())
            capture, versions = Capture(), piece.versions()
            with standing_in(run.heads, capture):
                leaves = run.call(run.inner, piece)
            guard.require_unchanged(piece)
            require_inputs_unchanged(piece, versions)
            if joins:
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


def _whole_heads(run: Run, first: _First) -> dict[Call, WholeBatch]:
    """Normalise the logits of the whole batch; those of the micro-batches are not needed any more."""
    calls = list(first.logits[0]) if run.heads else []
    heads = {c: WholeBatch(run.heads[c[0]], [logits[c] for logits in first.logits]) for c in calls}
    first.logits.clear()
    return heads


@advising(_ONE_VALUE)
def _two_passes(run: Run, loss: Loss, first: _First) -> tuple[Tensor, Any]:
    with ranks.all_or_none(run.device):
        heads = _whole_heads(run, first)
        whole = run.joined(list(_outputs(run, first, {c: h.pieces(h.normed) for c, h in heads.items()})))
        leaves = [t.detach().requires_grad_(is_inexact(t)) if isinstance(t, Tensor) else t for t in whole]
        scaled, value = loss(run.output(leaves), loss.targets, run.samples, "the whole batch; no gradient was added")
    end = run.random_state()
    wanted = {i: t for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad}
    beside = _reaches_beside(scaled, list(wanted.values()))
    with ranks.unsynchronised(run.model), full_precision(run.device):
        scaled.backward()  # whatever else the loss is made of gets its gradient: its own parameters, a penalty
    of_outputs = {i: t.grad for i, t in wanted.items() if t.grad is not None}
    of_logits = _through_heads(run, heads, whole, of_outputs)
    sizes = [p.size for p in run.pieces]
    output_parts = {i: g.split(sizes) for i, g in of_outputs.items()}
    whole = [t.detach() if isinstance(t, Tensor) else t for t in whole]
    then = {i: whole[i].split(sizes) for i in wanted}

    def roots(i: int, leaves: list[Any], replay: Replay) -> list[tuple[Tensor, Tensor | None]]:
        for j, parts in then.items():
            replay.compare(f"output {j} of the model: the values", leaves[j].detach(), parts[i])
        found = [(leaves[j], parts[i]) for j, parts in output_parts.items() if leaves[j].requires_grad]
        if not found and not beside:
            raise MicroBatchError("the loss depends on no parameter that requires a gradient: nothing to train")
        return found

    _second_pass(run, heads, of_logits, roots, end)
    return value, pytree.tree_unflatten(whole, run.spec)


@advising(_ONE_VALUE)
def _two_passes_in_pieces(run: Run, loss: Loss, first: _First, return_outputs: bool) -> tuple[Tensor, Any]:
    """The same where the loss is a sum over samples: of outputs, no more than a micro-batch's are held."""
    values, parts, grads = [], [], []

    def loss_of(i: int, leaves: list[Any]) -> tuple[Tensor, Tensor]:
        piece = run.pieces[i]
        with refused("this LastNorm is inside loss_fn, which sees one micro-batch at a time"):
            return loss(run.output(leaves), to_device(piece.targets, run.device), piece.size, str(piece))

    with ranks.all_or_none(run.device):
        heads = _whole_heads(run, first)
        fed = {c: [p.detach().requires_grad_() for p in h.pieces(h.normed)] for c, h in heads.items()}
        for i, leaves in enumerate(_outputs(run, first, fed)):
            scaled, value = loss_of(i, leaves)
            with full_precision(run.device):
                grads.append(torch.autograd.grad(scaled, [fed[c][i] for c in heads], materialize_grads=True))
            values.append(value)
            parts += [[t.detach() if isinstance(t, Tensor) else t for t in leaves]] if return_outputs else []
    end = run.random_state()
    of_normed = [h.joined(list(pieces)) for h, pieces in zip(heads.values(), zip(*grads, strict=True), strict=True)]
    del grads
    found = torch.autograd.grad([h.normed for h in heads.values()], [h.raw for h in heads.values()], of_normed)

    def roots(i: int, leaves: list[Any], replay: Replay) -> list[tuple[Tensor, Tensor | None]]:
        scaled, value = loss_of(i, leaves)
        replay.compare("the loss", value, values[i])
        return [(scaled, None)]

    _second_pass(run, heads, dict(zip(heads, found, strict=True)), roots, end)
    outputs = pytree.tree_unflatten(run.joined(parts), run.spec) if return_outputs else None
    return torch.stack(values).sum(), outputs


def _second_pass(
    run: Run, heads: dict[Call, WholeBatch], of_logits: dict[Call, Tensor | None], roots: Callable, end: RandomState
) -> None:
    """Run every micro-batch with a graph, and let it take its part of dL/dlogits.

    Args:
        run: The micro-batches.
        heads: The normalised logits of the whole batch.
        of_logits: dL/dlogits.
        roots: From a micro-batch's index, its output and the replay to the tensors to start from, with gradients.
        end: Where the random generators shall stand afterwards.
    """
    raw, normed = (
        {c: h.pieces(t.detach()) for c, h in heads.items() for t in [getattr(h, n)]} for n in ("raw", "normed")
    )
    known = {c: heads[c].pieces(g) for c, g in of_logits.items() if g is not None}
    replays = []
    for i, piece in enumerate(run.pieces):
        run.starts[i].restore()
        of_piece = [{c: parts[i] for c, parts in all_parts.items()} for all_parts in (raw, normed, known)]
        replay = Replay(piece, *of_piece)
        with ranks.unsynchronised(run.model, piece is not run.pieces[-1]), standing_in(run.heads, replay):
            found = roots(i, run.call(run.model, piece), replay)
            if found:
                with full_precision(run.device):
                    torch.autograd.backward([t for t, _ in found], [g for _, g in found])
        replays.append(replay)
    end.restore()
    with ranks.all_or_none(run.device, "The gradients are wrong here, too: clear them"):
        require_same(replays)


def _through_heads(
    run: Run, heads: dict[Call, WholeBatch], whole: list[Any], of_outputs: dict[int, Tensor]
) -> dict[Call, Tensor | None]:
    """From dL/doutputs to dL/dlogits, through the tail and the LastNorms."""
    attached = [i for i in of_outputs if whole[i].requires_grad]
    if not attached:
        # Over several ranks the backward of a LastNorm is communication that all must take part in.
        attached = [i for i, t in enumerate(whole) if isinstance(t, Tensor) and t.requires_grad]
    if not attached:
        return {}
    grads = [of_outputs[i] if i in of_outputs else torch.zeros_like(whole[i]) for i in attached]
    raw = [h.raw for h in heads.values()]
    with full_precision(run.device):
        found = torch.autograd.grad([whole[i] for i in attached], raw, grads, allow_unused=True)
    return dict(zip(heads, found, strict=True))


def _reaches_beside(loss: Tensor, outputs: list[Tensor]) -> bool:
    """Whether a loss has leaves that require a gradient beside the model's outputs."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not any(leaf is t for t in outputs):
            return True
        nodes += [n for n, _ in node.next_functions]
    return False


def _outputs(run: Run, first: _First, normed: dict[Call, list[Tensor]]) -> Iterator[list[Any]]:
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
