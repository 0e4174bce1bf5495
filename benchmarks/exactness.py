"""How exact micro-batches are: the first five parts of ``microbatch.py``.

Five networks, micro-batches 1, 2, 3, 7 and 16 of a batch of 32, fp64 and fp32. An error is that of the whole gradient,
relative to its length.

In fp32, where a pre-activation lies within rounding of a ReLU's zero, any two orders of computing give gradients that
differ by 1e-3: the full batch in fp32 is as far from the full batch in fp64. The seeds are the first at which that
distance, which no micro-batch has a part in, is below 1e-5; it stands in the rows of ``exact``.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from provenance import ROOT, Rows
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(ROOT / "tests" / "microbatch"))

import zoo
from whole_and_parts import Segmenter, dict_loss, full_batch, gradient, one_graph

import mimicnorm as mn
from mimicnorm.microbatch import AccumulationWarning, backward

MICRO_BATCHES = (1, 2, 3, 7, 16)
BATCH = 32
DTYPES = (torch.float64, torch.float32)
SEEDS = {"ResNet-18": 1, "VGG-11": 2}


# -- networks ----------------------------------------------------------------------------------------------------


def resnet18(classes: int = 10) -> nn.Module:
    return zoo.torchvision().models.resnet18(num_classes=classes)


def vgg11() -> nn.Module:
    """VGG-11 with global pooling and a small classifier, as is usual for small images."""
    net = zoo.torchvision().models.vgg11_bn(init_weights=False)
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier = nn.Sequential(nn.Linear(512, 256), nn.ReLU(True), nn.Dropout(), nn.Linear(256, 10))
    return net


NETWORKS: dict[str, Callable[[], nn.Module]] = {  # from the quickest to compile
    "segmentation": Segmenter,
    "VGG-11": vgg11,
    "ResNet-18": resnet18,
    "ShuffleNetV2 0.5": lambda: zoo.torchvision().models.shufflenet_v2_x0_5(num_classes=10),
    "EfficientNet-B0": lambda: zoo.torchvision().models.efficientnet_b0(num_classes=10),
}


def randomised(name: str) -> nn.Module:
    """The network with the randomness it has, or with what others of its kind have.

    VGG-11 has dropout, EfficientNet-B0 dropout and stochastic depth. ResNet-18 gets stochastic depth in every residual
    branch and dropout before the head, ShuffleNetV2 (which adds nothing up) dropout before the head, the segmentation
    network dropout of channels.
    """
    if name == "segmentation":
        return Segmenter(dropout=0.2)
    net = NETWORKS[name]()
    if name in ("ResNet-18", "ShuffleNetV2 0.5"):
        net.fc = nn.Sequential(nn.Dropout(0.2), net.fc)
    if name == "ResNet-18":
        blocks = [b for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for b in stage]
        for block in blocks:
            block.bn2 = nn.Sequential(block.bn2, zoo.torchvision().ops.StochasticDepth(0.2, "row"))
    return net


def built(name: str, random: bool = False) -> tuple[nn.Module, Callable, Tensor, Tensor]:
    """A converted network in fp64, its loss, a batch of 32 images."""
    torch.manual_seed(SEEDS.get(name, 0))
    net = (randomised(name) if random else NETWORKS[name]()).double()
    if not random:
        for m in net.modules():
            if "dropout" in type(m).__name__.lower() or "stochastic" in type(m).__name__.lower():
                m.p = 0.0
    side = 64 if name == "EfficientNet-B0" else 32  # which halves its input five times
    x = torch.randn(BATCH, 3, side, side, dtype=torch.float64)
    mn.convert_(net, mn.MimicNorm(), example=x)
    if name == "segmentation":
        return net, dict_loss, x, torch.randint(4, (BATCH, 32, 32))
    return net, F.cross_entropy, x, torch.randint(10, (BATCH,))


def accumulate(net: nn.Module, loss_fn: Callable, x: Tensor, y: Tensor, micro_batch: int) -> None:
    """Plain accumulation: every micro-batch by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        for a, b in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
            (loss_fn(net(a), b) * (len(a) / len(x))).backward()


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def cases(rows: Rows, random: bool = False) -> Iterator[tuple]:
    """(name, type, network, loss, images, labels) of what is not on file yet."""
    for name in NETWORKS:
        net, loss_fn, x, y = built(name, random)
        for dtype in DTYPES:
            if any((name, str(dtype)[6:], m) not in rows for m in MICRO_BATCHES):
                yield name, dtype, copy.deepcopy(net).to(dtype), loss_fn, x.to(dtype), y


# -- parts -------------------------------------------------------------------------------------------------------


def exact(rows: Rows) -> None:
    for name, dtype, net, loss_fn, x, y in cases(rows):
        right = gradient(full_batch(net, loss_fn, x, y)[0])
        extra = {}
        if dtype == torch.float32:  # how far rounding takes the full batch itself
            wide = gradient(full_batch(copy.deepcopy(net).double(), loss_fn, x.double(), y)[0])
            extra["full_batch_rounding"] = error(right, wide)
        for micro_batch in MICRO_BATCHES:
            net.zero_grad()
            backward(net, loss_fn, x, y, micro_batch=micro_batch)
            row = {"network": name, "dtype": str(dtype)[6:], "micro_batch": micro_batch}
            row |= {"error": error(gradient(net), right), **extra}
            if dtype == torch.float64 and micro_batch in (2, 7, 16):
                net.zero_grad()
                accumulate(net, loss_fn, x, y, micro_batch)
                row["plain_accumulation_error"] = error(gradient(net), right)
            rows.add(row)


def randomness(rows: Rows) -> None:
    for name, dtype, net, loss_fn, x, y in cases(rows, random=True):
        for micro_batch in MICRO_BATCHES:
            found = []
            for way in (one_graph, backward):
                twin = copy.deepcopy(net)
                torch.manual_seed(1)
                way(twin, loss_fn, x, y, micro_batch=micro_batch)
                found.append(gradient(twin))
            row = {"network": name, "dtype": str(dtype)[6:], "micro_batch": micro_batch}
            row["error"] = error(found[1], found[0])
            if micro_batch == 7:  # other random numbers give another gradient: the comparison would notice
                torch.manual_seed(2)
                backward(net, loss_fn, x, y, micro_batch=micro_batch)
                row["error_under_other_random_numbers"] = error(gradient(net), found[0])
                net.zero_grad()
            rows.add(row)


def compiled(rows: Rows, backend: str) -> None:
    """One compilation serves every micro-batch but that of one sample, which the compiler treats by itself."""
    for name, dtype, net, loss_fn, x, y in cases(rows):
        right = gradient(full_batch(net, loss_fn, x, y)[0])
        torch._dynamo.reset()
        body = torch.compile(net, dynamic=True, backend=backend)
        for micro_batch in MICRO_BATCHES:
            start = time.process_time()
            net.zero_grad()
            backward(body, loss_fn, x, y, micro_batch=micro_batch)
            row = {"network": name, "dtype": str(dtype)[6:], "micro_batch": micro_batch}
            row |= {"error": error(gradient(net), right), "cpu_seconds_with_compiling": time.process_time() - start}
            rows.add(row)


SHARES = {2: (13, 19), 3: (5, 20, 7)}


def _rank(rank: int, world: int, name: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    whole, loss_fn, x, y = built(name)
    parts = {}
    for dtype in DTYPES:
        net = copy.deepcopy(whole).to(dtype)
        wrapped = DistributedDataParallel(net)
        share = [t.split(SHARES[world])[rank] for t in (x.to(dtype), y)]
        for micro_batch in MICRO_BATCHES:
            net.zero_grad()
            backward(wrapped, loss_fn, *share, micro_batch=micro_batch)
            parts[dtype, micro_batch] = gradient(net).clone()
    torch.save(parts, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def ranks(rows: Rows) -> None:
    for name in NETWORKS:
        for world, shares in SHARES.items():
            if all((name, str(d)[6:], m, shares) in rows for d in DTYPES for m in MICRO_BATCHES):
                continue
            net, loss_fn, x, y = built(name)
            right = {d: gradient(full_batch(copy.deepcopy(net).to(d), loss_fn, x.to(d), y)[0]) for d in DTYPES}
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_rank, (world, name, folder), nprocs=world)
                found = [torch.load(f"{folder}/{r}.pt") for r in range(world)]
            for dtype, micro_batch in found[0]:
                row = {"network": name, "dtype": str(dtype)[6:], "micro_batch": micro_batch, "shares": shares}
                worst = max(error(f[dtype, micro_batch], right[dtype]) for f in found)
                rows.add(row | {"error": worst})


KEY = ("network", "dtype", "micro_batch")
PARTS: dict[str, tuple[Callable[[Rows], None], tuple[str, ...]]] = {
    "exact": (exact, KEY),
    "randomness": (randomness, KEY),
    "ranks": (ranks, (*KEY, "shares")),
    "traced": (partial(compiled, backend="aot_eager"), KEY),
    "compiled": (partial(compiled, backend="inductor"), KEY),
}
