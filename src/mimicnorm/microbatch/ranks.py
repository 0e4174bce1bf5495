"""Several processes, one batch: add amounts up, raise an error on all ranks, synchronise the gradients once."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mimicnorm.errors import MicroBatchError
from mimicnorm.layers.last_norm import world_size
from mimicnorm.microbatch.trees import map_leaves

UNTOUCHED = "Nothing was added to the gradients here"


def bare(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel, which all micro-batches run: it communicates nothing."""
    wrapper = _ddp(model)
    return model if wrapper is None else wrapper.module


def synchronise_gradients(model: nn.Module) -> None:
    """Let DistributedDataParallel average the gradients that have been added up on each rank.

    DDP does so in a backward pass. Here that is one of zeros, after all ranks have finished their micro-batches: a
    rank that runs out of memory has said so by then, and the others do not wait for its gradients.
    """
    wrapper = _ddp(model)
    if wrapper is None:
        return
    wrapper._pre_forward()
    sums = wrapper._post_forward([p.sum() for p in wrapper.parameters() if p.requires_grad and p.grad is not None])
    if sums:
        torch.autograd.backward(sums, [torch.zeros_like(t) for t in sums])


def _ddp(model: nn.Module) -> DistributedDataParallel | None:
    inner = getattr(model, "_orig_mod", model)  # torch.compile(DDP(...)), too
    return inner if isinstance(inner, DistributedDataParallel) else None


def agree(amounts: list[float], fault: Exception | None, device: torch.device | None, consequence: str) -> list[float]:
    """Sum amounts over all ranks; if any rank has a fault, all ranks raise, so that none waits for it.

    Args:
        amounts: This rank's amounts, as many as on each rank.
        fault: What went wrong here, if anything.
        device: Where the ranks communicate from.
        consequence: What a healthy rank should know when another one failed.
    """
    if world_size() > 1:
        precise = torch.float32 if device is not None and device.type == "mps" else torch.float64
        total = torch.tensor([*amounts, float(fault is not None)], dtype=precise, device=device)
        dist.all_reduce(total)
        *amounts, faults = total.tolist()
        if faults and fault is None:
            raise MicroBatchError(
                f"{int(faults)} of {world_size()} ranks failed in this batch; their own messages say why. {consequence}"
            )
    if fault is not None:
        raise fault
    return amounts


@contextlib.contextmanager
def all_or_none(device: torch.device | None, consequence: str = UNTOUCHED, amounts: int = 0) -> Iterator[list[float]]:
    """Raise on all ranks, at the end, what fails inside on one of them.

    Yields a list for ``amounts`` numbers to be filled in, which holds their sums over all ranks afterwards. Nothing
    inside may communicate.
    """
    fault: Exception | None = None
    filled = [0.0] * amounts
    try:
        yield filled
    except Exception as error:
        fault = error
    filled[:] = agree(filled, fault, device, consequence)


def mean_over_ranks(loss: Tensor) -> Tensor:
    """Return the loss of the whole batch, where each rank's share was multiplied by the number of ranks."""
    if world_size() == 1:
        return loss
    total = loss.clone()
    dist.all_reduce(total)
    return total / world_size()


def from_first(structure: Any) -> Any:
    """Return a structure of rank 0 on all ranks, in host memory."""
    payload: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            payload = [pickle.dumps(map_leaves(lambda t: t.detach().cpu() if isinstance(t, Tensor) else t, structure))]
        except Exception as error:  # before anything is sent: the others would wait
            payload = [type(error).__name__]
    dist.broadcast_object_list(payload, src=0)
    if isinstance(payload[0], str):
        raise MicroBatchError(
            f"the targets cannot be sent to the other ranks ({payload[0]} in pickle), so it cannot be checked that "
            "loss_fn is a mean over samples: give the targets as tensors, arrays and numbers"
        )
    return pickle.loads(payload[0])
