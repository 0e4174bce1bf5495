"""One process or several (torchrun): which images each takes, and what all must agree on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mimicnorm.errors import RecipeError
from mimicnorm.microbatch.ranks import all_or_none

Value = TypeVar("Value")


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
        """Sum a tensor over all processes, in double precision and in host memory."""
        total = tensor.cpu().double()  # on the host first: not every device has doubles
        if self.size > 1:
            dist.all_reduce(total)
        return total

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether any process raised it."""
        return self.sum(torch.tensor(flags)).bool().tolist() if self.size > 1 else list(flags)

    def copy_from_main(self, *tensors: Tensor) -> None:
        """Overwrite tensors with the main process's values."""
        for tensor in tensors if self.size > 1 else ():
            values = tensor.detach().contiguous()
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)

    def on_main(self, action: Callable[[], Value]) -> Value:
        """Do something in the main process and return its result, or raise its error, in all of them."""
        values: list[Any] = [None]
        with all_or_none(torch.device("cpu"), "What was saved before is untouched"):
            if self.main:
                values = [action()]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


@contextlib.contextmanager
def init_process_group(device: str = "auto") -> Iterator[Processes]:
    """Join the processes that torchrun started, if it did; a process group that is up already is used and left up."""
    chosen = _usable(device)
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


def _usable(name: str) -> torch.device:
    """Choose this process's device, and try it.

    A GPU is made the current one before anything touches CUDA: otherwise every process of a machine would open a
    context on the first GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError("torch finds no GPU here")
            device = torch.device(
                "cuda", int(os.environ.get("LOCAL_RANK", 0)) if device.index is None else device.index
            )
            torch.cuda.set_device(device)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise RecipeError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _meet(backend: str) -> None:
    """Join the process group where only this attempt's addresses are found.

    torchrun keeps its store over restarts: without a prefix a restarted process may find, and try to reach, one that
    is dead.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
