"""Images per second of the augmentation in memory, against torchvision's transforms; ``results/data.json``.

    python benchmarks/data.py [--data-dir DIR] [--rounds 15]

One thread, one process, torchvision's in a DataLoader; rounds are interleaved and the ratio is taken within each. The
images are CIFAR-100's training set where its files are at hand, random bytes otherwise: the work is the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from provenance import provenance, save, zoo
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mimicnorm import data, models
from mimicnorm.data import Memory
from mimicnorm.errors import DataError

BATCH = 256


class Pictures(Dataset):
    """The images as torchvision's CIFAR classes keep and give them."""

    def __init__(self, source: Memory, count: int):
        transforms = zoo.torchvision().transforms
        self.pixels = source.images[:count].permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = source.labels[:count].tolist()
        steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize(source.mean, source.std)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def rate(batches: Callable[[], Iterable], count: int) -> tuple[float, float]:
    """Images per second by the clock and by the processor's time, which neighbours on the machine do not stretch."""
    wall, own = time.perf_counter(), time.process_time()
    for _ in batches():
        pass
    return count / (time.perf_counter() - wall), count / (time.process_time() - own)


def loaded(data_dir: str | None) -> tuple[Memory, dict]:
    try:
        wall, own = time.perf_counter(), time.process_time()
        source = data.load("cifar100", data_dir=data_dir)
        seconds = {"load_seconds": time.perf_counter() - wall, "load_cpu_seconds": time.process_time() - own}
        return source, {"images": f"CIFAR-100, {len(source)} training images", **seconds}
    except DataError:
        images, labels = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8), torch.zeros(50_000).long()
        thirds = (0.5, 0.5, 0.5)
        source = Memory("random", 100, (3, 32, 32), "cifar", "standard", thirds, thirds, images, labels)
        return source, {"images": "random bytes"}


def sizes() -> list[dict]:
    rows = []
    for name in models.names():
        counts = {}
        for stem in ("cifar", "imagenet"):
            with torch.device("meta"):
                counts[stem] = sum(p.numel() for p in models.build(name, input=stem).parameters())
        rows.append({"network": name, "parameters": counts})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source, about = loaded(args.data_dir)
    few, many = 2_048, 20_480
    pictures = Pictures(source, few)
    rows = []
    for number in range(args.rounds):
        order = torch.randperm(many, generator=torch.Generator().manual_seed(number))
        ours = rate(lambda: source.batches(order.split(BATCH), seed=0, epoch=number, augment=True), many)  # noqa: B023
        theirs = rate(lambda: DataLoader(pictures, BATCH, shuffle=True, num_workers=0), few)
        rows.append({"ours": ours, "torchvision": theirs, "ratio": [a / b for a, b in zip(ours, theirs, strict=True)]})
        print(f"round {number}: {rows[-1]['ratio'][0]:.1f} by the clock, {rows[-1]['ratio'][1]:.1f} by processor time")

    def middle(key: str, which: int) -> float:
        return statistics.median(row[key][which] for row in rows)

    summary = {
        "images_per_second": {"ours": middle("ours", 0), "torchvision": middle("torchvision", 0)},
        "images_per_cpu_second": {"ours": middle("ours", 1), "torchvision": middle("torchvision", 1)},
        "ratio": middle("ratio", 0),
        "ratio_by_cpu_time": middle("ratio", 1),
        "smallest_ratio": min(row["ratio"][0] for row in rows),
    }
    settings = provenance(batch=BATCH, threads=1, rounds=args.rounds)
    save("data", {**about, **summary, "rounds": rows, "networks": sizes(), **settings})
    print(summary)


if __name__ == "__main__":
    main()
