"""Refuse what would make the gradient silently wrong: mixed samples, buffers that move, a lost LastNorm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import MicroBatchError, NonFiniteError
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch.batches import MicroBatch, writes
from mimicnorm.surgery.convert import check


def require_intact(model: nn.Module) -> None:
    """Raise for a model that cuts its batch itself, or a head that was given a LastNorm and has none."""
    if isinstance(model, nn.DataParallel):
        raise MicroBatchError(
            "nn.DataParallel cuts each micro-batch again, in threads; use DistributedDataParallel, or the bare module"
        )
    if any("_mimicnorm" in m.__dict__ for m in model.modules()):
        check(model)


def heads_of(model: nn.Module) -> dict[str, LastNorm]:
    """Return the LastNorms in training mode, by the name of the layer they stand in; raise if samples mix elsewhere."""
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


@contextlib.contextmanager
def unchanged(named: Callable[[], Iterable[tuple[str, Tensor]]], why: str) -> Iterator[None]:
    """Raise, with its name and why that is wrong, for a tensor that is written or replaced inside."""
    alive = list(named())  # to the end: the id of a freed tensor may be another's
    before = {name: (id(t), writes(t)) for name, t in alive}
    yield
    after = {name: (id(t), writes(t)) for name, t in named()}
    changed = [readable(name) for name in before | after if before.get(name) != after.get(name)]
    del alive
    if changed:
        raise MicroBatchError(f"{', '.join(changed[:3])}: {why}")


def require_inputs_unchanged(piece: MicroBatch, versions: list[int]) -> None:
    """Raise if a forward pass has written into its inputs since these versions."""
    if piece.versions() != versions:
        raise MicroBatchError(
            f"the forward pass of {piece} writes into its inputs, so it would see others when it runs again. Let the "
            "model copy them first"
        )


def require_finite(name: str, tensors: list[Any], piece: MicroBatch) -> None:
    """Raise for logits of a head (or, without a name, of the model) that are NaN or infinite."""
    for t in tensors:
        if isinstance(t, Tensor) and is_inexact(t) and not bool(t.isfinite().all()):
            kind = "NaN" if bool(t.isnan().any()) else "infinite"
            where = f"{name}: " if name else ""
            raise NonFiniteError(f"{where}{kind} logits in {piece}. Look at these samples, or lower the learning rate")


def is_inexact(t: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return t.is_floating_point() or t.is_complex()


def readable(name: str) -> str:
    """Return a qualified name as the user wrote it, without what ``torch.compile`` put in."""
    return name.replace("_orig_mod.", "") or "the model itself"
