"""The signal of converted networks at initialisation, over seeds; ``results/signal.json``.

    python benchmarks/signal_at_start.py [--seeds 8] [--only NAME ...]

``theory``: variance of the first convolution's output in each residual branch over the predicted v (ResNets), or of
every layer (VGG-16), the largest over the smallest. ``calibrate``: the variance of every layer that owned a BatchNorm,
at its first use, on the batch it was calibrated on and on another one (both normal noise), and the largest variance
there that any convolution or linear layer puts out, and any module at all (sums, too). Rows are kept: the same command
goes on.
"""

from __future__ import annotations

import argparse

import torch
from provenance import Rows, zoo
from signals import largest_variance, variances

from mimicnorm.layers import WEIGHT_LAYERS
from mimicnorm.methods import MimicNorm
from mimicnorm.surgery.convert import convert_

THEORY = {"resnet18": 224, "resnet50": 224, "vgg16_bn": 224}
CALIBRATE = {
    "mobilenetv3_small_100": 96,
    "efficientnet_b0": 96,
    "regnety_002": 96,
    "densenet121": 96,
    "repvgg_a0": 96,
    "mobileone_s0": 96,
    "resnetv2_50": 96,
    "hrnet_w18_small": 96,
}
SAMPLES = 8


def theory(name: str, side: int) -> dict[str, float]:
    model = zoo.torchvision().models.get_model(name)
    steps = convert_(model, MimicNorm(), example=(1, 3, side, side), init="theory").layers
    if name.startswith("resnet"):
        steps = [s for s in steps if s.name.endswith(".conv1")]
    found = variances(model.eval(), [s.name for s in steps], torch.randn(2, 3, side, side))
    ratios = [found[s.name] / (s.v if name.startswith("resnet") else 1.0) for s in steps]
    return {"largest_over_smallest": max(ratios) / min(ratios)}


def calibrate(name: str, side: int) -> dict[str, float]:
    model = zoo.timm().create_model(name)
    x, other = torch.randn(2, SAMPLES, 3, side, side)
    owners = [s.name for s in convert_(model, MimicNorm(), example=x, init="calibrate").layers]
    same, another = (variances(model, owners, batch).values() for batch in (x, other))
    layers = [n for n, m in model.named_modules() if isinstance(m, WEIGHT_LAYERS)]
    return {
        "least": min(same),
        "most": max(same),
        "least_on_another_batch": min(another),
        "most_on_another_batch": max(another),
        "largest_of_layers": max(variances(model, layers, other).values()),
        "largest_variance": largest_variance(model, other),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--only", nargs="+", default=[*THEORY, *CALIBRATE])
    asked = parser.parse_args()
    rows = Rows("signal", "network", "seed", seeds=asked.seeds, samples=SAMPLES)
    for init, measure, networks in (("theory", theory, THEORY), ("calibrate", calibrate, CALIBRATE)):
        for name, side in networks.items():
            for seed in range(asked.seeds) if name in asked.only else ():
                if (name, seed) not in rows:
                    torch.manual_seed(seed)
                    found = {key: round(value, 4) for key, value in measure(name, side).items()}
                    rows.add({"network": name, "seed": seed, "init": init, "pixels": side, **found})


if __name__ == "__main__":
    main()
