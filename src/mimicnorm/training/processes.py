"""One process or many (torchrun): who takes which images, and what all must agree on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mimicnorm.errors import RecipeError
from mimicnorm.microbatch.ranks import all_or_none


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them; a single one communicates nothing."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def share(self, indices: Tensor) -> Tensor:
        """This process's part of a global batch."""
        return indices.tensor_split(self.size)[self.rank]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        return self._reduced(tensor, dist.ReduceOp.SUM)

    def min(self, tensor: Tensor) -> Tensor:
        """The least over all processes."""
        return self._reduced(tensor, dist.ReduceOp.MIN)

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any process raised it (in host memory: no device waits for it)."""
        if self.size == 1:
            return list(flags)
        return self._reduced(torch.tensor(flags, dtype=torch.int32), dist.ReduceOp.MAX).bool().tolist()

    def from_main(self, value: Any) -> Any:
        """What the main process has."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def copy_from_main(self, *tensors: Tensor) -> None:
        """Give every process the main one's values."""
        for tensor in tensors if self.size > 1 else ():
            held = tensor.detach().contiguous()
            dist.broadcast(held, src=0)
            tensor.detach().copy_(held)

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What fails inside in one process is raised in all, at the end, so that none waits for it."""
        with all_or_none(torch.device("cpu"), "What was saved before is untouched"):
            yield

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, operation)
        return total


@contextlib.contextmanager
def joined(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that torchrun started, if it did; a process group that is up already is used and left up."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    started = "TORCHELASTIC_RUN_ID" in os.environ and dist.is_available() and not dist.is_initialized()
    if started:
        _meet("gloo" if chosen.type == "cpu" else f"cpu:gloo,{chosen.type}:nccl")
    up = dist.is_available() and dist.is_initialized()
    processes = Processes(chosen, dist.get_rank(), dist.get_world_size()) if up else Processes(chosen)
    try:
        yield processes
        if started:
            dist.barrier()  # none closes its connections while another still reads from them
    finally:
        if started:
            # gloo's threads need the interpreter to let go of the last tensors. One that comes for it during shutdown
            # aborts the process, and one that the group's end waits for never gets it: let them have it now.
            time.sleep(0.3)
            dist.destroy_process_group()


def _meet(backend: str) -> None:
    """Join the process group where only this attempt's addresses are found.

    torchrun keeps its store over restarts: without a prefix a restarted process may find, and try to reach, one that
    is dead.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
