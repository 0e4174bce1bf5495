"""What the processes of the distributed tests do; each writes what it found to a file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))
from whole_and_parts import (
    AveragedHeads,
    Classifier,
    SharedHead,
    batch,
    converted,
    gradient,
    scaled,
    state,
    two_view_loss,
)

from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import LastNormCrossEntropy, backward
from mimicnorm.microbatch.heads import WholeBatch

SHARES = {2: (13, 19), 3: (5, 20, 7)}
"""Samples on each rank, of a batch of 32."""


# One process imports torch and the others are forked from it: the imports are most of what these tests do.
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "mimicnorm.microbatch"])


def run(job: Callable, world: int, folder: Path) -> list[Any]:
    """Run a job on some ranks and return what each found."""
    mp.start_processes(_enter, (job, world, str(folder)), nprocs=world, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _enter(rank: int, job: Callable, world: int, folder: str) -> None:
    join(rank, world, folder)
    found = job(rank, world)
    torch.save(found, f"{folder}/{rank}.pt")
    time.sleep(0.3)  # gloo's threads still need the interpreter: see training/processes.py
    dist.destroy_process_group()


def join(rank: int, world: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


def share_of(x: Tensor, rank: int, world: int) -> Tensor:
    return x.split(SHARES[world])[rank]


def build(make: Callable[..., nn.Module], frozen: bool = False, **method: object) -> nn.Module:
    torch.manual_seed(0)
    return converted(make(), **method).train(not frozen)


CASES: dict[str, tuple] = {
    "classifier": (Classifier, F.cross_entropy, {}),
    "averaged heads": (AveragedHeads, F.cross_entropy, {}),
    "averaged heads, loss in pieces": (AveragedHeads, F.cross_entropy, {}),
    "shared head": (SharedHead, two_view_loss, {}),
    "no last norm": (Classifier, F.cross_entropy, {"last_norm": False}),
    "last norm in the loss": (Classifier, "folded", {"last_norm": False}),
    "last norm in a function": (Classifier, "folded in a function", {"last_norm": False}),
    "weighted": (Classifier, "weighted", {}),
    "penalty": (Classifier, "penalty", {}),
    "penalty, one pass": (Classifier, "penalty", {"last_norm": False}),
    "a function": (Classifier, "a function", {}),
    "a function, loss in pieces": (Classifier, "a function", {}),
    "a function, one pass": (Classifier, "a function", {"last_norm": False}),
    "a loss that counts, one pass": (Classifier, "counting", {"last_norm": False}),
    "eval mode": (Classifier, F.cross_entropy, {"frozen": True}),  # one pass, with buffers that DDP sends around
}


class Counting(nn.CrossEntropyLoss):
    """A mean that changes its state with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input, target)


def loss_and_denominator(loss: Any, net: nn.Module) -> tuple[Callable, Callable | None]:
    if loss == "penalty":  # over the model's own parameters
        return lambda out, t: F.cross_entropy(out, t) + 0.1 * sum(p.square().sum() for p in net.parameters()), None
    if loss == "a function":
        return lambda out, t: F.cross_entropy(out, t), None
    if loss == "folded in a function":
        folded = scaled(LastNormCrossEntropy(5).double())
        return lambda out, t: folded(out, t), None
    if loss == "counting":
        return Counting(), None
    weight = torch.linspace(0.2, 2, 5, dtype=torch.float64)
    if loss == "weighted":
        return nn.CrossEntropyLoss(weight, reduction="sum"), lambda t: weight[t].sum()
    return (scaled(LastNormCrossEntropy(5).double()) if loss == "folded" else loss), None


def exact_gradients(rank: int, world: int) -> dict[str, Any]:
    """Every case with micro-batches of another size on each rank, and how often gradients were synchronised."""
    x, y = (share_of(t, rank, world) for t in batch())
    found: dict[str, Any] = {}
    for name, (make, loss, method) in CASES.items():
        net = build(make, **method)
        loss_fn, denominator = loss_and_denominator(loss, net)
        wrapped = DistributedDataParallel(net, find_unused_parameters=make is AveragedHeads)
        reductions = []

        def count(_, bucket, reductions=reductions):  # annotations as strings are refused here
            reductions.append(bucket.index())
            dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
            done: torch.futures.Future[Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapped.register_comm_hook(None, count)
        settings = {"denominator": denominator, "loss_in_pieces": "in pieces" in name or None}
        value = backward(wrapped, loss_fn, x, y, micro_batch=(4, 1, 3)[rank], **settings)
        found[name] = (gradient(net, loss_fn), value, state(net, loss_fn), reductions)
    return found


def plain_training(rank: int, world: int) -> dict[str, Any]:
    """LastNorm by itself under DDP, without micro-batches."""
    found: dict[str, Any] = {}
    x, y = (share_of(t, rank, world) for t in batch())
    for name in ("eager", "compiled"):
        net = build(Classifier)
        inner = net if name == "eager" else torch.compile(net, backend="eager")
        wrapped = DistributedDataParallel(inner)
        # DDP averages over ranks, each of which counts by its share
        (F.cross_entropy(wrapped(x), y) * (world * len(x) / 32)).backward()
        found[name] = (gradient(net), state(net))
    norm = LastNorm(3, momentum=None).double()
    for n in (2 * rank, 1):  # rank 0 has nothing, then everyone a lone sample
        norm(torch.arange(3.0 * n, dtype=torch.float64).reshape(n, 3) + rank)
    found["lone"] = state(norm)
    if rank == 0:  # eval mode waits for nobody
        norm.eval()(torch.zeros(1, 3, dtype=torch.float64))
    found["conversion"] = converted(Classifier()) is not None  # fake tensors are not sent anywhere
    return found


def error_of(call: Callable, *args: Any, **how: Any) -> str:
    """The message of the error that a call raises; empty if it raises none."""
    try:
        call(*args, **how)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def failures(rank: int, world: int) -> dict[str, Any]:
    """One rank's failure must be everyone's, at once."""
    net, bare = (DistributedDataParallel(build(Classifier, last_norm=last_norm)) for last_norm in (True, False))
    x, y = batch(8)
    broken = x.clone()
    broken[5] = float("nan")

    def boom(out: Tensor, targets: Tensor) -> Tensor:
        if rank:
            raise ValueError("boom")
        return F.cross_entropy(out, targets)

    def not_finite(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out, targets) * (float("nan") if rank else 1)

    def fail(name: str, model: nn.Module, loss_fn: Callable, x: Tensor, targets: Any, micro_batch: int) -> None:
        found[name] = error_of(backward, model, loss_fn, x, targets, micro_batch=micro_batch)

    found: dict[str, Any] = {}
    fail("nan", net, F.cross_entropy, broken if rank else x, y, 2)
    fail("empty", net, F.cross_entropy, x[: 8 - 8 * rank], y[: 8 - 8 * rank], 2)
    fail("loss", net, boom, x, y, 2 + rank)
    fail("loss, one pass", bare, boom, x, y, 2 + rank)
    fail("weights", net, nn.CrossEntropyLoss(torch.linspace(0.1, 3, 5, dtype=torch.float64)), x, y, 2 + rank)
    before = state(net)
    for name, model, loss_fn, targets in no_means(rank, net, bare, y):
        fail(name, model, loss_fn, x, targets, 8)  # a single micro-batch on each rank
    fail("nan, loss", net, not_finite, x, y, 3)
    found["statistics"] = [before, state(net)]
    found["lone"] = error_of(LastNorm(3), torch.zeros(1 - rank, 3))
    found["gradients"] = [p.grad is None for p in net.parameters()]
    return found


def out_of_memory(rank: int, world: int) -> dict[str, Any]:
    """Rank 1 runs out of memory, wherever that may be: all fail at once, and the next batch is exact."""
    x, y = (share_of(t, rank, world) for t in batch())
    told: dict[str, Any] = {}

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    def in_forward(_module: Any, _args: Any, out: Tensor) -> None:
        if rank and torch.is_grad_enabled():
            fail()

    def in_backward(_module: Any, _args: Any, out: Tensor) -> None:
        if rank and out.requires_grad:
            out.register_hook(fail)

    for name, last_norm, hook in [
        ("forward", True, in_forward),
        ("backward", True, in_backward),
        ("backward, one pass", False, in_backward),
        ("whole batch", True, None),
    ]:
        net = build(Classifier, last_norm=last_norm)
        wrapped, joined = DistributedDataParallel(net), WholeBatch.joined
        before = state(net)
        handle = net.body.register_forward_hook(hook) if hook else None
        if hook is None and rank:
            WholeBatch.joined = fail
        # a single micro-batch on rank 0
        told[name] = error_of(backward, wrapped, F.cross_entropy, x, y, micro_batch=(50, 6)[rank])
        WholeBatch.joined = joined
        if handle is not None:
            handle.remove()
        told[f"{name}: statistics"] = torch.equal(before, state(net))
        net.zero_grad()
        backward(wrapped, F.cross_entropy, x, y, micro_batch=4)
        told[f"{name}: next"] = gradient(net)
    other = build(SharedHead, run_as=Classifier if rank else SharedHead)  # not the same heads on all ranks
    told["heads"] = error_of(backward, other, F.cross_entropy if rank else two_view_loss, x, y, micro_batch=4)
    return told


def no_means(rank: int, net: nn.Module, bare: nn.Module, y: Tensor) -> list[tuple]:
    """Losses that are no mean over the batch of all ranks, on models with and without a last BN."""

    def info_nce(out: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(out @ out.T, torch.arange(len(out)).roll(1))

    def weighted(out: Tensor, targets: tuple) -> Tensor:
        classes, weights = targets
        return (F.cross_entropy(out, classes, reduction="none") * weights).sum() / weights.sum()

    constant = torch.full((8,), 1.0 + rank, dtype=torch.float64)  # the same within each rank
    ignored = y.where(torch.arange(8) >= 3 * rank, -100)  # on rank 1 alone: on rank 0 it is torch's plain cross entropy
    return [
        ("ignored targets", net, F.cross_entropy, ignored),
        ("ignored targets, one pass", bare, F.cross_entropy, ignored),
        ("contrastive", net, info_nce, y),
        ("contrastive, one pass", bare, info_nce, y),
        ("weights of ranks", net, weighted, (y, constant)),
        ("weights of ranks, one pass", bare, weighted, (y, constant)),
        ("noise", net, lambda out, t: F.cross_entropy(F.dropout(out), t), y),
    ]


def all_of_two(rank: int, world: int) -> dict[str, Any]:
    """Everything that two ranks do: starting processes is what takes the time."""
    return {job.__name__: job(rank, world) for job in (exact_gradients, plain_training, failures, out_of_memory)}


def deserted(rank: int, world: int, folder: str, event: Any) -> None:
    """Rank 1 dies between its passes; the others must not wait for ever."""
    join(rank, world, folder)
    net = DistributedDataParallel(build(Classifier))
    x, y = batch(8)
    if rank == 1:
        os._exit(7)
    try:
        backward(net, F.cross_entropy, x, y, micro_batch=2)
    except RuntimeError:
        event.set()
