"""``backward``: from a batch of any size to its exact gradient, one micro-batch in memory at a time.

1. Every micro-batch runs without a graph; the LastNorms are stood in for and only the raw logits are kept.
2. The LastNorms and the loss see the logits of the whole batch, which gives dL/dlogits. Where something follows a
   LastNorm inside the model (an average of heads, pooling, softmax), that tail runs in between, one more pass. With
   ``loss_in_pieces`` the loss sees one micro-batch at a time, here and once more in the last pass.
3. Every micro-batch runs again, with a graph and the same random numbers, and takes its part of dL/dlogits.

Without a LastNorm one pass is enough if the loss is a mean over samples, which ``route.py`` finds out.

Nothing is approximated: the gradient is that of the whole batch up to rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.last_norm import advising, refused, world_size
from mimicnorm.microbatch import ranks
from mimicnorm.microbatch.batches import MicroBatch, collect, split, to_device, together
from mimicnorm.microbatch.first_pass import First, first_pass, outputs_of, whole_heads
from mimicnorm.microbatch.guards import BufferGuard, heads_of, require_finite
from mimicnorm.microbatch.heads import Call, Replay, WholeBatch, is_inexact, require_same, standing_in
from mimicnorm.microbatch.journal import Journal, modules_in, put_back_on_error
from mimicnorm.microbatch.regression import warn_in_pieces, warn_of_whole
from mimicnorm.microbatch.replay import RandomState, full_precision, input_device
from mimicnorm.microbatch.route import Route
from mimicnorm.microbatch.run import Denominator, Loss, Run, value_of

_ONE_VALUE = "This is all that backward was given: let the batch have two samples or more"


def backward(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    targets: Any = None,
    *,
    micro_batch: int | None = None,
    scaler: Any = None,
    denominator: Denominator | None = None,
    loss_in_pieces: bool | None = None,
    return_outputs: bool = False,
) -> Any:
    """Add the gradient of a whole batch to ``.grad``, with the memory of one micro-batch.

    Use it in place of ``loss_fn(model(inputs), targets).backward()``, inside the same autocast context if there is
    one. The running statistics of a LastNorm move once. Under DistributedDataParallel each rank gives its share of
    the batch (shares may differ), gradients are synchronised once, and the average that DDP takes is the gradient of
    the batch of all ranks.

    Args:
        model: A converted network, or any without batch statistics; wrapped in DDP and compiled if you like.
        loss_fn: A function of the model's output and the targets that returns one number. On one device it may be
            anything: what is not a mean over samples (or a sum, with a ``denominator``) sees the whole batch. Over
            several ranks it sees each share, and what is not a mean (or a sum) is refused. Torch's own losses are
            known. Any other is compared with itself where it would be computed in parts, two micro-batches together
            and apart, in every batch; so it is called more often than there are micro-batches. Random generators
            and the state of modules are put back after that, but not what a function does beside (counting correct
            answers in a closure): ``loss_in_pieces=False`` has it called once, with the whole batch.
        inputs: A tensor, a tuple of call arguments or a dict of keyword arguments; without ``micro_batch``, anything
            that yields micro-batches as (inputs, targets). May stay in host memory: each micro-batch is copied to
            the model's device when it runs.
        targets: Any structure of tensors or arrays that count the samples in their first dimension, and of numbers
            that belong to all samples.
        micro_batch: Samples to run at once.
        scaler: A ``torch.amp.GradScaler``; the gradients come out scaled.
        denominator: ``loss_fn`` returns a sum, to be divided by this: a number, or a function of the targets (class
            weights: ``lambda t: weight[t].sum()``). Over several ranks, the parts of all are added.
        loss_in_pieces: True lets ``loss_fn`` see one micro-batch at a time; what is not a mean (or a sum) is refused
            then, and where that cannot be told (noise for each sample), your word counts. For outputs that are large
            beside the activations (dense prediction): neither they nor the loss's own graph are ever held for the
            whole batch. False lets it see the whole batch in two passes, whatever it is. By default, it sees one
            micro-batch at a time where one pass is enough and exact, else the whole batch.
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
    device = input_device(ranks.bare(model))
    as_sum = denominator is not None
    with put_back_on_error() as journal:
        # An error on one rank must not leave the others waiting for it: it is raised where all meet.
        (run, route), unknown = ranks.meet(
            lambda: _prepared(model, loss_fn, inputs, targets, micro_batch, as_sum, loss_in_pieces, journal),
            lambda prepared: float(prepared[1].unknown),
            device,
        )
        if unknown:
            at_first = (run.pieces[0].targets, run.pieces[0].size)
            foreign = ranks.from_first(at_first) if world_size() > 1 else None
            _, stateful = ranks.meet(lambda: route.settle(foreign), lambda _: float(route.stateful), device)
            if stateful:
                route.see_whole("each call of it changes its state")
        run.joins = return_outputs or not route.in_pieces
        (first, targets, _), total = ranks.meet(
            lambda: _started(run, route, targets, micro_batch is None, denominator), lambda started: started[2], device
        )
        if not 0 < total < math.inf:
            raise MicroBatchError(
                f"denominator={total}: the sum of the losses must be divided by a positive finite number"
            )
        loss = Loss(loss_fn, targets, scaler, world_size() / total, not as_sum, route.why_whole)
        if first is None:
            value, outputs = _one_pass(run, loss, route, return_outputs)
        elif route.in_pieces:
            value, outputs = _two_passes_in_pieces(run, loss, route, first, return_outputs)
        else:
            value, outputs = _two_passes(run, loss, route, first)
        value = ranks.mean_over_ranks(value)
    return (value, outputs) if return_outputs else value


def _prepared(
    model: nn.Module,
    loss_fn: Callable,
    inputs: Any,
    targets: Any,
    micro_batch: int | None,
    as_sum: bool,
    loss_in_pieces: bool | None,
    journal: Journal,
) -> tuple[Run, Route]:
    if micro_batch is None and targets is not None:
        raise MicroBatchError("targets beside a loader: without micro_batch=, inputs must yield (inputs, targets)")
    pieces = collect(inputs) if micro_batch is None else split(inputs, targets, micro_batch)
    inner = ranks.bare(model)
    run = Run(model, inner, heads_of(inner), pieces, input_device(inner))
    for norm in run.heads.values():
        journal.note_buffers(norm)
    journal.note(modules_in(loss_fn), inner)
    all_targets = [p.targets for p in pieces] if micro_batch is None else targets
    return run, Route(run, loss_fn, all_targets, as_sum, loss_in_pieces)


def _started(
    run: Run, route: Route, targets: Any, is_loader: bool, denominator: Denominator | None
) -> tuple[First | None, Any, float]:
    """What the first pass leaves, the targets of the whole batch, and what the sum of the losses is divided by."""
    try:
        if is_loader and (callable(denominator) or not route.in_pieces):
            targets = together(run.pieces)  # where nobody looks at them all at once, they need not fit together
        targets = to_device(targets, run.device)
        first = first_pass(run) if route.two_passes else None
    except Exception as error:
        if route.why_whole:
            error.add_note(f"loss_fn must see the whole batch: {route.why_whole}")
        raise
    return first, targets, run.samples if denominator is None else value_of(denominator, targets)


def _one_pass(run: Run, loss: Loss, route: Route, return_outputs: bool) -> tuple[Tensor, Any]:
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
        outputs, targets = run.structure(leaves, piece), to_device(piece.targets, run.device)
        route.check(outputs, piece)
        with refused("this LastNorm is inside loss_fn, where it would see one micro-batch at a time"):
            scaled, value = loss(outputs, targets, piece.size, str(piece))
        values.append(value)
        return scaled

    def before(piece: MicroBatch) -> str:
        return "The gradients of the micro-batches before it have been added: clear them" if piece.index else ""

    *earlier, last = run.pieces
    # The last backward waits for all ranks, so all must have come that far.
    with ranks.all_or_none(run.device, "Gradients of single micro-batches may have been added here: clear them"):
        for piece in earlier:
            with ranks.unsynchronised(run.model), _telling(before(piece)):
                scaled = forward(piece)
                with full_precision(run.device):
                    scaled.backward()
        with _telling(before(last)):
            scaled = forward(last)
    with full_precision(run.device):
        scaled.backward()
    outputs = run.structure(run.joined(parts)) if return_outputs else None
    return torch.stack(values).sum(), outputs


@contextlib.contextmanager
def _telling(consequence: str) -> Iterator[None]:
    """Let an error say what has become of the gradients."""
    try:
        yield
    except Exception as error:
        if isinstance(error, MicroBatchError) and consequence:
            raise type(error)(f"{error}. {consequence}") from error.__cause__
        if consequence:
            error.add_note(consequence)
        raise


@advising(_ONE_VALUE)
def _two_passes(run: Run, loss: Loss, route: Route, first: First) -> tuple[Tensor, Any]:
    with ranks.all_or_none(run.device):
        heads = whole_heads(run, first)
        whole = run.joined(list(outputs_of(run, first, {c: h.pieces(h.normed) for c, h in heads.items()})))
        leaves = [t.detach().requires_grad_(is_inexact(t)) if isinstance(t, Tensor) else t for t in whole]
        route.check_whole(leaves)
        scaled, value = loss(run.copied(leaves), loss.targets, run.samples, "the whole batch; no gradient was added")
        warn_of_whole(run, heads, whole, leaves, scaled)
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
    return value, run.structure(whole)


@advising(_ONE_VALUE)
def _two_passes_in_pieces(run: Run, loss: Loss, route: Route, first: First, return_outputs: bool) -> tuple[Tensor, Any]:
    """The same where the loss is a sum over samples: of outputs, no more than a micro-batch's are held."""
    values, parts, grads = [], [], []

    def loss_of(i: int, leaves: list[Any]) -> tuple[Tensor, Tensor]:
        piece = run.pieces[i]
        with refused("this LastNorm is inside loss_fn, which sees one micro-batch at a time"):
            return loss(run.copied(leaves, piece), to_device(piece.targets, run.device), piece.size, str(piece))

    with ranks.all_or_none(run.device):
        heads = whole_heads(run, first)
        fed = {c: [p.detach().requires_grad_() for p in h.pieces(h.normed)] for c, h in heads.items()}
        for i, leaves in enumerate(outputs_of(run, first, fed)):
            route.check(run.structure(leaves, run.pieces[i]), run.pieces[i])
            scaled, value = loss_of(i, leaves)
            warn_in_pieces(run, heads, {c: parts_of[i] for c, parts_of in fed.items()}, scaled)
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
    outputs = run.structure(run.joined(parts)) if return_outputs else None
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
            with _telling("The gradients are wrong: clear them"):
                leaves = run.call(run.model, piece)
            found = roots(i, leaves, replay)
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
