"""Segmentation in tiles: train on crops, predict a large image tile by tile, and get what the whole image gives.

python examples/segmentation_tiles.py --steps 60

The body of a converted network uses neither batch nor spatial statistics. What it says about a pixel depends on the
pixels around it and on nothing else, so a tile with a margin equals the whole image, padding included.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mimicnorm as mn

REACH = 5  # pixels that one output sees to each side: five 3 x 3 convolutions


def network(classes: int = 2, width: int = 16) -> nn.Sequential:
    """Five convolutions with BatchNorm; class scores for every pixel."""
    layers: list[nn.Module] = []
    for channels in (3, width, width, width, width):
        conv = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(width, classes, 1))


def draw(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy images with a bright square each, and the class of every pixel."""
    rows, columns = torch.arange(size).view(1, -1, 1), torch.arange(size).view(1, 1, -1)
    at = torch.randint(size // 2, (2, count, 1, 1))
    inside = (rows >= at[0]) & (rows < at[0] + size // 3) & (columns >= at[1]) & (columns < at[1] + size // 3)
    return torch.randn(count, 3, size, size) + 1.5 * inside[:, None], inside.long()


@torch.no_grad()
def in_tiles(model: nn.Module, image: Tensor, tile: int) -> Tensor:
    """Predict a (1, 3, height, width) image in tiles, each with the margin that its outputs see."""
    bands = []
    for top in range(0, image.shape[2], tile):
        band = []
        for left in range(0, image.shape[3], tile):
            up, back = min(top, REACH), min(left, REACH)  # no margin beyond the image: there the network pads
            seen = image[:, :, top - up : top + tile + REACH, left - back : left + tile + REACH]
            band.append(model(seen)[:, :, up : up + tile, back : back + tile])
        bands.append(torch.cat(band, 3))
    return torch.cat(bands, 2)


def main(steps: int = 60, crop: int = 24, size: int = 96, tile: int = 40) -> float:
    """Train on crops; return the largest difference between an image in tiles and the whole."""
    torch.manual_seed(0)
    model = network()
    mn.convert_(model, mn.MimicNorm(), example=(2, 3, crop, crop))
    optimizer = torch.optim.SGD(mn.param_groups(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
    for _ in range(steps):
        images, labels = draw(8, crop)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    image, labels = draw(1, size)
    whole = model.eval()(image).detach()
    difference = (in_tiles(model, image, tile) - whole).abs().max().item()
    print(f"{(whole.argmax(1) == labels).float().mean():.1%} of pixels right; tiles differ by at most {difference:.1e}")
    return difference


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
