"""What several scripts time or measure: a training step, checkpointed blocks, what a compiled forward pass saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mimicnorm.compare.intervals import median


def training_step(model: nn.Module, images: Tensor, labels: Tensor, momentum: float = 0.9) -> Callable[[], None]:
    """Forward, cross entropy, backward, SGD with momentum and decay; the rate is so small that the weights stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=momentum, weight_decay=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def ratio(over: Iterable[float], under: Iterable[float]) -> dict[str, float]:
    """The median of the ratios within a round, with its 95 % interval."""
    found = median([a / b for a, b in zip(over, under, strict=True)])
    return {name: round(value, 4) for name, value in found._asdict().items()}


def checkpointed(resnet: Any) -> nn.Module:
    """Checkpoint every residual block, the usual grain."""
    for stage in (resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4):
        for block in stage:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return resnet


def really_saved(model: nn.Module, images: Tensor) -> int:
    """Count the bytes that a forward pass and its loss save beside input, parameters and buffers, by hooks."""
    own = {t.untyped_storage()._cdata for t in (images, *model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), torch.zeros(len(images), dtype=torch.long))
    del loss  # not before the count: another storage would get the place of one that is gone
    return sum(found.values())
