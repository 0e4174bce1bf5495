"""Cut a batch into micro-batches along its samples, and join what belongs to several of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mimicnorm.arguments import positive_int
from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch.trees import children, is_record, leaves, map_leaves, map_tensors, rebuild


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of the batch, in the memory where the user keeps them.

    Attributes:
        index: Its place among the micro-batches, from 0.
        first: The number of its first sample in the batch.
        size: How many samples it has.
    """

    index: int
    first: int
    size: int
    args: tuple
    kwargs: dict
    targets: Any

    def versions(self) -> list[int]:
        """How often each input tensor has been written."""
        return [writes(t) for t in leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

    def __str__(self) -> str:
        return f"micro-batch {self.index} (samples {self.first} to {self.first + self.size - 1})"


def split(inputs: Any, targets: Any, micro_batch: int) -> list[MicroBatch]:
    """Cut a batch into micro-batches; the last may be smaller.

    Args:
        inputs: A tensor, a tuple of call arguments or a dict of keyword arguments. Tensors and NumPy arrays are cut
            along their first dimension; everything else goes to each micro-batch as it is.
        targets: Any structure, cut likewise.
        micro_batch: Samples in each.

    Example:
        >>> [m.size for m in split(torch.zeros(7, 3), torch.zeros(7), 3)]
        [3, 3, 1]
    """
    micro_batch = positive_int(micro_batch, "micro_batch", error=MicroBatchError)
    args, kwargs = _call(inputs)
    size = _size((args, kwargs), "inputs")
    _refuse_list(_list_of_samples((args, kwargs), size), "let a loader yield the micro-batches, without micro_batch=")
    _refuse_list(_list_of_samples(targets, size), _LOOKED_UP.format(size))
    if any(len(t) != size for t in leaves(targets) if counts_samples(t)):
        shapes = [tuple(t.shape) for t in leaves(targets) if counts_samples(t)]
        raise MicroBatchError(
            f"the inputs have {size} samples, the targets have shapes {shapes}: each tensor's first dimension must "
            "count the samples; give what belongs to all samples as a number or a 0-d tensor"
        )
    pieces = []
    for first in range(0, size, micro_batch):
        last = min(first + micro_batch, size)

        def cut(x: Any, first: int = first, last: int = last) -> Any:
            return x[first:last] if counts_samples(x) else x

        pieces.append(MicroBatch(len(pieces), first, last - first, *map_leaves(cut, (args, kwargs, targets))))
    return pieces


def collect(loader: Iterable) -> list[MicroBatch]:
    """Take the micro-batches from a loader that yields (inputs, targets), and keep them.

    Each is used twice, and a loader may shuffle or draw new crops the second time.
    """
    if isinstance(loader, (Tensor, Mapping)) or not isinstance(loader, Iterable):
        raise MicroBatchError(
            f"without micro_batch=, inputs must yield micro-batches as (inputs, targets); got {type(loader).__name__}. "
            "Give micro_batch= to cut a batch"
        )
    pieces: list[MicroBatch] = []
    tensors: list[tuple[int, Tensor, int]] = []
    first = 0
    for item in loader:
        if not isinstance(item, Sequence) or len(item) != 2:
            raise MicroBatchError(
                f"the loader must yield (inputs, targets); item {len(pieces)} is a {type(item).__name__}"
                + (f" of {len(item)}" if isinstance(item, (Sequence, dict)) else "")
            )
        args, kwargs = _call(item[0])
        size = _size((args, kwargs), f"inputs of micro-batch {len(pieces)}")
        pieces.append(MicroBatch(len(pieces), first, size, args, kwargs, item[1]))
        first += size
        tensors += [(len(pieces), t, writes(t)) for t in leaves(tuple(item)) if counts_samples(t, Tensor)]
    _refuse_reuse(tensors, isinstance(loader, Sequence))
    if not pieces:
        raise MicroBatchError("the loader yielded no micro-batch: a generator that was used before is empty")
    return pieces


def _refuse_reuse(tensors: list[tuple[int, Tensor, int]], at_once: bool) -> None:
    """Raise if a loader wrote into what it had yielded; the items of a list are all there at once."""
    owners: dict[int, int] = {}
    for number, t, version in tensors:
        shared = not at_once and t.numel() > 0 and owners.setdefault(t.data_ptr(), number) != number
        if shared or writes(t) != version:
            raise MicroBatchError(
                "the loader uses the memory of one micro-batch again for another: all micro-batches are stored "
                "until the end, so yield copies (.clone())"
            )


def join_targets(pieces: list[MicroBatch]) -> Any:
    """Return the targets of the whole batch."""
    lists = [_list_of_samples(p.targets, p.size) for p in pieces]
    if all(x is not None for x in lists):  # otherwise it is as long as some micro-batch by chance
        _refuse_list(lists[0], _LOOKED_UP.format("the number of samples"))
    return join([p.targets for p in pieces], [p.size for p in pieces])


def join(parts: list[Any], sizes: list[int]) -> Any:
    """Join targets or outputs of several micro-batches; raise where it is not clear how.

    Tensors and arrays that count the samples are concatenated, and so are lists of one item per sample. What belongs
    to all samples has to be the same in all parts.
    """
    both = list(zip(parts, sizes, strict=True))
    if all(_one_each(x, n) for x, n in both):
        return [item for x in parts for item in x]
    if any(children(x) is not None for x in parts):
        rows = [children(x) or {} for x in parts]
        if any(row.keys() != rows[0].keys() for row in rows):
            raise MicroBatchError("the targets must have the same structure in each micro-batch")
        return rebuild(parts[0], {key: join([row[key] for row in rows], sizes) for key in rows[0]})
    for kind, concatenate in ((Tensor, torch.cat), (np.ndarray, np.concatenate)):
        if all(counts_samples(x, kind) and len(x) == n for x, n in both):
            if len(shapes := {tuple(x.shape[1:]) for x in parts}) > 1:
                listed = ", ".join(map(str, sorted(shapes)))
                raise MicroBatchError(
                    f"the targets have different shapes in some micro-batches ({listed} per sample), so they cannot be "
                    "joined: give all samples the same size"
                )
            return concatenate(parts)
    if not all(_same(x, parts[0]) for x in parts):
        raise MicroBatchError(
            f"a target that belongs to a whole micro-batch differs between them ({parts[0]!r}, ...); give one value "
            "per sample as a tensor instead"
        )
    return parts[0]


def mix(structure: Any, size: int, count: int) -> Any:
    """Make outputs of ``count`` other samples from those of ``size``: samples chosen and scaled down at random.

    They differ from each other, however alike the samples are, and stay in the range of the samples: between 0 and 1,
    positive, boxes. The values of a single sample are scaled down each by itself.
    """
    generator = torch.Generator().manual_seed(count)
    chosen = torch.randint(size, (count,), generator=generator)

    def rows(x: Any) -> Any:
        if _one_each(x, size):
            return [x[int(j)] for j in chosen]
        if not counts_samples(x, Tensor) or len(x) != size:
            return x
        taken = x.detach()[chosen.to(x.device)]
        if not (x.is_floating_point() or x.is_complex()):
            return taken
        factors = torch.rand(count, *(x.shape[1:] if size == 1 else [1] * (x.dim() - 1)), generator=generator)
        return (0.2 + 0.8 * factors).to(x.device, x.dtype) * taken

    return map_leaves(rows, structure, is_leaf=lambda x: _one_each(x, size))


def require_joinable(name: str, part: Any, piece: MicroBatch, first: Any) -> None:
    """Raise for a leaf of a micro-batch's output that cannot be joined with that of the first micro-batch."""
    if isinstance(part, Tensor) != isinstance(first, Tensor):
        kinds = f"{type(first).__name__} in the first micro-batch and a {type(part).__name__} in {piece}"
        raise MicroBatchError(f"{name} is a {kinds}: return the same from each")
    if not isinstance(part, Tensor):
        if isinstance(first, (Number, str, bytes, np.ndarray)) and not _same(part, first):
            raise MicroBatchError(
                f"{name} is {first!r} in the first micro-batch and {part!r} in {piece}: the whole batch has only one. "
                "Return it as a tensor of one value per sample, or leave it out of the model's output"
            )
        return
    if part.dim() == 0 or part.shape[0] != piece.size:
        raise MicroBatchError(
            f"{name} has shape {tuple(part.shape)} for {piece}: its first dimension must count the samples. "
            "Leave it out of the model's output, or move it to the loss"
        )
    if part.shape[1:] != first.shape[1:]:
        raise MicroBatchError(
            f"{name} has a different shape in some micro-batches ({tuple(first.shape[1:])} and "
            f"{tuple(part.shape[1:])} per sample), so they cannot be joined: give all samples the same size"
        )


def to_device(structure: Any, device: torch.device | None) -> Any:
    """Copy the tensors of a structure to a device."""
    if device is None:
        return structure
    return map_tensors(lambda t: t.to(device, non_blocking=True), structure)


def counts_samples(x: Any, kind: Any = (Tensor, np.ndarray)) -> bool:
    """Whether something has a first dimension, which counts the samples."""
    return isinstance(x, kind) and x.ndim > 0


def _call(inputs: Any) -> tuple[tuple, dict]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.shape == y.shape and bool((x == y).all()))
    arrays = isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
    return x is y or (np.array_equal(x, y) if arrays else bool(x == y))


def writes(t: Tensor) -> int:
    """How often a tensor has been written."""
    return 0 if t.is_inference() else t._version  # inference tensors do not count


_LOOKED_UP = (
    "give the samples' numbers as targets, torch.arange({}), and look the items up in loss_fn: "
    "lambda output, i: criterion(output, [items[j] for j in i])"
)


def _list_of_samples(structure: Any, size: int) -> list | tuple | None:
    """The first list of one item per sample, if there is one: it can be neither cut nor joined."""
    nodes = leaves(structure, is_leaf=lambda x: size > 1 and _one_each(x, size))
    return next((x for x in nodes if size > 1 and _one_each(x, size)), None)


def tensors_of_all(structure: Any, size: int) -> list[Tensor]:
    """List the tensors that have neither a row nor an item of a list for each sample."""
    nodes = leaves(structure, is_leaf=lambda x: _one_each(x, size))
    return [t for t in nodes if isinstance(t, Tensor) and not (counts_samples(t) and len(t) == size)]


def _one_each(x: Any, size: int) -> bool:
    """Whether this is a list of one item per sample.

    Lists of tensors that count the samples are not, nor are lists of nothing but None.
    """
    if not isinstance(x, (list, tuple)) or len(x) != size or all(i is None for i in x):
        return False
    of_all = [len(t) == size for t in leaves(x) if counts_samples(t)]
    return not of_all or not all(of_all) or all(isinstance(i, dict) or is_record(i) for i in x)


def _refuse_list(items: list | tuple | None, remedy: str) -> None:
    if items is None:
        return
    values = all(isinstance(i, (Number, str, Tensor, np.ndarray)) and not counts_samples(i) for i in items)
    kind = "values" if values else f"items ({', '.join(sorted({type(i).__name__ for i in items}))})"
    remedy = "give one value per sample as a tensor or a NumPy array" if values else remedy
    raise MicroBatchError(
        f"a list of {len(items)} {kind} for {len(items)} samples, which can be neither cut nor joined: {remedy}"
    )


def _size(structure: Any, what: str) -> int:
    tensors = [t for t in leaves(structure) if counts_samples(t)]
    sizes = {len(t) for t in tensors}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [tuple(t.shape) for t in tensors]
        raise MicroBatchError(
            f"{what}: the number of samples is not clear from shapes {shapes}; every tensor's first dimension must "
            "count the samples, at least one"
        )
    return sizes.pop()
