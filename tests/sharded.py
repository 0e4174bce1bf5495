"""A converted network under DDP and FSDP2, two processes on gloo: the gradients of a batch, half of it on each."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))  # spawned processes start without conftest
import nets

import mimicnorm as mn


def network(centre: str) -> nn.Module:
    torch.manual_seed(0)
    model = nets.resnet().double()
    mn.convert_(model, mn.MimicNorm(min_fan_in=8, centre=centre), example=(2, 3, 8, 8))
    return model


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 3, 8, 8, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 3])


def worker(rank: int, port: int, kind: str, centre: str, path: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = network(centre)
    x, y = batch()
    x, y = x[rank * 2 : rank * 2 + 2], y[rank * 2 : rank * 2 + 2]
    if kind == "DDP":
        run: nn.Module = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    for _ in range(2):  # the second forward sees parameters that were resharded in between
        run.zero_grad()
        nn.functional.cross_entropy(run(x), y).backward()
    full = {n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()}
    if rank == 0:
        torch.save(full, path)
    time.sleep(0.3)  # gloo's threads still need the interpreter: see training/processes.py
    torch.distributed.destroy_process_group()


def gradients(kind: str, centre: str, folder: Path) -> dict[str, Tensor]:
    """The gradients by name, as the two processes have them."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(worker, (port, kind, centre, str(folder / "grads.pt")), nprocs=2)
    return torch.load(folder / "grads.pt", weights_only=True)
