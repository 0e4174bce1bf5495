"""Many processes, one batch: count its samples, agree on failures, synchronise gradients once."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.last_norm import world_size


def bare(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel: a pass without gradients needs none of its synchronisation."""
    wrapped = _ddp(model)
    return model if wrapped is None else wrapped.module


def unsynchronised(model: nn.Module, hold: bool = True) -> AbstractContextManager:
    """Hold back the gradient reduction, as for all micro-batches but the last."""
    wrapped = _ddp(model)
    return contextlib.nullcontext() if wrapped is None or not hold else wrapped.no_sync()


def _ddp(model: nn.Module) -> DistributedDataParallel | None:
    inner = getattr(model, "_orig_mod", model)  # torch.compile(DDP(...)), too
    return inner if isinstance(inner, DistributedDataParallel) else None


Made = TypeVar("Made")
UNTOUCHED = "Nothing was added to the gradients here"


def agree(amount: float, fault: Exception | None, device: torch.device | None, consequence: str = UNTOUCHED) -> float:
    """Sum an amount over all ranks; if any rank has a fault, all raise, so that none waits for it.

    Args:
        amount: This rank's part: its number of samples, or its denominator.
        fault: What went wrong here, if anything.
        device: Where the ranks communicate from.
        consequence: What a healthy rank should know when another failed.
    """
    if world_size() > 1:
        whole = torch.tensor([amount, float(fault is not None)], dtype=torch.float64)
        whole = whole.to(device, torch.float32 if device is not None and device.type == "mps" else torch.float64)
        dist.all_reduce(whole)
        amount, faults = whole.tolist()
        if faults and fault is None:
            raise MicroBatchError(
                f"{int(faults)} of {world_size()} ranks failed in this batch; their own messages say why. {consequence}"
            )
    if fault is not None:
        raise fault
    return amount


@contextlib.contextmanager
def all_or_none(device: torch.device | None, consequence: str = UNTOUCHED) -> Iterator[None]:
    """What fails inside on one rank is raised on all, at the end."""
    fault: Exception | None = None
    try:
        yield
    except Exception as error:
        fault = error
    agree(0.0, fault, device, consequence)


def mean_over_ranks(loss: Tensor) -> Tensor:
    """The whole batch's loss, where each rank's share was multiplied by the number of ranks."""
    if world_size() == 1:
        return loss
    total = loss.clone()
    dist.all_reduce(total)
    return total / world_size()


def from_first(structure: Any) -> Any:
    """A structure of rank 0, on all ranks and in host memory."""
    payload: list[Any] = [None]
    if dist.get_rank() == 0:
        on_host = pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), structure)
        try:
            payload = [pickle.dumps(on_host)]
        except Exception as error:  # before anything is sent: the others would wait
            payload = [error.__class__.__name__]
    dist.broadcast_object_list(payload, src=0)
    if isinstance(payload[0], str):
        raise MicroBatchError(
            f"the targets cannot be sent to the other ranks ({payload[0]} in pickle), so it cannot be checked that "
            "loss_fn is a mean over samples: give the targets as tensors, arrays and numbers"
        )
    return pickle.loads(payload[0])


def meet(act: Callable[[], Made], amount: Callable[[Made], float], device: torch.device | None) -> tuple[Made, float]:
    """Do something and sum an amount over all ranks; what fails on one rank is raised on all.

    Args:
        act: What to do.
        amount: From its result, this rank's part.
        device: Where the ranks communicate from.
    """
    fault: Exception | None = None
    made: Any = None
    part = 0.0
    try:
        made = act()
        part = amount(made)
    except Exception as error:
        fault = error
    return made, agree(part, fault, device)
