"""Put the state of modules back: after a loss that was only probed, and after a batch that failed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator

from torch import Generator, Tensor, nn


class Snapshot:
    """The state of modules, without their children: buffers, attributes, their random generators; not parameters."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._attributes = [(m, dict(m.__dict__)) for m in modules]
        values = [v for _, attributes in self._attributes for v in attributes.values()]
        self._containers = [(v, copy.copy(v)) for v in values if isinstance(v, (dict, list, set))]
        self._generators = [(g, g.get_state()) for g in values if isinstance(g, Generator)]
        self._tensors = [(m, k, t, t.detach().clone()) for m, _ in self._attributes for k, t in _tensors(m).items()]

    def restore(self) -> set[str]:
        """Put the state back, in place; return the classes of the modules whose tensors had changed."""
        changed = {
            type(m).__name__ for m, k, t, value in self._tensors if _tensors(m).get(k) is not t or not _equal(t, value)
        }
        for m, attributes in self._attributes:
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for container, content in self._containers:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for generator, state in self._generators:
            generator.set_state(state)
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
