"""Attention with a BatchNorm in every projection, as in LeViT: which learning rates train once the BatchNorms are gone?

    python benchmarks/attention_start.py [--threads 1]

Four blocks of attention and MLP, 64 wide, on scikit-learn's digits as 16 tokens of 2 x 2 pixels; six epochs of SGD with
momentum 0.9 and a cosine schedule, a few seconds each. Writes ``results/attention-start.json``; rows are kept, so the
same command goes on.
"""

from __future__ import annotations

import argparse
import math
from unittest.mock import patch

import torch
import torch.nn.functional as F
from provenance import Rows
from sklearn.datasets import load_digits
from torch import Tensor, nn

from mimicnorm import MimicNorm, convert_
from mimicnorm.surgery import attention

RATES, SEEDS, EPOCHS, BATCH, TRAINED = (0.2, 0.05, 0.02, 0.002), (0, 1, 2), 6, 64, 1400
LARGE = "mimicnorm, attention not started small"
SCALARS = f"{LARGE}, scalars calibrated"  # PyTorch's own weights at branch ends, and scalars that make up for them
WAYS = ("batchnorm", SCALARS, LARGE, "mimicnorm", "mimicnorm, clipped", "mimicnorm, q and k left")


class Projection(nn.Module):
    """A linear layer with a BatchNorm over all tokens."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return self.norm(y.flatten(0, 1)).reshape_as(y)


class Attention(nn.Module):
    """Softmax attention; the variance of its logits is kept for the record."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.q, self.k, self.v, self.out = (Projection(width, width) for _ in range(4))
        self.heads, self.act, self.variance = heads, nn.Hardswish(), math.nan

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (p(x).reshape(batch, tokens, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
        logits = q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5
        if self.training and torch.is_grad_enabled():
            self.variance = float(logits.detach().var())
        mixed = (logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width)
        return self.out(self.act(mixed))


class Net(nn.Module):
    """Tokens, blocks, their mean, a classifier."""

    def __init__(self, width: int = 64, blocks: int = 4):
        super().__init__()
        self.embed, self.positions = Projection(4, width), nn.Parameter(0.02 * torch.randn(16, width))
        self.attention = nn.ModuleList(Attention(width) for _ in range(blocks))
        self.mlp = nn.ModuleList(
            nn.Sequential(Projection(width, 2 * width), nn.Hardswish(), Projection(2 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions
        for mixing, mlp in zip(self.attention, self.mlp, strict=True):
            x = x + mixing(x)
            x = x + mlp(x)
        return self.head(x.mean(1))


def digits() -> tuple[Tensor, Tensor]:
    """Tokens (1797, 16, 4) and classes, shuffled once."""
    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32)
    tokens = images.reshape(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    return ((tokens - images.mean()) / images.std())[order], torch.tensor(loaded.target)[order]


def started(way: str, seed: int, example: Tensor) -> Net:
    """The network at its start."""
    torch.manual_seed(seed)
    net = Net()
    if way == "batchnorm":
        return net
    where = (lambda _, name: not name.endswith(("q.norm", "k.norm"))) if way.endswith("left") else None
    variance = 1.0 if way in (LARGE, SCALARS) else attention.VARIANCE
    with patch.object(attention, "VARIANCE", variance), torch.no_grad():
        report = convert_(net, MimicNorm(), example=example, where=where)
        for step in report.layers:
            if step.scale is not None and way == SCALARS:  # the same function of other parameters
                layer = net.get_submodule(step.name)
                factor = layer.weight.std() * math.sqrt(3 * step.fan_in)
                layer.weight.div_(factor)
                layer.residual_scale.mul_(factor)
    return net


def train(net: Net, rate: float, seed: int, clip: float | None, x: Tensor, y: Tensor) -> dict:
    """Six epochs; the losses, the accuracy on the rest, the largest variance of logits."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    steps = EPOCHS * (TRAINED // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator, losses, largest = torch.Generator().manual_seed(seed), [], 0.0
    for _ in range(EPOCHS):
        for batch in torch.randperm(TRAINED, generator=generator).split(BATCH)[: TRAINED // BATCH]:
            loss = F.cross_entropy(net(x[batch]), y[batch])
            losses.append(loss.item())
            largest = max(largest, *(a.variance for a in net.attention))
            if not math.isfinite(losses[-1]) or not math.isfinite(largest):
                return {"diverged_at": len(losses)}
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        accuracy = float((net.eval()(x[TRAINED:]).argmax(1) == y[TRAINED:]).double().mean())
    return {"loss": sum(losses[-20:]) / 20, "accuracy": accuracy, "largest_variance_of_logits": largest}


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    rows = Rows("attention-start", "way", "rate", "seed", threads=asked.threads, epochs=EPOCHS, batch=BATCH, clip=1.0)
    x, y = digits()
    for rate in RATES:
        for way in WAYS:
            for seed in SEEDS:
                if (way, rate, seed) not in rows:
                    clip = 1.0 if way.endswith("clipped") else None
                    result = train(started(way, seed, x[:256]), rate, seed, clip, x, y)
                    rows.add({"way": way, "rate": rate, "seed": seed, **result})


if __name__ == "__main__":
    main()
