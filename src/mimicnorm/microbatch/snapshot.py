"""Put the state of modules back: after a loss that was only probed, and after a batch that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from mimicnorm.surgery import isolate


class Snapshot:
    """The state of modules: attributes, containers and random generators; of buffers and tensors the values, too."""

    def __init__(self, modules: Iterable[nn.Module]):
        modules = list(modules)
        self._restore_attributes = isolate.snapshot(nn.ModuleList(modules))
        self._tensors = [(m, k, t, t.detach().clone()) for m in modules for k, t in _tensors(m).items()]

    def restore(self) -> set[str]:
        """Put the state back, in place; return the classes of the modules whose tensors had changed."""
        changed = {
            type(m).__name__ for m, k, t, value in self._tensors if _tensors(m).get(k) is not t or not _equal(t, value)
        }
        self._restore_attributes()
        for _, _, tensor, value in self._tensors:
            if not _equal(tensor, value):
                if tensor.shape != value.shape:
                    tensor.data = value
                tensor.data.copy_(value)
        return changed


@contextlib.contextmanager
def restored_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put the state of modules back if anything raises inside."""
    snapshot = Snapshot(modules)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own buffers, and the tensors among its attributes."""
    buffers = dict(module._buffers.items())  # of a scripted module, no dict
    return {k: t for k, t in (module.__dict__ | buffers).items() if isinstance(t, Tensor)}


def _equal(a: Tensor, b: Tensor) -> bool:
    """By value: batch statistics are written without a count in the tensor's version. NaN is equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
