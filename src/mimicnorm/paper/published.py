"""Every number of the paper's tables, as data. Accuracies in percent, memory in MB as printed."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """One row of Table 1 or Table 3.

    Attributes:
        accuracy: Top-1, in percent.
        deviation: Standard deviation over three runs; not given in Table 3.
        memory: In MB.
        starred: Whether the authors note "training is unstable, and fails to converge sometimes".
    """

    accuracy: float
    deviation: float | None
    memory: int
    starred: bool = False


TABLE1: dict[str, dict[str, Cell]] = {
    "vgg11": {
        "batchnorm": Cell(67.90, 0.14, 2971),
        "mimicnorm": Cell(67.87, 0.20, 2851),
        "nonorm": Cell(65.33, 0.08, 2831),
    },
    "vgg16": {
        "batchnorm": Cell(72.28, 0.05, 3745),
        "mimicnorm": Cell(72.47, 0.02, 3489),
        "nonorm": Cell(68.97, 0.36, 3469, starred=True),
    },
    "resnet18": {
        "batchnorm": Cell(74.72, 0.31, 4447),
        "fixup": Cell(70.48, 0.18, 4743),
        "mimicnorm": Cell(74.96, 0.14, 4157),
    },
    "resnet50": {
        "batchnorm": Cell(78.53, 0.26, 8533),
        "fixup": Cell(72.81, 0.10, 10283, starred=True),
        "mimicnorm": Cell(77.91, 0.20, 7533),
    },
    "squeezenet": {"batchnorm": Cell(70.88, 0.08, 3687), "mimicnorm": Cell(71.15, 0.10, 2693)},
    "shufflenetv2": {"batchnorm": Cell(71.10, 0.49, 3915), "mimicnorm": Cell(70.93, 0.13, 3141)},
}
"""CIFAR-100, batch 256 (ResNet50: 128), by network and method."""

TABLE2: dict[float, dict[str, float]] = {
    0.01: {"nonorm": 22.12, "weight-mean": 34.81, "mimicnorm": 38.39, "batchnorm": 37.82},
    0.02: {"nonorm": 26.76, "weight-mean": 43.07, "mimicnorm": 44.32, "batchnorm": 40.49},
    0.05: {"nonorm": 25.63, "weight-mean": 42.63, "mimicnorm": 49.53, "batchnorm": 37.97},
    0.1: {"nonorm": 1.24, "weight-mean": 36.49, "mimicnorm": 46.92, "batchnorm": 32.4},
    0.2: {"nonorm": 1.77, "weight-mean": 1.00, "mimicnorm": 39.41, "batchnorm": 25.5},
    0.5: {"nonorm": 1.00, "weight-mean": 1.00, "mimicnorm": 22.03, "batchnorm": 8.26},
    1.0: {"nonorm": 1.00, "weight-mean": 1.00, "mimicnorm": 9.83, "batchnorm": 3.93},
}
"""VGG16 on CIFAR-100: best accuracy in the first 10 epochs, by learning rate and method."""

TABLE3: dict[str, dict[str, Cell]] = {
    "vgg16": {
        "batchnorm": Cell(73.89, None, 62162),
        "mimicnorm": Cell(73.31, None, 56410),
        "nonorm": Cell(71.59, None, 56388),
    },
    "resnet18": {"batchnorm": Cell(69.76, None, 8057), "mimicnorm": Cell(70.15, None, 5603)},
    "resnet50": {
        "batchnorm": Cell(76.48, None, 27083),
        "fixup": Cell(72.40, None, 29267),
        "mimicnorm": Cell(76.84, None, 22489),
    },
    "resnet101": {"batchnorm": Cell(77.37, None, 37168), "mimicnorm": Cell(77.52, None, 30363)},
    "shufflenetv2_x0_5": {"batchnorm": Cell(59.77, None, 4385), "mimicnorm": Cell(58.31, None, 3603)},
}
"""ImageNet, batch 256, by network and method."""

BATCHES: dict[str, dict[str, int]] = {"cifar100": {"resnet50": 128}, "imagenet": {}}
"""Batch sizes that are not 256, by data set and network."""

BATCH_NORM_SHARE = 0.20
"""Of the total memory, in BatchNorm's buffers (Introduction)."""
LAST_NORM_MB = 20
"""What the last BN costs over no norm on CIFAR-100."""
FOLDED_SCALAR = 0.05
"""The least share of the memory that folding the scalar of a branch saves (Appendix C: 5 to 10 %)."""
CORRELATIONS = 0.2
"""Where correlations concentrate under BatchNorm and weight mean, at width 300 (Appendix B.1)."""

INTEGER_SPEED = 4
"""Times the throughput that training in integers may have (Appendix C)."""

TITLES = {
    "table1": "CIFAR-100, six networks: accuracy and memory",
    "table2": "VGG16 at seven learning rates: best accuracy in ten epochs",
    "table3": "ImageNet, five networks: accuracy and memory",
    "figure-shift": "channels of layers 20 and 50 of a straight network",
    "figure-bnwm": "channels of layer 50 under BatchNorm and weight mean",
    "figure-operator": "transition operators and their fixed points",
    "figure-vgg-ablation": "VGG16: both parts, each alone, none",
    "figure-resnet-ablation": "ResNet18 and ResNet50: both parts, each alone, none, Fixup",
    "figure-residual": "variance along residual blocks",
    "figure-correlation": "correlations of 200 pairs over depth (B.1)",
    "figure-variance": "variance of the logits in the first two epochs (B.2)",
    "appendix-c": "centring once, folded scalars, micro-batches, a last BN in the loss",
    "depthwise": "ShuffleNetV2 with its depthwise layers centred, too",
    "integer-training": "training in integers alone, on digits",
    "theorems": "Lemma 1, Theorems 1 to 3 and the NTK on real networks",
    "parity": "BatchNorm at its best against MimicNorm's defaults",
}
"""What each item of `mimicnorm.paper.ITEMS` shows, by name."""
ITEM_NAMES = tuple(TITLES)
"""For checks before torch loads."""
