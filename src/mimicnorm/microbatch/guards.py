"""Refuse what would make the gradient silently wrong: mixed samples, state that moves, a lost LastNorm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch
from mimicnorm.microbatch.heads import is_inexact
from mimicnorm.surgery.convert import check


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
