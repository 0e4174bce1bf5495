"""Refuse what would make the gradient silently wrong: mixed samples, state that moves, a lost LastNorm."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch, samples_in
from mimicnorm.microbatch.heads import is_inexact
from mimicnorm.surgery import check


def heads_of(model: nn.Module) -> dict[str, LastNorm]:
    """The LastNorms that look at the batch, by the name of the layer they stand in.

    Raises if samples mix anywhere else, or if a head that was given a LastNorm has none.
    """
    if isinstance(model, nn.DataParallel):
        raise MicroBatchError(
            "nn.DataParallel cuts each micro-batch again, in threads; use DistributedDataParallel, or the bare module"
        )
    if any("_mimicnorm" in m.__dict__ for m in model.modules()):
        check(model)
    mixing = [
        f"{readable(name)} ({type(m).__name__})"
        for name, m in model.named_modules()
        if isinstance(m, _BatchNorm) and not isinstance(m, LastNorm) and (m.training or m.running_mean is None)
    ]
    if mixing:
        more = f" and {len(mixing) - 3} more" if len(mixing) > 3 else ""
        raise MicroBatchError(
            f"{', '.join(mixing[:3])}{more}: a BatchNorm in training mode mixes the samples of a micro-batch, so no "
            "micro-batches can give the gradient of the whole. Take it out with mimicnorm.convert_, or freeze it "
            "with .eval()"
        )
    return {
        readable(name.replace("_orig_mod.", "").removesuffix("last_norm").rstrip(".")): m
        for name, m in model.named_modules()
        if isinstance(m, LastNorm) and m.training
    }


def mixes_samples(loss_fn: object) -> bool:
    """Whether a loss is a module with batch statistics of its own."""
    loss, _ = _unwrapped(loss_fn)
    return isinstance(loss, nn.Module) and any(isinstance(m, _BatchNorm) and m.training for m in loss.modules())


def _unwrapped(loss_fn: Any) -> tuple[Any, dict[str, Any]]:
    """The module or function inside partials, ``torch.compile`` and a module's bound ``forward``, and its keywords."""
    keywords: dict[str, Any] = {}
    while True:
        owner = getattr(loss_fn, "__self__", None)
        compiled = getattr(loss_fn, "_orig_mod", getattr(loss_fn, "_torchdynamo_orig_callable", None))
        if isinstance(loss_fn, functools.partial):
            keywords, loss_fn = {**loss_fn.keywords, **keywords}, loss_fn.func
        elif compiled is not None:
            loss_fn = inspect.unwrap(compiled)  # a partial is wrapped once more
        # Another method of a module is a function of the user's: it may use no more than a part of the module.
        elif isinstance(owner, nn.Module) and loss_fn.__name__ in ("forward", "_wrapped_call_impl", "_call_impl"):
            loss_fn = owner
        else:
            return loss_fn, keywords


def require_mean(loss_fn: Any, targets: Any) -> None:
    """Raise for a loss that is known not to be a mean over samples, where it will be computed in pieces.

    Torch's losses as modules, functions or partials of them, and what resembles them.
    """
    loss, keywords = _unwrapped(loss_fn)
    of_torch = _is_of_torch(loss)
    if isinstance(loss, nn.Module):
        parts: list[Any] = list(loss.modules())
    elif of_torch:
        parts = [SimpleNamespace(**_defaults(loss) | keywords)]
    else:  # of a function of the user's, no more is known than what it is asked for by name
        parts = [SimpleNamespace(reduction=keywords.get("reduction"))]
    # Inside a module of the user's, a sum may be divided, and single values may be averaged.
    reduction = _reduction(parts[0])
    if reduction == "sum" or (of_torch and reduction == "none"):
        raise _not_a_mean(f'reduction="{reduction}"', reduction == "sum")
    classes = [t for t in samples_in(targets) if isinstance(t, Tensor) and not t.is_floating_point()]
    for part in parts:
        ignored = getattr(part, "ignore_index", None)  # the losses that divide by the weight of the classes
        if ignored is None or _reduction(part) != "mean":
            continue
        if classes and getattr(part, "weight", None) is not None:
            raise _not_a_mean("class weights")
        if any(bool((t == ignored).any()) for t in classes):
            raise _not_a_mean(f"targets to ignore ({ignored})")


def _is_of_torch(loss: Any) -> bool:
    home = type(loss) if isinstance(loss, nn.Module) else loss
    return (getattr(home, "__module__", None) or "").partition(".")[0] in ("torch", "torchvision")


def _defaults(function: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # written in C
        return {}
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _reduction(part: Any) -> Any:
    """How a loss puts its values together, by today's argument or by the two that came before it."""
    if getattr(part, "reduce", None) is False:
        return "none"
    return "sum" if getattr(part, "size_average", None) is False else getattr(part, "reduction", "mean")


def _not_a_mean(what: str, is_sum: bool = False) -> MicroBatchError:
    remedy = 'Take reduction="mean", or give' if is_sum else 'Let loss_fn return a sum (reduction="sum") and give'
    return MicroBatchError(
        f"a loss with {what} is not a mean over samples, and here it is computed in pieces. {remedy} what to divide "
        "by: denominator=lambda targets: ..."
    )


def require_inputs_unchanged(piece: MicroBatch, before: list[int]) -> None:
    """Raise if a forward pass has written into its inputs."""
    if piece.versions() != before:
        raise MicroBatchError(
            f"the forward pass of {piece} writes into its inputs, so it would see others when it runs again. Let the "
            "model copy them first"
        )


def require_finite(found: dict[str, list[Any]], piece: MicroBatch, consequence: str = "") -> None:
    """Raise for logits, by the name of their head, that are NaN or infinite."""
    for name, tensors in found.items():
        for t in tensors:
            if isinstance(t, Tensor) and is_inexact(t) and not bool(t.isfinite().all()):
                kind = "NaN" if bool(t.isnan().any()) else "infinite"
                where = f"{name}: " if name else ""
                raise NonFiniteError(
                    f"{where}{kind} logits in {piece}{consequence}. Look at these samples, or lower the learning rate"
                )


class BufferGuard:
    """Notices a buffer that a forward pass writes or replaces."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.before = self._state()

    def _state(self) -> dict[str, tuple[Tensor, int]]:
        # The tensor itself is kept, not its id: a freed tensor's id may be another's.
        return {name: (b, b._version) for name, b in self.model.named_buffers()}

    @contextlib.contextmanager
    def before_each(self, inner: nn.Module, wrapped: nn.Module) -> Iterator[None]:
        """Start anew where DistributedDataParallel hands over: it may have sent the buffers of rank 0 before."""
        if wrapped is inner:
            yield
            return

        def note(*_: object) -> None:
            self.before = self._state()

        hook = inner.register_forward_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def require_unchanged(self, piece: MicroBatch) -> None:
        """Raise with the names of the buffers that have changed since the start."""
        now = self._state()
        changed = [
            readable(name)
            for name in self.before | now
            if name not in now
            or name not in self.before
            or now[name][0] is not self.before[name][0]
            or now[name][1] != self.before[name][1]
        ]
        if changed:
            raise MicroBatchError(
                f"{', '.join(changed[:3])}: the forward pass of {piece} changed this buffer, so the samples "
                "that come later, or again, meet another network. Put the module that owns it into eval mode, or take "
                "it out"
            )


def readable(name: str) -> str:
    """A qualified name as the user wrote it, without what ``torch.compile`` put in."""
    return name.replace("_orig_mod.", "") or "the model itself"
