"""A last BN on dense outputs: a small U-Net, objects on background, nine pixels of ten are background.

    python benchmarks/segmentation.py [--threads 1]

A disc, a square or a cross of random place, size and (less so) colour on coloured noise, drawn anew for every step;
three seeds. The learning rate of each method is the best of three on validation images; the table is of test images
that no choice has seen. Object IoU is the mean over the three object classes, over all test images. Writes
``results/segmentation.json``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from provenance import Rows
from torch import Tensor, nn
from torch.nn import functional as F

import mimicnorm as mn

SIZE, BATCH, STEPS, CLASSES = 32, 32, 400, 4
RATES = (0.1, 0.2, 0.4)
METHODS: dict[str, mn.methods.Method] = {
    "batchnorm": mn.BatchNorm(),
    "mimicnorm": mn.MimicNorm(centre="backward"),
    "mimicnorm, logit_scale=False": mn.MimicNorm(centre="backward", logit_scale=False),
    "mimicnorm, last_norm=False": mn.MimicNorm(centre="backward", last_norm=False),
    "groupnorm-ws": mn.GroupNormWS(),
}


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw images (count, 3, 32, 32) and their classes per pixel; 0 is background."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, SIZE // 8, SIZE // 8, generator=g)
    images = 0.4 * F.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear")
    labels = torch.zeros(count, SIZE, SIZE, dtype=torch.long)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    kind = torch.randint(1, CLASSES, (count, 1, 1), generator=g)
    radius = torch.randint(4, 7, (count, 1, 1), generator=g)
    at = torch.randint(6, SIZE - 6, (2, count, 1, 1), generator=g)
    down, right = (rows - at[0]).abs(), (columns - at[1]).abs()
    disc, square = down**2 + right**2 <= radius**2, torch.maximum(down, right) <= 0.8 * radius
    cross = (torch.minimum(down, right) <= radius // 3) & (torch.maximum(down, right) <= radius)
    inside = torch.where(kind == 1, disc, torch.where(kind == 2, square, cross))
    colour = 2.0 * F.one_hot(kind.flatten() - 1, 3)[:, :, None, None] + 0.4 * torch.randn(count, 3, 1, 1, generator=g)
    images = torch.where(inside[:, None], colour, images)
    labels = torch.where(inside, kind, labels)
    return images + 0.2 * torch.randn(images.shape, generator=g), labels


class UNet(nn.Module):
    """Two levels down, two up; two convolutions with BatchNorm and ReLU at each."""

    def __init__(self, width: int = 12):
        super().__init__()

        def block(i: int, o: int) -> nn.Sequential:
            layers = [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
            more = [nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
            return nn.Sequential(*layers, *more)

        w = width
        self.down = nn.ModuleList([block(3, w), block(w, 2 * w), block(2 * w, 4 * w)])
        self.up = nn.ModuleList([block(6 * w, 2 * w), block(3 * w, w)])
        self.head = nn.Conv2d(w, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        x = self.up[0](torch.cat([F.interpolate(x, scale_factor=2.0), second], 1))
        return self.head(self.up[1](torch.cat([F.interpolate(x, scale_factor=2.0), first], 1)))


def train(method: mn.methods.Method, lr: float, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = UNet()
    mn.convert_(model, method, example=draw(BATCH, seed=0)[0])
    optimizer = torch.optim.SGD(mn.param_groups(model, weight_decay=5e-4), lr=lr, momentum=0.9)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 40) * (1 - step / STEPS)
        images, labels = draw(BATCH, seed=10_000 * (seed + 1) + step)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    logits = torch.cat([model(part) for part in images.split(64)])
    right, guess = logits.softmax(1).max(1)
    ious = [((guess == c) & (labels == c)).sum() / ((guess == c) | (labels == c)).sum() for c in range(1, CLASSES)]
    scales = [float(p.detach()) for n, p in model.named_parameters() if n.endswith("logit_scale")]
    diverged = not bool(logits.isfinite().all())
    return {
        "object_iou": round(float(torch.stack(ious).mean()), 4),
        "cross_entropy": None if diverged else round(float(F.cross_entropy(logits, labels)), 4),
        "confidence": None if diverged else round(float(right.mean()), 4),
        "accuracy": round(float((guess == labels).float().mean()), 4),
        "logit_scale": round(scales[0], 2) if scales else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    validation, test = draw(256, seed=1), draw(512, seed=2)
    background = float((test[1] == 0).float().mean())
    rows = Rows("segmentation", "method", "lr", "seed", "images", steps=STEPS, batch=BATCH, background=background)
    for name, method in METHODS.items():
        for lr in RATES:
            if (name, lr, 0, "validation") not in rows:
                rows.add({"method": name, "lr": lr, "seed": 0, "images": "validation"}
                         | evaluate(train(method, lr, 0), *validation))  # fmt: skip
        tried = {r["lr"]: r["object_iou"] for r in rows.rows if r["method"] == name and r["images"] == "validation"}
        best = max(tried, key=lambda lr: tried[lr] if tried[lr] == tried[lr] else -1.0)
        for seed in (1, 2, 3):
            if (name, best, seed, "test") not in rows:
                rows.add({"method": name, "lr": best, "seed": seed, "images": "test"}
                         | evaluate(train(method, best, seed), *test))  # fmt: skip


if __name__ == "__main__":
    main()
