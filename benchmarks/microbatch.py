"""Micro-batches against the whole batch; one JSON file in ``results/`` per part, figures in ``docs/figures/``.

    python benchmarks/microbatch.py [PART ...] [figures]

exact      relative error of the gradient, five networks, micro-batches 1 to 16 of 32, fp64 and fp32; beside it the
           error of plain accumulation
randomness with dropout and stochastic depth, against one graph over the same micro-batches and random numbers
compiled   bodies under torch.compile
ranks      the same over 2 and 3 processes with uneven shares
training   50 steps at batch 64 and at micro-batch 4: how far the weights are apart, converted and with BatchNorm
memory     peak of what autograd keeps, at batch 64 and at micro-batch 1 of 64
time       a batch in micro-batches of 8, exactly and by plain accumulation: ratio over interleaved rounds
accuracy   digits, batch 64, micro-batches 1 to 64: BatchNorm, GroupNorm + weight standardisation, MimicNorm
figures    draws the last but one and the training run from their JSON files
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from provenance import RESULTS, ROOT, provenance, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(ROOT / "tests" / "microbatch"))

import zoo
from whole_and_parts import SavedBytes, Segmenter, dict_loss, full_batch, gradient, one_graph

import mimicnorm as mn
from mimicnorm.microbatch import AccumulationWarning, backward

MICRO_BATCHES = (1, 2, 3, 7, 16)
BATCH = 32
FIGURES = ROOT / "docs" / "figures"


# -- networks ----------------------------------------------------------------------------------------------------


def resnet18(classes: int = 10) -> nn.Module:
    return zoo.torchvision().models.resnet18(num_classes=classes)


def vgg11(classes: int = 10) -> nn.Module:
    """VGG-11 with global pooling and a small classifier, as is usual for small images."""
    net = zoo.torchvision().models.vgg11_bn(init_weights=False)
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier = nn.Sequential(nn.Linear(512, 256), nn.ReLU(True), nn.Dropout(), nn.Linear(256, classes))
    return net


def shufflenet(classes: int = 10) -> nn.Module:
    return zoo.torchvision().models.shufflenet_v2_x0_5(num_classes=classes)


def efficientnet_b0(classes: int = 10) -> nn.Module:
    return zoo.torchvision().models.efficientnet_b0(num_classes=classes)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": resnet18,
    "VGG-11": vgg11,
    "ShuffleNetV2 0.5": shufflenet,
    "EfficientNet-B0": efficientnet_b0,
    "segmentation": Segmenter,
}


def built(name: str, dtype: torch.dtype, random: bool = False) -> tuple[nn.Module, Callable, Tensor, Tensor]:
    """A converted network, its loss, a batch of 32."""
    torch.manual_seed(0)
    net = NETWORKS[name]().to(dtype)
    if not random:
        for m in net.modules():
            if "dropout" in type(m).__name__.lower() or "stochastic" in type(m).__name__.lower():
                m.p = 0.0
    side = 64 if name == "EfficientNet-B0" else 32  # which halves its input five times
    x = torch.randn(BATCH, 3, side, side, dtype=dtype)
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


def error(net: nn.Module, right: Tensor) -> float:
    return float((gradient(net) - right).norm() / right.norm())


def head_of(net: nn.Module) -> str:
    return next(n for n, m in net.named_modules() if hasattr(m, "last_norm"))


# -- parts -------------------------------------------------------------------------------------------------------


def exact() -> dict:
    rows = []
    for name in NETWORKS:
        for dtype in (torch.float64, torch.float32):
            net, loss_fn, x, y = built(name, dtype)
            whole, _ = full_batch(net, loss_fn, x, y)
            right = gradient(whole)
            for micro_batch in MICRO_BATCHES:
                net.zero_grad()
                backward(net, loss_fn, x, y, micro_batch=micro_batch)
                row = {"network": name, "dtype": str(dtype)[6:], "micro_batch": micro_batch, "error": error(net, right)}
                if dtype == torch.float64 and micro_batch in (2, 7, 16):
                    net.zero_grad()
                    accumulate(net, loss_fn, x, y, micro_batch)
                    row["plain_accumulation_error"] = error(net, right)
                rows.append(row)
                print(row)
    return {"gradient": rows}


def randomness() -> dict:
    rows = []
    for name in ("VGG-11", "EfficientNet-B0"):  # dropout; dropout and stochastic depth
        net, loss_fn, x, y = built(name, torch.float64, random=True)
        for micro_batch in (1, 7):
            reference = copy.deepcopy(net)
            torch.manual_seed(1)
            one_graph(reference, loss_fn, x, y, micro_batch, head_of(reference))
            net.zero_grad()
            torch.manual_seed(1)
            backward(net, loss_fn, x, y, micro_batch=micro_batch)
            rows.append({"network": name, "micro_batch": micro_batch, "error": error(net, gradient(reference))})
            print(rows[-1])
    return {"gradient_fp64": rows}


def compiled() -> dict:
    rows = []
    for name in ("segmentation", "VGG-11"):
        net, loss_fn, x, y = built(name, torch.float64)
        right = gradient(full_batch(net, loss_fn, x, y)[0])
        body = torch.compile(net)
        net.zero_grad()
        backward(body, loss_fn, x, y, micro_batch=16)
        rows.append({"network": name, "micro_batch": 16, "error": error(net, right)})
        print(rows[-1])
    return {"gradient_fp64": rows}


SHARES = {2: (13, 19), 3: (5, 20, 7)}


def _rank(rank: int, world: int, name: str, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    net, loss_fn, x, y = built(name, torch.float64)
    wrapped = DistributedDataParallel(net)
    parts = {}
    for micro_batch in (1, 3, 7):
        net.zero_grad()
        share = [t.split(SHARES[world])[rank] for t in (x, y)]
        backward(wrapped, loss_fn, *share, micro_batch=micro_batch)
        parts[micro_batch] = gradient(net).clone()
    torch.save(parts, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def ranks() -> dict:
    rows = []
    for name in ("ShuffleNetV2 0.5", "segmentation"):
        net, loss_fn, x, y = built(name, torch.float64)
        right = gradient(full_batch(net, loss_fn, x, y)[0])
        for world, shares in SHARES.items():
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_rank, (world, name, folder), nprocs=world)
                found = [torch.load(f"{folder}/{r}.pt") for r in range(world)]
            for micro_batch in found[0]:
                worst = max(float((f[micro_batch] - right).norm() / right.norm()) for f in found)
                rows.append({"network": name, "shares": shares, "micro_batch": micro_batch, "error": worst})
                print(rows[-1])
    return {"gradient_fp64": rows}


class Residual(nn.Module):
    """A block of the digits network."""

    def __init__(self, i: int, o: int, stride: int, conv: Callable[..., nn.Module], norm: Callable[..., nn.Module]):
        super().__init__()
        self.conv1, self.norm1 = conv(i, o, 3, stride, 1, bias=False), norm(o)
        self.conv2, self.norm2 = conv(o, o, 3, 1, 1, bias=False), norm(o)
        self.short = nn.Identity() if i == o else nn.Sequential(conv(i, o, 1, stride, bias=False), norm(o))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.short(x)).relu()


def digits_net(
    conv: Callable[..., nn.Module] = nn.Conv2d, norm: Callable[..., nn.Module] = nn.BatchNorm2d
) -> nn.Module:
    """A ResNet of 8 layers for 8 x 8 images."""
    blocks = [Residual(16, 16, 1, conv, norm), Residual(16, 32, 2, conv, norm), Residual(32, 32, 1, conv, norm)]
    stem = [conv(1, 16, 3, 1, 1, bias=False), norm(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class StandardisedConv(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)


def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(data.images, dtype=torch.float32)[order, None] / 8 - 1
    return x, torch.tensor(data.target)[order]


def network(method: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    if method == "groupnorm+ws":
        return digits_net(StandardisedConv, lambda c: nn.GroupNorm(4, c)).to(dtype)
    net = digits_net().to(dtype)
    if method == "mimicnorm":
        mn.convert_(net, mn.MimicNorm(), example=torch.zeros(2, 1, 8, 8, dtype=dtype), init="theory")
    return net


def gradient_step(net: nn.Module, way: str, x: Tensor, y: Tensor, micro_batch: int) -> None:
    if way == "exact":
        backward(net, F.cross_entropy, x, y, micro_batch=micro_batch)
    elif way == "whole":
        F.cross_entropy(net(x), y).backward()
    elif way == "reordered":  # what rounding alone does
        F.cross_entropy(net(x.flip(0)), y.flip(0)).backward()
    else:
        accumulate(net, F.cross_entropy, x, y, micro_batch)


def training(steps: int = 50, batch: int = 64, micro_batch: int = 4, lr: float = 0.1) -> dict:
    images, labels = digits()
    runs = {}
    for name, method, way, dtype in [
        ("MimicNorm, microbatch.backward, fp64", "mimicnorm", "exact", torch.float64),
        ("MimicNorm, microbatch.backward, fp32", "mimicnorm", "exact", torch.float32),
        ("MimicNorm, whole batch in another order, fp32", "mimicnorm", "reordered", torch.float32),
        ("MimicNorm, plain accumulation, fp64", "mimicnorm", "accumulate", torch.float64),
        ("BatchNorm, plain accumulation, fp64", "batchnorm", "accumulate", torch.float64),
    ]:
        nets = [network(method, 0, dtype) for _ in range(2)]
        optimizers = [torch.optim.SGD(n.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4) for n in nets]
        apart = []
        order = torch.Generator().manual_seed(1)
        for _ in range(steps):
            pick = torch.randint(len(images), (batch,), generator=order)
            x, y = images[pick].to(dtype), labels[pick]
            for net, optimizer, how in zip(nets, optimizers, ("whole", way), strict=True):
                optimizer.zero_grad()
                gradient_step(net, how, x, y, micro_batch)
                optimizer.step()
            a, b = (torch.cat([p.detach().flatten().double() for p in n.parameters()]) for n in nets)
            apart.append(float((a - b).norm() / a.norm()))
        runs[name] = apart
        print(name, apart[0], apart[-1])
    return {"steps": steps, "batch": batch, "micro_batch": micro_batch, "weights_apart": runs}


def memory(batch: int = 64, side: int = 64) -> dict:
    rows = []
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        net = make()
        mn.convert_(net, mn.MimicNorm(), example=(2, 3, side, side), init="theory")
        segments = name == "segmentation"
        x = torch.randn(batch, 3, side, side)
        y = torch.randint(4, (batch, side, side)) if segments else torch.randint(10, (batch,))
        loss_fn = dict_loss if segments else F.cross_entropy
        row: dict = {"network": name, "batch": batch, "pixels": side}
        for micro_batch in (None, 8, 1):
            with (saved := SavedBytes([*net.parameters(), *net.buffers(), x])):
                if micro_batch is None:
                    loss_fn(net(x), y).backward()
                else:
                    backward(net, loss_fn, x, y, micro_batch=micro_batch)
            row["whole_bytes" if micro_batch is None else f"micro_batch_{micro_batch}_bytes"] = saved.peak
            net.zero_grad()
        row["ratio"] = row["micro_batch_1_bytes"] / row["whole_bytes"]
        rows.append(row)
        print(row)
    return {"peak_saved_for_backward": rows}


def timing(batch: int = 32, side: int = 112, micro_batch: int = 8, rounds: int = 8) -> dict:
    net = resnet18(1000)
    mn.convert_(net, mn.MimicNorm(), example=(2, 3, side, side), init="theory")
    x, y = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))
    clocks = {"wall": time.perf_counter, "processor": time.process_time}
    seconds = {clock: {"accumulate": [], "exact": []} for clock in clocks}
    for r in range(rounds + 1):
        for way in ("accumulate", "exact") if r % 2 else ("exact", "accumulate"):
            net.zero_grad()
            start = {clock: read() for clock, read in clocks.items()}
            gradient_step(net, way, x, y, micro_batch)
            for clock, read in clocks.items():
                seconds[clock][way] += [read() - start[clock]] if r else []  # the first round warms up
    found = {}
    for clock, of in seconds.items():
        ratios = sorted(b / a for a, b in zip(of["accumulate"], of["exact"], strict=True))
        found[clock] = {
            "ratio_median": statistics.median(ratios),
            "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "ratio_of_minima": min(of["exact"]) / min(of["accumulate"]),
            "seconds": of,
        }
        print(clock, found[clock])
    return {
        "network": "ResNet-18",
        "pixels": side,
        "batch": batch,
        "micro_batch": micro_batch,
        "rounds": rounds,
        **found,
    }


WAYS = {
    "BatchNorm": ("batchnorm", "accumulate"),
    "GroupNorm + WS": ("groupnorm+ws", "accumulate"),
    "MimicNorm, plain accumulation": ("mimicnorm", "accumulate"),
    "MimicNorm, microbatch.backward": ("mimicnorm", "exact"),
}


def accuracy(epochs: int = 4, batch: int = 64, seeds: int = 3, lr: float = 0.1) -> dict:
    """Every row is kept as soon as it is there, and a run that was interrupted goes on."""
    setting = {"epochs": epochs, "batch": batch, "seeds": seeds, "lr": lr}
    path = RESULTS / "microbatch-accuracy.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = before["rows"] if setting.items() <= before.items() else []
    for name, (method, way) in WAYS.items():
        for micro_batch in (64, 16, 4, 2, 1):
            if micro_batch == 1 and (method, way) == ("mimicnorm", "accumulate"):
                continue  # a lone sample has no variance: an error that says so
            if any(r["method"] == name and r["micro_batch"] == micro_batch for r in rows):
                continue
            found = [trained(method, way, micro_batch, seed, epochs, batch, lr) for seed in range(seeds)]
            rows.append({"method": name, "micro_batch": micro_batch, "accuracy": found})
            print(rows[-1])
            save("microbatch-accuracy", {**setting, "rows": rows})
    return {**setting, "rows": rows}


def trained(method: str, way: str, micro_batch: int, seed: int, epochs: int, batch: int, lr: float) -> float:
    """Test accuracy on the digits after training."""
    images, labels = digits()
    train = 1344
    net = network(method, seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=epochs * (train // batch))
    g = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for pick in torch.randperm(train, generator=g).split(batch):
            optimizer.zero_grad()
            gradient_step(net, way, images[pick], labels[pick], micro_batch)
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        return float((net(images[train:]).argmax(1) == labels[train:]).float().mean())


# -- figures -----------------------------------------------------------------------------------------------------

COLOURS = {"BatchNorm": "#c0504d", "GroupNorm + WS": "#8b7fb5", "plain": "#d9a05f", "exact": "#2f7f7c"}


def colour(name: str) -> str:
    return COLOURS.get(name) or COLOURS["BatchNorm" if "BatchNorm" in name else "plain" if "plain" in name else "exact"]


def figures() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def start() -> tuple:
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        return figure, axes

    data = json.loads((RESULTS / "microbatch-training.json").read_text())
    figure, axes = start()
    for name, apart in data["weights_apart"].items():
        line = ":" if "another order" in name else "--" if "fp32" in name else "-"
        axes.semilogy(range(1, len(apart) + 1), apart, color=colour(name), linestyle=line, label=name)
    axes.set_ylim(1e-17, 10)
    axes.set_xlabel(f"step (batch {data['batch']}, micro-batch {data['micro_batch']})")
    axes.set_ylabel("distance from the weights of\nthe full-batch run (relative)")
    axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.42), reverse=True)
    figure.savefig(FIGURES / "microbatch-training.png", dpi=150)

    data = json.loads((RESULTS / "microbatch-accuracy.json").read_text())
    figure, axes = start()
    floor = 90
    for i, name in enumerate(WAYS):
        rows = sorted((r for r in data["rows"] if r["method"] == name), key=lambda r: r["micro_batch"])
        places = [r["micro_batch"] * 2 ** (0.06 * (i - 1.5)) for r in rows]  # side by side, to be told apart
        means = [100 * statistics.mean(r["accuracy"]) for r in rows]
        axes.plot(places, means, "o-", color=colour(name), label=name, markersize=4)
        for place, mean, r in zip(places, means, rows, strict=True):
            axes.vlines(place, 100 * min(r["accuracy"]), 100 * max(r["accuracy"]), color=colour(name), alpha=0.5)
            if mean < floor:
                text = f"{mean:.0f} % at micro-batch {r['micro_batch']}"
                away = {"xytext": (-75, 16), "textcoords": "offset points", "arrowprops": {"arrowstyle": "->"}}
                axes.annotate(text, (place, floor), fontsize=8, color=colour(name), **away)
    axes.set_ylim(floor, 100)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes := (1, 2, 4, 16, 64), [str(s) for s in sizes])
    axes.set_xlabel(f"micro-batch (batch {data['batch']} in all)")
    axes.set_ylabel("test accuracy on digits, %")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(FIGURES / "microbatch-accuracy.png", dpi=150)


PARTS: dict[str, Callable[[], dict]] = {
    "exact": exact,
    "randomness": randomness,
    "compiled": compiled,
    "ranks": ranks,
    "training": training,
    "memory": memory,
    "time": timing,
    "accuracy": accuracy,
}


def main(names: list[str]) -> None:
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    for name in names or [*PARTS, "figures"]:
        if name == "figures":
            figures()
        else:
            path = save(
                f"microbatch-{name}", {**PARTS[name](), **provenance(part=name, threads=torch.get_num_threads())}
            )
            print(Path(path).name)


if __name__ == "__main__":
    main(sys.argv[1:])
