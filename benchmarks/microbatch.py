"""Micro-batches against the whole batch; one JSON file in ``results/`` per part, figures in ``docs/figures/``.

    python benchmarks/microbatch.py [PART ...] [figures]

exact      relative error of the gradient, five networks, micro-batches 1 to 16 of 32, fp64 and fp32; beside it the
           error of plain accumulation
randomness the same with dropout and stochastic depth, against one graph over the same micro-batches and random numbers
rounding   fp32, full batch and micro-batches each against fp64: whose rounding an error is
ranks      the same over 2 and 3 processes with uneven shares
traced     the same with bodies under torch.compile, traced and differentiated by it but run operation by operation
compiled   the same with the default backend (minutes of compiling for each network)
training   50 steps at batch 64 and at micro-batch 4: how far the weights are apart, converted and with BatchNorm
memory     peak of what autograd keeps, at batch 64 and at micro-batch 1 of 64
time       a batch in micro-batches of 8, exactly and by plain accumulation: ratio over interleaved rounds
accuracy   digits, batch 64, micro-batches 1 to 64: BatchNorm, GroupNorm + weight standardisation, MimicNorm
figures    draws the last but one and the training run from their JSON files

The first six are in ``exactness.py``; they and ``accuracy`` keep every row as soon as it is there, and go on where
they were interrupted.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import exactness
import torch
import torch.nn.functional as F
from blocks.text import load
from exactness import NETWORKS, accumulate, resnet18
from provenance import ROOT, Rows, provenance, save, zoo
from torch import Tensor, nn
from whole_and_parts import SavedBytes, dict_loss

import mimicnorm as mn
from mimicnorm.compare.timing import interleaved, summary
from mimicnorm.layers import LastNorm
from mimicnorm.microbatch import backward
from mimicnorm.pictures import canvas
from mimicnorm.pictures import save as save_picture

FIGURES = ROOT / "docs" / "figures"


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
    dense: dict[str, tuple[Callable, int]] = {
        "segmentation": (dict_loss, 4),
        "LR-ASPP MobileNetV3": (lambda out, t: F.cross_entropy(out["out"], t), 21),
    }
    for name, make in {**NETWORKS, "LR-ASPP MobileNetV3": lraspp}.items():
        torch.manual_seed(0)
        net = make()
        mn.convert_(net, mn.MimicNorm(), example=(2, 3, side, side), init="theory")
        x = torch.randn(batch, 3, side, side)
        loss_fn, classes = dense.get(name, (F.cross_entropy, 10))
        y = torch.randint(classes, (batch, side, side) if name in dense else (batch,))
        row: dict = {"network": name, "batch": batch, "pixels": side}
        ways: dict[str, dict | None] = {
            "whole": None,
            "micro_batch_8": {"micro_batch": 8},
            "micro_batch_1": {"micro_batch": 1},
            "micro_batch_1_loss_in_pieces": {"micro_batch": 1, "loss_in_pieces": True},
        }
        for way, settings in ways.items():
            with (saved := SavedBytes([*net.parameters(), *net.buffers(), x, y])):
                if settings is None:
                    loss_fn(net(x), y).backward()
                else:
                    backward(net, loss_fn, x, y, **settings)
            row[f"{way}_bytes"] = saved.peak
            net.zero_grad()
        row["logits_bytes"] = batch * logits_bytes(net, x[:1])  # which have to be kept, whatever is done
        row["ratio"] = row["micro_batch_1_bytes"] / row["whole_bytes"]
        row["ratio_loss_in_pieces"] = row["micro_batch_1_loss_in_pieces_bytes"] / row["whole_bytes"]
        rows.append(row)
        print(row)
    return {"peak_saved_for_backward": rows}


def lraspp() -> nn.Module:
    """A segmentation network of the usual proportions."""
    make = zoo.torchvision().models.segmentation.lraspp_mobilenet_v3_large
    return make(weights=None, weights_backbone=None, num_classes=21)


def logits_bytes(net: nn.Module, x: Tensor) -> int:
    """What goes into the LastNorms for this input."""
    norms = [m for m in net.modules() if isinstance(m, LastNorm)]
    sizes: list[int] = []
    handles = [m.register_forward_pre_hook(lambda _, a: sizes.append(a[0].nbytes)) for m in norms]
    net.eval()(x)
    net.train()
    for handle in handles:
        handle.remove()
    return sum(sizes)


def timing(batch: int = 32, side: int = 112, micro_batch: int = 8, rounds: int = 8) -> dict:
    net = resnet18(1000)
    mn.convert_(net, mn.MimicNorm(), example=(2, 3, side, side), init="theory")
    x, y = torch.randn(batch, 3, side, side), torch.randint(1000, (batch,))

    def step(way: str) -> None:
        net.zero_grad()
        gradient_step(net, way, x, y, micro_batch)

    steps = {way: partial(step, way) for way in ("accumulate", "exact")}
    found = {}
    for name, clock in {"wall": time.perf_counter, "processor": time.process_time}.items():
        seconds = interleaved(steps, rounds=rounds, budget=float("inf"), clock=clock)
        measured = summary(seconds, "accumulate")["exact"]["ratio"]
        found[name] = {"ratio_median": measured["value"], "ratio": measured, "seconds": seconds}
        print(name, measured)
    about = {"network": "ResNet-18", "pixels": side, "batch": batch, "micro_batch": micro_batch, "rounds": rounds}
    return about | found


WAYS = {
    "BatchNorm": ("batchnorm", "accumulate"),
    "MimicNorm, plain accumulation": ("mimicnorm", "accumulate"),
    "MimicNorm, microbatch.backward": ("mimicnorm", "exact"),
    "GroupNorm + WS": ("groupnorm+ws", "accumulate"),
}


def accuracy(epochs: int = 4, batch: int = 64, seeds: int = 3, lr: float = 0.1) -> None:
    rows = Rows("microbatch-accuracy", "method", "micro_batch", epochs=epochs, batch=batch, seeds=seeds, lr=lr)
    for name, (method, way) in WAYS.items():
        for micro_batch in (64, 16, 4, 2, 1):
            if micro_batch == 1 and (method, way) == ("mimicnorm", "accumulate"):
                continue  # a lone sample has no variance: an error that says so
            if (name, micro_batch) not in rows:
                found = [trained(method, way, micro_batch, seed, epochs, batch, lr) for seed in range(seeds)]
                rows.add({"method": name, "micro_batch": micro_batch, "accuracy": found})


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
    data = load("microbatch-training")
    figure, (axes,) = canvas(1, 1, 6.4, 3.8)
    for name, apart in data["weights_apart"].items():
        line = ":" if "another order" in name else "--" if "fp32" in name else "-"
        axes.semilogy(range(1, len(apart) + 1), apart, color=colour(name), linestyle=line, label=name)
    axes.set_ylim(1e-17, 10)
    axes.set_xlabel(f"step (batch {data['batch']}, micro-batch {data['micro_batch']})")
    axes.set_ylabel("distance from the weights of\nthe full-batch run (relative)")
    axes.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.42), reverse=True)
    save_picture(figure, FIGURES / "microbatch-training.png", dpi=150)

    data = load("microbatch-accuracy")
    figure, (axes,) = canvas(1, 1, 6.4, 3.8)
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
    axes.set_xlabel(f"micro-batch (batch {data['settings']['batch']} in all)")
    axes.set_ylabel("test accuracy on digits, %")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    save_picture(figure, FIGURES / "microbatch-accuracy.png", dpi=150)


PARTS: dict[str, Callable[[], dict]] = {"training": training, "memory": memory, "time": timing}


def main(names: list[str]) -> None:
    torch.set_num_threads(int(os.environ.get("THREADS", "2")))
    threads = torch.get_num_threads()
    for name in names or [*exactness.PARTS, *PARTS, "accuracy", "figures"]:
        if name == "figures":
            figures()
        elif name == "accuracy":
            accuracy()
        elif name in exactness.PARTS:
            part, key = exactness.PARTS[name]
            part(Rows(f"microbatch-{name}", *key, part=name, threads=threads))
        else:
            save(f"microbatch-{name}", {**PARTS[name](), **provenance(part=name, threads=threads)})


if __name__ == "__main__":
    main(sys.argv[1:])
