"""Take a batch apart along its samples, whatever structure holds it, and put results together again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError
from mimicnorm.microbatch.trees import Tree


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of the batch, where the user keeps them (on the host, perhaps).

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
        return [version(t) for t in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(t, Tensor)]

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
    if not isinstance(micro_batch, Integral) or isinstance(micro_batch, bool) or micro_batch < 1:
        raise MicroBatchError(
            f"micro_batch={micro_batch!r}: give the number of samples that fit, a whole number from 1 on"
        )
    args, kwargs = _call(inputs)
    size = _size((args, kwargs), "inputs")
    _refuse_lists((args, kwargs), size, "let a loader yield the micro-batches, without micro_batch=")
    _refuse_lists(targets, size, _LOOKED_UP.format(size))
    if any(len(t) != size for t in samples_in(targets)):
        shapes = [tuple(t.shape) for t in samples_in(targets)]
        raise MicroBatchError(
            f"the inputs have {size} samples, the targets have shapes {shapes}: each tensor's first dimension must "
            "count the samples; give what belongs to all samples as a number or a 0-d tensor"
        )
    pieces = []
    for first in range(0, size, int(micro_batch)):
        last = min(first + micro_batch, size)

        def cut(x: Any, first: int = first, last: int = last) -> Any:
            return x[first:last] if _counts(x) else x

        a, k, t = pytree.tree_map(cut, (args, kwargs, targets))
        pieces.append(MicroBatch(len(pieces), first, last - first, a, k, t))
    return pieces


def collect(loader: Iterable) -> list[MicroBatch]:
    """Take the micro-batches from a loader that yields (inputs, targets); they are kept as they come.

    Each is used twice, and a loader may shuffle or draw new crops the second time.
    """
    if isinstance(loader, (Tensor, dict)) or not isinstance(loader, Iterable):
        raise MicroBatchError(
            f"without micro_batch=, inputs must yield micro-batches as (inputs, targets); got {type(loader).__name__}. "
            "Give micro_batch= to cut a batch"
        )
    pieces: list[MicroBatch] = []
    kept: list[tuple[int, Tensor, int]] = []
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
        kept += [(len(pieces), t, version(t)) for t in pytree.tree_leaves(tuple(item)) if _counts(t, Tensor)]
    _refuse_reuse(kept, isinstance(loader, Sequence))
    if not pieces:
        raise MicroBatchError("the loader yielded no micro-batch: a generator that was used before is empty")
    return pieces


def _refuse_reuse(kept: list[tuple[int, Tensor, int]], at_once: bool) -> None:
    """Raise if a loader wrote into what it had yielded; the items of a list are all there at once."""
    owners: dict[int, int] = {}
    for number, t, written in kept:
        shared = not at_once and t.numel() > 0 and owners.setdefault(t.data_ptr(), number) != number
        if shared or version(t) != written:
            raise MicroBatchError(
                "the loader uses the memory of one micro-batch again for another: they are kept as they come, so "
                "yield copies (.clone())"
            )


def together(pieces: list[MicroBatch]) -> Any:
    """The targets of the whole batch."""
    lists = [_list_of_samples(p.targets, p.size) for p in pieces]
    if all(found is not None for found in lists):  # else it is as long as some micro-batch by chance
        _refuse_list(lists[0], _LOOKED_UP.format("the number of samples"))
    return side_by_side([p.targets for p in pieces], [p.size for p in pieces])


def side_by_side(parts: list[Any], sizes: list[int]) -> Any:
    """What several micro-batches have, targets or outputs, in one structure; raises where it is not clear how.

    Tensors and arrays that count the samples are joined, and so are lists of one item per sample; whatever belongs to
    all samples has to be the same in all.
    """
    both = list(zip(parts, sizes, strict=True))
    if all(_one_each(x, n) for x, n in both):
        return [item for x in parts for item in x]
    if not all(pytree.tree_is_leaf(x) for x in parts):
        tree = Tree(parts[0], "the first micro-batch", "the targets", one_level=not pytree.tree_is_leaf(parts[0]))
        columns = zip(*(tree.leaves(x, "another") for x in parts), strict=True)
        return tree.structure([side_by_side(list(column), sizes) for column in columns])
    for kind, joined in ((Tensor, torch.cat), (np.ndarray, np.concatenate)):
        if all(_counts(x, kind) and len(x) == n for x, n in both):
            if len(shapes := {tuple(x.shape[1:]) for x in parts}) > 1:
                listed = ", ".join(map(str, sorted(shapes)))
                raise MicroBatchError(
                    f"the targets have different shapes in some micro-batches ({listed} per sample), so they cannot be "
                    "put together: give all samples the same size"
                )
            return joined(parts)
    if not all(_same(x, parts[0]) for x in parts):
        raise MicroBatchError(
            f"a target that belongs to a whole micro-batch differs between them ({parts[0]!r}, ...); give one value "
            "per sample as a tensor instead"
        )
    return parts[0]


def resampled(structure: Any, size: int, wanted: int) -> Any:
    """Outputs as other samples might have them: mixtures of two samples each, made smaller by a random factor.

    So they differ, however alike the samples are, and stay where samples may be: between 0 and 1, positive, boxes.

    Args:
        structure: Outputs.
        size: The number of samples in them.
        wanted: The number of samples to make.
    """
    generator = torch.Generator().manual_seed(wanted)
    one = torch.randint(size, (wanted,), generator=generator)
    other = (one + torch.randint(1, max(size, 2), (wanted,), generator=generator)) % size
    share = 0.1 + 0.8 * torch.rand(wanted, generator=generator)
    factor = 0.2 + 0.8 * torch.rand(wanted, generator=generator)

    def rows(x: Any) -> Any:
        if _one_each(x, size):
            return [x[int(j)] for j in one]
        if not _counts(x, Tensor) or len(x) != size:
            return x
        a, b = (x.detach()[picked.to(x.device)] for picked in (one, other))
        if not (x.is_floating_point() or x.is_complex()):
            return a
        of_a, of_both = (t.to(x.device, x.dtype).reshape(-1, *[1] * (x.dim() - 1)) for t in (share, factor))
        return (of_both * (of_a * a + (1 - of_a) * b)).requires_grad_()

    return pytree.tree_map(rows, structure, is_leaf=lambda x: _one_each(x, size))


def join(name: str, parts: list[Tensor], pieces: list[MicroBatch]) -> Tensor:
    """One output tensor of the whole batch from those of the micro-batches."""
    for part, piece in zip(parts, pieces, strict=True):
        require_joinable(name, part, piece, parts[0])
    return torch.cat(parts)


def require_joinable(name: str, part: Any, piece: MicroBatch, first: Any) -> None:
    """Raise for a micro-batch's output of which, with that of the first micro-batch, no whole can be made."""
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
            f"{tuple(part.shape[1:])} per sample), so they cannot be put together: give all samples the same size"
        )


def to_device(structure: Any, device: torch.device | None) -> Any:
    """Copy the tensors of a structure to a device."""
    if device is None:
        return structure
    return pytree.tree_map_only(Tensor, lambda t: t.to(device, non_blocking=True), structure)


def _call(inputs: Any) -> tuple[tuple, dict]:
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def samples_in(structure: Any) -> list[Any]:
    """The tensors and arrays that count the samples in their first dimension."""
    return [t for t in pytree.tree_leaves(structure) if _counts(t)]


def _counts(x: Any, kind: Any = (Tensor, np.ndarray)) -> bool:
    return isinstance(x, kind) and x.ndim > 0


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x is y or (x.shape == y.shape and bool((x == y).all()))
    arrays = isinstance(x, np.ndarray) or isinstance(y, np.ndarray)
    return x is y or (np.array_equal(x, y) if arrays else bool(x == y))


def version(t: Tensor) -> int:
    """How often a tensor has been written; inference tensors do not say."""
    return 0 if t.is_inference() else t._version


_LOOKED_UP = (
    "give the samples' numbers as targets, torch.arange({}), and look the items up in loss_fn: "
    "lambda output, i: criterion(output, [items[j] for j in i])"
)


def _refuse_lists(structure: Any, size: int, remedy: str) -> None:
    """Raise for a list of one item per sample: its items, not the list, would be cut or go to every micro-batch."""
    if (found := _list_of_samples(structure, size)) is not None:
        _refuse_list(found, remedy)


def _list_of_samples(structure: Any, size: int) -> list | tuple | None:
    """A list of one item per sample, if there is one.

    What is taken are lists of tensors that count the samples, with numbers between them, and of nothing but None.
    """
    leaves = pytree.tree_leaves(structure, is_leaf=lambda x: size > 1 and _one_each(x, size))
    return next((x for x in leaves if size > 1 and _one_each(x, size)), None)


def _one_each(x: Any, size: int) -> bool:
    if not isinstance(x, (list, tuple)) or len(x) != size or all(i is None for i in x):
        return False
    counts = [len(t) == size for t in samples_in(x)]
    return not counts or not all(counts) or all(isinstance(i, dict) for i in x)


def _refuse_list(x: Any, remedy: str) -> None:
    values = all(isinstance(i, (Number, str, Tensor, np.ndarray)) and not _counts(i) for i in x)
    kind = "values" if values else f"items ({', '.join(sorted({type(i).__name__ for i in x}))})"
    remedy = "give one value per sample as a tensor or a NumPy array" if values else remedy
    raise MicroBatchError(
        f"a list of {len(x)} {kind} for {len(x)} samples, which can be neither cut nor joined: {remedy}"
    )


def _size(structure: Any, what: str) -> int:
    tensors = samples_in(structure)
    sizes = {len(t) for t in tensors}
    if len(sizes) != 1 or 0 in sizes:
        shapes = [tuple(t.shape) for t in tensors]
        raise MicroBatchError(
            f"{what}: the number of samples is not clear from shapes {shapes}; every tensor's first dimension must "
            "count the samples, at least one"
        )
    return sizes.pop()
