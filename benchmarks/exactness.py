"""How exact micro-batches are: the first six parts of ``microbatch.py``.

Five networks, micro-batches 1, 2, 3, 7 and 16 of a batch of 32, fp64 and fp32. An error is that of the whole gradient,
relative to its length. ``exact`` takes the networks as they are, the others at a quarter of their width and in full
depth: what could go wrong there is a matter of structure, and time one of width.

In fp32, where a pre-activation lies within rounding of a ReLU's zero, any two orders of computing give gradients that
differ by 1e-3: the full batch in fp32 is that far from the full batch in fp64, too. So the seed is the first at which
references, in which the code under test has no part, agree to 1e-5: the full batch in fp32 and in fp64, and the full
batch and one graph over the same micro-batches. Seed and distances stand in every row.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
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


def efficientnet() -> nn.Module:
    models = zoo.torchvision().models.efficientnet
    blocks, last = models._efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=1.0)
    return models.EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.2, last_channel=last, num_classes=10)


NARROW: dict[str, Callable[[], nn.Module]] = {
    "segmentation": Segmenter,
    "VGG-11": lambda: mn.models.build("vgg11", num_classes=10, input="cifar", width=0.25),
    "ResNet-18": lambda: mn.models.build("resnet18", num_classes=10, width=0.25),
    "ShuffleNetV2 0.5": lambda: zoo.torchvision().models.ShuffleNetV2([4, 8, 4], [24, 32, 64, 128, 256], 10),
    "EfficientNet-B0": efficientnet,
}


def randomised(name: str) -> nn.Module:
    """The network with the randomness it has, or with what others of its kind have.

    VGG-11 has dropout, EfficientNet-B0 dropout and stochastic depth. ResNet-18 gets stochastic depth in every residual
    branch and dropout before the head, ShuffleNetV2 (which adds nothing up) dropout before the head, the segmentation
    network dropout of channels.
    """
    if name == "segmentation":
        return Segmenter(dropout=0.2)
    net = NARROW[name]()
    if name in ("ResNet-18", "ShuffleNetV2 0.5"):
        net.fc = nn.Sequential(nn.Dropout(0.2), net.fc)
    if name == "ResNet-18":
        blocks = [b for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for b in stage]
        for block in blocks:
            block.bn2 = nn.Sequential(block.bn2, zoo.torchvision().ops.StochasticDepth(0.2, "row"))
    return net


@dataclass
class Case:
    """A converted network in fp64 with its loss and a batch of 32 images."""

    network: str
    seed: int
    make: Callable[[], nn.Module]
    random: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.net = self.make().double()
        if not self.random:
            for m in self.net.modules():
                if "dropout" in type(m).__name__.lower() or "stochastic" in type(m).__name__.lower():
                    m.p = 0.0
        side = 64 if self.network == "EfficientNet-B0" else 32  # which halves its input five times
        self.x = torch.randn(BATCH, 3, side, side, dtype=torch.float64)
        mn.convert_(self.net, mn.MimicNorm(), example=self.x)
        segments = self.network == "segmentation"
        self.loss_fn: Callable = dict_loss if segments else F.cross_entropy
        self.y = torch.randint(4, (BATCH, 32, 32)) if segments else torch.randint(10, (BATCH,))

    def at(self, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
        """Network and images in another precision."""
        return copy.deepcopy(self.net).to(dtype), self.x.to(dtype)

    def right(self, dtype: torch.dtype) -> Tensor:
        """The gradient of the full batch."""
        net, x = self.at(dtype)
        return gradient(full_batch(net, self.loss_fn, x, self.y)[0])

    def rounding(self) -> float:
        """How far the full batch in fp32 is from the full batch in fp64, of the same weights."""
        self.net, self.x = (t.float().double() for t in (self.net, self.x))
        return error(self.right(torch.float32), self.right(torch.float64))

    def kernels(self) -> float:
        """How far one graph over micro-batches is from the full batch in fp32: the kernels differ with the size."""
        right, distances = self.right(torch.float32), []
        for micro_batch in MICRO_BATCHES:
            net, x = self.at(torch.float32)
            one_graph(net, self.loss_fn, x, self.y, micro_batch)
            distances.append(error(gradient(net), right))
        return max(distances)


def case(name: str, networks: dict[str, Callable[[], nn.Module]]) -> tuple[Case, dict]:
    """The first case without a kink within rounding, and what a row says of it."""
    for seed in range(100):
        found = Case(name, seed, networks[name])
        about = {"network": name, "seed": seed, "full_batch_fp32_rounding": found.rounding()}
        if about["full_batch_fp32_rounding"] < 1e-5:
            about["one_graph_fp32_rounding"] = found.kernels()
            if about["one_graph_fp32_rounding"] < 1e-5:
                return found, about
    raise RuntimeError(name)


def accumulate(net: nn.Module, loss_fn: Callable, x: Tensor, y: Tensor, micro_batch: int) -> None:
    """Plain accumulation: every micro-batch by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        for a, b in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
            (loss_fn(net(a), b) * (len(a) / len(x))).backward()


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def errors(found: Tensor, right: dict[torch.dtype, Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Against the full batch in the same precision; in fp32 also against fp64, as ``full_batch_fp32_rounding`` is."""
    of = {"error": error(found, right[dtype])}
    return of | ({"error_to_fp64": error(found, right[torch.float64])} if dtype == torch.float32 else {})


def missing(rows: Rows, name: str, **more: object) -> bool:
    """Whether a network's rows are not all on file."""
    return any((name, str(d)[6:], m, *more.values()) not in rows for d in DTYPES for m in MICRO_BATCHES)


# -- parts -------------------------------------------------------------------------------------------------------


def exact(rows: Rows) -> None:
    for name in filter(partial(missing, rows), NETWORKS):
        of, about = case(name, NETWORKS)
        right = {d: of.right(d) for d in DTYPES}
        for dtype in DTYPES:
            net, x = of.at(dtype)
            for micro_batch in MICRO_BATCHES:
                net.zero_grad()
                backward(net, of.loss_fn, x, of.y, micro_batch=micro_batch)
                row = (
                    about | {"dtype": str(dtype)[6:], "micro_batch": micro_batch} | errors(gradient(net), right, dtype)
                )
                if dtype == torch.float64 and micro_batch in (2, 7, 16):
                    net.zero_grad()
                    accumulate(net, of.loss_fn, x, of.y, micro_batch)
                    row["plain_accumulation_error"] = error(gradient(net), right[dtype])
                rows.add(row)


def randomness(rows: Rows) -> None:
    """Both ways run the same kernels on the same shapes, so no seed has to be chosen."""
    for name in filter(partial(missing, rows), NARROW):
        of = Case(name, 0, partial(randomised, name), random=True)
        for dtype in DTYPES:
            for micro_batch in MICRO_BATCHES:
                found = []
                for way in (one_graph, backward):
                    net, x = of.at(dtype)
                    torch.manual_seed(1)
                    way(net, of.loss_fn, x, of.y, micro_batch=micro_batch)
                    found.append(gradient(net))
                row = {"network": name, "dtype": str(dtype)[6:], "micro_batch": micro_batch}
                row["error"] = error(found[1], found[0])
                if micro_batch == 7:  # other random numbers give another gradient: the comparison would notice
                    net.zero_grad()
                    torch.manual_seed(2)
                    backward(net, of.loss_fn, x, of.y, micro_batch=micro_batch)
                    row["error_under_other_random_numbers"] = error(gradient(net), found[0])
                rows.add(row)


def rounding(rows: Rows) -> None:
    """Whose rounding it is: full batch and micro-batches in fp32, each against the full batch in fp64."""
    for name in NARROW:
        of, about = case(name, NARROW)
        right, (net, x) = {d: of.right(d) for d in DTYPES}, of.at(torch.float32)
        for micro_batch in MICRO_BATCHES:
            net.zero_grad()
            backward(net, of.loss_fn, x, of.y, micro_batch=micro_batch)
            rows.add(
                about | {"dtype": "float32", "micro_batch": micro_batch} | errors(gradient(net), right, torch.float32)
            )


def compiled(rows: Rows, backend: str) -> None:
    """One compilation serves every micro-batch but that of one sample, which the compiler treats by itself.

    With ``dynamic=True`` height and width are symbols, too, and inductor fails to order the strides of ShuffleNetV2
    ("cannot determine truth value"). There it is left to find out which sizes vary: one more compilation.
    """
    for name in filter(partial(missing, rows), NARROW):
        of, about = case(name, NARROW)
        right = {d: of.right(d) for d in DTYPES}
        for dtype in DTYPES:
            net, x = of.at(dtype)
            torch._dynamo.reset()
            body = torch.compile(net, dynamic=None if backend == "inductor" else True, backend=backend)
            for micro_batch in MICRO_BATCHES:
                net.zero_grad()
                backward(body, of.loss_fn, x, of.y, micro_batch=micro_batch)
                row = about | {"dtype": str(dtype)[6:], "micro_batch": micro_batch}
                rows.add(row | errors(gradient(net), right, dtype))


SHARES = {2: (13, 19), 3: (5, 20, 7)}


def _rank(rank: int, world: int, name: str, seed: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    of = Case(name, seed, NARROW[name])
    of.rounding()
    parts = {}
    for dtype in DTYPES:
        net, x = of.at(dtype)
        wrapped = DistributedDataParallel(net)
        share = [t.split(SHARES[world])[rank] for t in (x, of.y)]
        for micro_batch in MICRO_BATCHES:
            net.zero_grad()
            backward(wrapped, of.loss_fn, *share, micro_batch=micro_batch)
            parts[dtype, micro_batch] = gradient(net).clone()
    torch.save(parts, f"{folder}/{rank}.pt")
    time.sleep(0.3)  # gloo's threads still need the interpreter: see training/processes.py
    dist.destroy_process_group()


def ranks(rows: Rows) -> None:
    for name in NARROW:
        for world, shares in SHARES.items():
            if not missing(rows, name, shares=shares):
                continue
            of, about = case(name, NARROW)
            right = {d: of.right(d) for d in DTYPES}
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_rank, (world, name, of.seed, folder), nprocs=world)
                found = [torch.load(f"{folder}/{r}.pt") for r in range(world)]
            for dtype, micro_batch in found[0]:
                row = about | {"dtype": str(dtype)[6:], "micro_batch": micro_batch, "shares": shares}
                of_ranks = [errors(f[dtype, micro_batch], right, dtype) for f in found]
                rows.add(row | {key: max(e[key] for e in of_ranks) for key in of_ranks[0]})


KEY = ("network", "dtype", "micro_batch")
PARTS: dict[str, tuple[Callable[[Rows], None], tuple[str, ...]]] = {
    "exact": (exact, KEY),
    "randomness": (randomness, KEY),
    "rounding": (rounding, KEY),
    "ranks": (ranks, (*KEY, "shares")),
    "traced": (partial(compiled, backend="aot_eager"), KEY),
    "compiled": (partial(compiled, backend="inductor"), KEY),
}
