"""Which activations of a forward pass are encoded, found by their memory.

ReLU and the convolutions after it save the same tensor, or views of it. Each storage is encoded once; whoever saves it
gets the same payload, and the storage itself is given up. A tensor that somebody saves as it is stays as it is for all.
Entries end with their storage or with the forward pass; what is saved belongs to the graph alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mimicnorm.compress.codec import Code, Kind, Payload, encode
from mimicnorm.errors import CompressionError

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
Geometry = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and offset."""


class Plain:
    """A tensor saved as it is, by way of the hooks outside of ours if there are any."""

    def __init__(self, tensor: Tensor, outer: Hooks | None):
        tensor = tensor.detach()  # not the tensor itself: an output would hold the graph that holds it
        self._held = tensor if outer is None else outer[0](tensor)
        self._unpack = None if outer is None else outer[1]
        self._version = tensor._version

    def tensor(self) -> Tensor:
        """Return the tensor; with hooks, PyTorch itself does not look whether it was overwritten meanwhile."""
        if self._unpack is not None:
            return self._unpack(self._held)
        if self._held._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self._held.shape)} that the backward pass needs was changed by an in-place "
                f"operation: it is at version {self._held._version}, and was saved at version {self._version}"
            )
        return self._held


def refuse_second_derivatives(code: Code) -> None:
    """Raise in a backward pass that is itself to be differentiated."""
    if torch.is_grad_enabled():
        raise CompressionError(
            "a gradient was asked for with create_graph=True, and the activations it needs were saved in "
            f"{code.bits} bits: second derivatives would be those of rounded numbers. Run this forward pass outside of "
            "saved_activations, or with bits=32"
        )


@dataclass(eq=False)
class Encoded:
    """An encoded buffer, and which part of a storage it stands for: a dense range, or one tensor with gaps.

    Attributes:
        code: What its codes mean.
        codes: The codes.
        scales: The scale of each group.
        count: How many numbers there are.
        dtype: Of the numbers.
        geometry: Size, stride and offset in the buffer of the tensor that was encoded.
        start: Where the buffer starts in the storage.
        version: Of the storage, when it was encoded; in-place operations make another.
        gaps: Size, stride and offset in the storage, if the tensor had gaps and a dense copy was encoded; or None.
    """

    code: Code
    codes: Plain
    scales: Plain
    count: int
    dtype: torch.dtype
    geometry: Geometry
    start: int
    version: int
    gaps: Geometry | None

    def covers(self, tensor: Tensor) -> bool:
        """Whether a tensor of the same storage can be read from the buffer."""
        if tensor._version != self.version or tensor.dtype != self.dtype:
            return False
        if self.gaps is not None:
            return self.gaps == _geometry(tensor)
        first = tensor.storage_offset()
        last = first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return self.start <= first and last < self.start + self.count

    def view(self, tensor: Tensor) -> View:
        """Return the view that a tensor is."""
        size, stride, offset = _geometry(tensor)
        return View(self, self.geometry if self.gaps is not None else (size, stride, offset - self.start))


@dataclass(frozen=True, eq=False)
class View:
    """What the graph holds in place of an activation: a view of an encoded buffer."""

    encoded: Encoded
    geometry: Geometry

    def tensor(self) -> Tensor:
        """Decode."""
        e = self.encoded
        refuse_second_derivatives(e.code)
        flat = Payload(e.code, e.codes.tensor(), e.scales.tensor(), e.count, e.dtype).decode()
        return flat.as_strided(*self.geometry)


@dataclass(eq=False)
class _Entry:
    storage: weakref.ref
    marks: dict[int, Code] = field(default_factory=dict)  # by version
    encoded: list[Encoded] = field(default_factory=list)
    plain: weakref.WeakValueDictionary[tuple, Plain] = field(default_factory=weakref.WeakValueDictionary)


class Store:
    """The storages of one forward pass.

    Args:
        seed: Of the random numbers.
        outer: The hooks that would have been called without ours.
        saves_in_role: Whether it is known what saves a tensor; if not, it is saved as it is.
    """

    def __init__(self, seed: int, outer: Hooks | None = None):
        self._seed, self._outer = seed, outer
        self.saves_in_role: Callable[[Tensor], bool] = lambda _: True
        self._entries: dict[int, _Entry] = {}

    def mark(self, tensor: Tensor, code: Code) -> None:
        """Have a tensor encoded when it is saved; the first mark counts."""
        self._entry(tensor).marks.setdefault(tensor._version, code)

    def kind(self, tensor: Tensor) -> Kind | None:
        """Return what is known about a tensor's numbers."""
        entry = self._entry(tensor)
        kinds = [encoded.code.kind for encoded in entry.encoded if encoded.covers(tensor)]
        code = entry.marks.get(tensor._version)
        return kinds[0] if kinds else None if code is None else code.kind

    def encode(self, tensor: Tensor, code: Code) -> tuple[Encoded, Tensor] | None:
        """Return what a tensor is encoded to, and its codes; None if they would take more than it."""
        if code.payload_bytes(tensor.numel()) >= tensor.numel() * tensor.element_size():
            return None
        tensor = tensor.detach()
        self._seed += 1
        dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
        buffer = tensor if dense else tensor.clone()
        p = encode(buffer.as_strided((buffer.numel(),), (1,)), code, self._seed)
        whole, gaps = (tensor.shape, buffer.stride(), 0), None if dense else _geometry(tensor)
        codes, scales, start = self.keep(p.codes), self.keep(p.scales), tensor.storage_offset()
        return Encoded(code, codes, scales, p.count, p.dtype, whole, int(start), tensor._version, gaps), p.codes

    def add(self, tensor: Tensor, encoded: Encoded) -> None:
        """Have everybody who saves a tensor or its views hold what it was encoded to."""
        encoded.version = tensor._version
        self._entry(tensor).encoded.append(encoded)

    def pack(self, tensor: Tensor) -> View | Plain:
        """Return what the graph is to hold in place of a tensor."""
        if tensor.layout is not torch.strided:
            return Plain(tensor, self._outer)
        if not self.saves_in_role(tensor):
            return self.keep(tensor)
        entry = self._entry(tensor)
        for encoded in entry.encoded:
            if encoded.covers(tensor):
                return encoded.view(tensor)
        code = None if entry.plain else entry.marks.get(tensor._version)
        made = None if code is None else self.encode(tensor, code)
        if made is None:
            return self.keep(tensor)
        self.add(tensor, made[0])
        return made[0].view(tensor)

    def keep(self, tensor: Tensor) -> Plain:
        """Save a tensor as it is, once for all who save it."""
        entry, key = self._entry(tensor), (tensor._version, tensor.dtype, *_geometry(tensor))
        plain = entry.plain.get(key)
        if plain is None:
            plain = entry.plain[key] = Plain(tensor, self._outer)
        return plain

    def clear(self) -> None:
        """Forget all storages: the forward pass is over."""
        self._entries.clear()

    def _entry(self, tensor: Tensor) -> _Entry:
        storage = tensor.untyped_storage()
        key = storage._cdata
        entry = self._entries.get(key)
        if entry is None or entry.storage() is not storage:  # an address may be used again
            drop = functools.partial(_drop, self._entries, key)
            entry = self._entries[key] = _Entry(weakref.ref(storage, drop))
        return entry


def _drop(entries: dict[int, _Entry], key: int, _dead: weakref.ref) -> None:
    entries.pop(key, None)


def _geometry(tensor: Tensor) -> Geometry:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())
