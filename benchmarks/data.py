"""Images per second of the augmentation in memory, against torchvision's transforms; ``results/data.json``.

    python benchmarks/data.py --data-dir FOLDER [--rounds 15]

One thread, one process, torchvision's in a DataLoader, on CIFAR-100's training images; in turns, and the ratio is taken
within a round.
"""

from __future__ import annotations

import argparse

import torch
from provenance import provenance, save, zoo
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mimicnorm import data
from mimicnorm.compare.timing import interleaved, summary
from mimicnorm.data import Memory

BATCH, FEW, MANY = 256, 2_048, 20_480


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = data.load("cifar100", data_dir=args.data_dir)
    assert isinstance(source, Memory)
    order = torch.randperm(MANY, generator=torch.Generator().manual_seed(0)).split(BATCH)
    loader = DataLoader(Pictures(source, FEW), BATCH, shuffle=True, num_workers=0)
    steps = {
        "ours": lambda: list(map(len, source.batches(order, seed=0, epoch=0, augment=True))),
        "torchvision": lambda: list(map(len, loader)),
    }
    measured = summary(interleaved(steps, rounds=args.rounds, budget=float("inf")), "ours")
    rate = {"ours": MANY / measured["ours"]["seconds"], "torchvision": FEW / measured["torchvision"]["seconds"]}
    ratio = {name: value * MANY / FEW for name, value in measured["torchvision"]["ratio"].items()}
    about = provenance(batch=BATCH, threads=1, rounds=args.rounds)
    print(save("data", {**about, "images_per_second": rate, "ratio": ratio}))


if __name__ == "__main__":
    main()
