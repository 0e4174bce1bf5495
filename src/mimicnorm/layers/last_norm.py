"""The last BN: one affine-free BatchNorm on the logits, living inside the layer that makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.derive import Derived, derive


class LastNorm(_BatchNorm):
    """Normalise each class's logits over the batch; no affine parameters (Section "Last BN Layer").

    Args:
        num_classes: The number of logits per sample.
        dim: Where the classes are: 1 after a convolution, -1 after a linear layer.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics.

    Example:
        >>> LastNorm(10)(torch.randn(64, 10)).std(0, correction=0)  # doctest: +SKIP
        tensor([1.0000, ...])
    """

    def __init__(self, num_classes: int, dim: int = 1, eps: float = 1e-5, momentum: float = 0.1, **factory: Any):
        super().__init__(num_classes, eps, momentum, affine=False, **factory)
        self.dim = dim
        self.intercept: Callable[[Tensor], Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over everything but the classes; with running statistics in eval mode."""
        if self.intercept is not None:  # a micro-batch sees the statistics of the whole batch
            return self.intercept(input)
        classes_first = input if self.dim == 1 else input.movedim(self.dim, 1) if input.dim() > 2 else input
        if self.training:
            values = classes_first.numel() // max(classes_first.shape[1], 1)
            if values < 2:
                raise MicroBatchError(
                    f"LastNorm got a single value per class (logits of shape {tuple(input.shape)}) in "
                    "training mode, so there is no variance to divide by. Train with a larger batch, or give "
                    "the whole batch to mimicnorm.microbatch.backward(..., micro_batch=1)."
                )
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        normed = F.batch_norm(
            classes_first,
            self.running_mean,
            self.running_var,
            None,
            None,
            self.training or self.running_mean is None,
            self.momentum or 0.0,
            self.eps,
        )
        return normed if classes_first is input else normed.movedim(1, self.dim)

    def _check_input_dim(self, input: Tensor) -> None:
        """Any rank from 2 on."""

    def extra_repr(self) -> str:
        """Show classes and where they are."""
        return f"{self.num_features}, dim={self.dim}, eps={self.eps}, momentum={self.momentum}"


class LastNormed(Derived):
    """A head whose output goes through its own ``last_norm``: same class, same keys, one child more."""

    last_norm: LastNorm

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Make the logits, then normalise them."""
        return self.last_norm(super().forward(*args, **kwargs))  # pyrefly: ignore


@functools.cache
def last_normed_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of a head's class that normalises its own output."""
    return derive(last_normed_class, LastNormed, base, "LastNormed")


def last_norm_(head: nn.Module, norm: LastNorm) -> nn.Module:
    """Put a LastNorm inside a head, in place: the same object, the same keys."""
    head.__class__ = last_normed_class(type(head))
    head.add_module("last_norm", norm)
    return head
