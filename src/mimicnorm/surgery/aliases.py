"""Which tensors share memory: a write to one is a write to all its views."""

from __future__ import annotations

from torch import Tensor


class Aliases:
    """The tensors of a pass, by the memory that they show."""

    def __init__(self) -> None:
        self._views: dict[int, list[Tensor]] = {}

    def add(self, t: Tensor) -> None:
        """Note a tensor, and keep it alive: its memory must not be used again."""
        views = self._views.setdefault(storage_of(t), [])
        if not any(t is v for v in views):
            views.append(t)

    def of(self, t: Tensor) -> list[Tensor]:
        """The noted tensors that share an element with this one, itself left out."""
        return [v for v in self._views.get(storage_of(t), ()) if v is not t and not _disjoint(v, t)]


def storage_of(t: Tensor) -> int:
    """What is equal for two tensors that share memory, while they live."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return id(t)


def _disjoint(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one memory share no element, as far as they have the same strides (chunks, slices)."""
    if a.stride() != b.stride() or a.dim() != b.dim():
        return False
    rest = abs(int(a.storage_offset()) - int(b.storage_offset()))
    lower = a if a.storage_offset() <= b.storage_offset() else b
    for stride, size in sorted(zip(lower.stride(), lower.shape, strict=True), reverse=True):
        if stride > 0:
            steps, rest = divmod(rest, int(stride))
            if steps >= size:
                return True
    return rest > 0
