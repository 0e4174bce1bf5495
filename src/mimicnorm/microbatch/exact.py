"""``backward``: from a batch of any size to its exact gradient, one micro-batch in memory at a time.

1. ``first_pass``: every micro-batch runs without a graph, and only the raw logits are stored.
2. The LastNorms and the loss see the logits of the whole batch, which gives dL/dlogits. What follows a LastNorm inside
   the model runs in one more pass (``outputs_of``).
3. ``graph_pass``: every micro-batch runs again, with a graph and the same random numbers, and takes its part of
   dL/dlogits.

Without a LastNorm step 3 is enough if the loss is a mean over samples, which ``loss_scope`` finds out. If some
micro-batch shows that it is not, the loss sees the whole batch after all, less what has been added by then. Each step
is inside ``ranks.all_or_none``, so that an error on one rank is raised on all; ranks communicate only in between.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mimicnorm.arguments import finite
from mimicnorm.errors import MicroBatchError
from mimicnorm.layers import LastNorm
from mimicnorm.layers.last_norm import advising, world_size
from mimicnorm.microbatch import ranks
from mimicnorm.microbatch.batches import MicroBatch, collect, join_targets, split, to_device
from mimicnorm.microbatch.guards import heads_of, require_finite, require_inputs_unchanged, require_intact
from mimicnorm.microbatch.heads import Replay, require_same, warn_if_regression
from mimicnorm.microbatch.loss_scope import LossScope, WholeBatchNeededError
from mimicnorm.microbatch.passes import Root, Run, WholeOutputs, first_pass, graph_pass, outputs_of
from mimicnorm.microbatch.reach import modules_in
from mimicnorm.microbatch.replay import full_precision, input_device
from mimicnorm.microbatch.snapshot import restored_on_error
from mimicnorm.microbatch.trees import leaves

Denominator = float | Tensor | Callable[[Any], float | Tensor]

_ONE_VALUE = "This is all that backward was given: let the batch have two samples or more"
_CLEAR = ": clear them"


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
            anything. Over several ranks it sees each share, and must be a mean over samples (or a sum, with a
            ``denominator``). Where it would be computed in parts, it is called several times to find out whether it
            is one; ``loss_in_pieces=False`` has it called once, with the whole batch.
        inputs: A tensor, a tuple of call arguments or a dict of keyword arguments; without ``micro_batch``, anything
            that yields micro-batches as (inputs, targets). May stay in host memory.
        targets: Any structure of tensors or arrays that count the samples in their first dimension, and of numbers
            that belong to all samples.
        micro_batch: Samples to run at once.
        scaler: A ``torch.amp.GradScaler``; the gradients come out scaled.
        denominator: ``loss_fn`` returns a sum, to be divided by this: a number, or a function of the targets (class
            weights: ``lambda t: weight[t].sum()``). Over several ranks, the parts of all are added.
        loss_in_pieces: True lets ``loss_fn`` see one micro-batch at a time; what is not a mean (or a sum) is refused
            then; where that cannot be decided, it is taken for one. False lets it see the whole batch in two passes. By
            default, it sees one micro-batch at a time where one pass is enough and exact, else the whole batch.
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
    modules = set(inner.modules())
    norms = [m for m in modules if isinstance(m, LastNorm)]
    of_loss = [m for m in modules_in(loss_fn) if m not in modules]
    device = input_device(inner)
    with restored_on_error([*norms, *of_loss]), advising(_ONE_VALUE):
        with ranks.all_or_none(device, amounts=2) as total:
            require_intact(inner)
            pieces = _pieces(inputs, targets, micro_batch)
            run = Run(inner, heads_of(inner), pieces, device, joins=return_outputs)
            scope = LossScope(loss_fn, run, of_loss, denominator is not None, loss_in_pieces, scaler)
            total[0] = run.samples if denominator is None else _divisor(denominator, pieces, targets, device)
            total[1] = not scope.is_known_mean
        if not 0 < total[0] < math.inf:
            raise MicroBatchError(f"denominator={total[0]}: the sum of the losses must be divided by a positive number")
        scope.weight = world_size() / total[0]
        if not total[1]:  # on all ranks
            scope.probe = None
        if scope.probe is not None and world_size() > 1:
            scope.foreign = ranks.from_first((pieces[0].targets, pieces[0].size))
        added: list[Tensor] = []
        result = _loss_in_pieces(run, scope, return_outputs, added) if scope.in_pieces else None
        value, outputs = result or _loss_of_whole(run, scope, targets, added)
        ranks.synchronise_gradients(model)
        value = ranks.mean_over_ranks(value)
    return (value, outputs) if return_outputs else value


def _pieces(inputs: Any, targets: Any, micro_batch: int | None) -> list[MicroBatch]:
    if micro_batch is not None:
        return split(inputs, targets, micro_batch)
    if targets is not None:
        raise MicroBatchError(
            "micro_batch= is missing: give the number of samples to run at once, backward(model, loss_fn, inputs, "
            "targets, micro_batch=8). Without it, inputs must be a loader that yields (inputs, targets), and targets= "
            "is left out"
        )
    return collect(inputs)


def _divisor(denominator: Denominator, pieces: list[MicroBatch], targets: Any, device: torch.device | None) -> float:
    """Return what this rank's sum of losses is divided by; the parts of all ranks are added."""
    value: Any = denominator
    if callable(denominator):
        value = denominator(to_device(join_targets(pieces) if targets is None else targets, device))
    if isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) == 1:
        value = value.item()
    return finite(value, "denominator", least=0, error=MicroBatchError)


@contextlib.contextmanager
def _together(run: Run, amounts: int = 0, adds: bool = False) -> Iterator[list[float]]:
    """Raise on all ranks what fails inside, and tell of gradients that may have been added there or before."""
    state = f"Gradients of this batch may have been added here{_CLEAR}" if adds or run.has_added else ranks.UNTOUCHED
    with ranks.all_or_none(run.device, state, amounts) as total:
        try:
            yield total
        except Exception as error:
            if run.has_added:
                error.add_note(f"Gradients of this batch have been added{_CLEAR}")
            raise


def _loss_in_pieces(
    run: Run, scope: LossScope, return_outputs: bool, values: list[Tensor]
) -> tuple[Tensor, Any] | None:
    """Let the loss see one micro-batch at a time, so that no more outputs than those of one are stored.

    Without LastNorms the graph pass is the only one. Returns None if the loss turns out to need the whole batch;
    ``values`` are then the losses of the micro-batches whose gradients have been added.
    """
    start, versions = run.random_state(), [piece.versions() for piece in run.pieces]
    parts = []
    if scope.probe is not None:
        scope.left.begin()

    if run.heads:
        _normalise(run, scope)
        with _together(run):
            scope.left.find()
            for piece, outputs in zip(run.pieces, outputs_of(run), strict=True):
                scaled, value = scope.of_piece(outputs, piece)
                scope.check(run.structure(outputs, piece), piece)
                warn_if_regression(run.calls, scaled)
                with full_precision(run.device):
                    scaled.backward(inputs=[whole.normed_parts[piece.index] for whole in run.calls.values()])
                values.append(value)
        run.has_added = True
        for whole in run.calls.values():
            whole.backward()

    def roots(piece: MicroBatch, outputs: list[Any], replay: Replay) -> list[Root]:
        if return_outputs:
            parts.append([t.detach() if isinstance(t, Tensor) else t for t in outputs])
        if not run.heads:
            require_finite("", outputs, piece)
            scope.check(run.structure(outputs, piece), piece)
        scaled, value = scope.of_piece(outputs, piece)
        if run.heads:
            replay.compare("the loss", value, values[piece.index])
        else:
            values.append(value)
        return [(scaled, None)]

    with _together(run, amounts=1, adds=True) as needing_whole:
        try:
            graph_pass(run, roots)
        except WholeBatchNeededError as error:
            scope.see_whole(str(error))
            needing_whole[0] = 1
    if not needing_whole[0]:
        return torch.stack(values).sum(), run.structure(run.joined(parts)) if return_outputs else None
    with _together(run):
        for piece, before in zip(run.pieces, versions, strict=True):
            require_inputs_unchanged(piece, before)
        if needing_whole[0] != world_size():
            raise MicroBatchError("each call of loss_fn changes its state on some ranks only: give all the same loss")
    start.restore()
    return None


def _loss_of_whole(run: Run, scope: LossScope, targets: Any, added: list[Tensor]) -> tuple[Tensor, Any]:
    """Let the loss see the whole batch, in two passes, less what has been added by ``_loss_in_pieces``.

    ``targets`` is None if they come from a loader.
    """
    trains = _trains(run)
    run.join_outputs()
    _normalise(run, scope)
    with _together(run), scope.explained():
        whole = WholeOutputs(run, trains)
        scope.left.find()
        targets = to_device(join_targets(run.pieces) if targets is None else targets, run.device)
    with _together(run):
        where = "the whole batch" if added else "the whole batch; no gradient was added"
        scaled, value = scope(run.copied(whole.leaves), targets, run.samples, where)
        for piece in run.pieces if scope.probe is not None else ():
            scope.check(run.structure(whole.part(piece)), piece)
        replays = [Replay(piece, run.calls) for piece in run.pieces[: len(added)]]
        for replay, before in zip(replays, added, strict=True):
            added_then, again = scope.of_piece(whole.part(replay.piece), replay.piece)
            replay.compare("the loss", again, before)
            scaled = scaled - added_then
        require_same(replays)
        warn_if_regression(run.calls, scaled)
    run.has_added = True
    with _together(run), full_precision(run.device):
        scaled.backward()  # the parameters of the loss, or of a penalty in it, get their gradient here
    if trains:
        for head in run.calls.values():
            head.backward()
        del scaled  # its memory is needed now
        with _together(run):
            graph_pass(run, whole.roots())
    return value, run.structure([t.detach() if isinstance(t, Tensor) else t for t in whole.leaves])


def _normalise(run: Run, scope: LossScope) -> None:
    """Run the first pass and normalise the logits of the whole batch."""
    with _together(run, amounts=2) as keys, scope.explained():
        scope.left.begin()
        first_pass(run)
        key = zlib.crc32(repr(list(run.calls)).encode()) % 4096
        keys[:] = key, key * key
    if keys[0] ** 2 != world_size() * keys[1]:  # equal if and only if all keys are
        raise MicroBatchError("the ranks call different heads, or call them a different number of times")
    for head in run.calls.values():
        head.normalise(scope.in_pieces or _trains(run))


def _trains(run: Run) -> bool:
    """Whether the model, or what it is given, has anything that requires a gradient."""
    tensors = [*run.model.parameters(), *(t for m in run.model.modules() for t in vars(m).values())]
    tensors += [t for piece in run.pieces for t in leaves((piece.args, piece.kwargs))]
    return any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
