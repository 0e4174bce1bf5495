"""The batch dimension of an example: how many samples, and the same example with another number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mimicnorm.errors import ExampleError
from mimicnorm.surgery.example import is_shape


def sample_count(example: Any) -> int:
    """Return the first dimension of the first tensor that has one."""
    for leaf in tree_leaves(example):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise ExampleError("the example has no tensor with a batch dimension: give a tensor or a shape (batch, ...)")


def with_samples(example: Any, count: int) -> Any:
    """Return an example of ``count`` samples; those of a tensor are repeated, as indices must stay valid.

    Every tensor with the batch size of the first one is resized, in its memory format.

    Example:
        >>> with_samples((256, 3, 32, 32), 2)
        (2, 3, 32, 32)
    """
    if is_shape(example):
        return (count, *example[1:])
    if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(example)):
        return example
    samples = sample_count(example)

    def resized(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or tensor.shape[0] != samples:
            return tensor
        taken = tensor.detach()[torch.arange(count, device=tensor.device) % samples]
        for memory_format, dims in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if (
                tensor.dim() == dims
                and not tensor.is_contiguous()
                and tensor.is_contiguous(memory_format=memory_format)
            ):
                taken = taken.contiguous(memory_format=memory_format)
        return taken.requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, resized, example)
