"""Networks of ``accuracy.py`` that no method of the library makes: a fixed factor on the logits, a last BN on ScaledWS.

    python benchmarks/accuracy_networks.py --data-dir FOLDER [--jobs 2]

Ten of CIFAR-100's coarse classes, test set, three seeds, as in the part ``columns`` of ``accuracy.py``. Each network is
a recipe's, changed before it is trained. Finished runs are read: ``results/accuracy-networks.json``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from accuracy import COMMON, SEEDS, UNSCALED, run
from provenance import ROOT, provenance, save
from torch import Tensor, nn

from mimicnorm.layers import LastNorm
from mimicnorm.layers.last_norm import last_norm_
from mimicnorm.training import train
from mimicnorm.training.step import Trainer


class FixedScale(LastNorm):
    """A last BN whose normalised logits are multiplied by a constant."""

    factor = 1.0

    @property
    def weight(self) -> Tensor:  # pyrefly: ignore
        """The constant as BatchNorm's gamma."""
        return torch.full((self.num_features,), self.factor)


def multiplied(factor: float) -> Callable[[Any], None]:
    """Multiply the logits of a MimicNorm network by a constant."""

    def change(model: Any) -> None:
        norm = model.fc.last_norm
        norm.__class__, norm.factor = FixedScale, factor

    return change


def with_last_bn(model: Any) -> None:
    """Put a last BN with a learned scale on the logits of any network."""
    last_norm_(model.fc, LastNorm(model.fc.out_features, dim=-1, logit_scale=True))


WAYS: dict[str, tuple[str, tuple[str, ...], float, Callable[[Any], None]]] = {
    "MimicNorm, logits times 2": ("mimicnorm", UNSCALED, 0.1, multiplied(2.0)),
    "MimicNorm, logits times 3": ("mimicnorm", UNSCALED, 0.1, multiplied(3.0)),
    "scaled WS, a last BN and a logit scale": ("scaled-ws", (), 0.2, with_last_bn),
}
"""Method, settings, learning rate, and the change."""


def trained(way: str, seed: int, data_dir: str) -> dict[str, Any]:
    """Train one network; return its row."""
    torch.set_num_threads(1)
    method, settings, lr, change = WAYS[way]

    def changed(recipe: Any, model: nn.Module, *rest: Any) -> Trainer:
        change(model)
        return Trainer(recipe, model, *rest)

    recipe = run("ten", method, lr, seed, validation=0.0, settings=settings)
    folder = ROOT / "runs" / f"{way.replace(' ', '-')}-{seed}"
    identity = {"network": way}
    result = train(recipe, folder, data_dir=data_dir, progress=False, make_trainer=changed, identity=identity)
    last = result.history[-1] if result.history else {}
    shown = {name: last.get(name) for name in ("top1", "test_loss", "confidence", "calibration_error")}
    return {"way": way, "seed": seed, "lr": lr, "status": result.status, **shown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    cells = [(way, seed, options.data_dir) for way in WAYS for seed in SEEDS]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        rows = list(pool.map(trained, *zip(*cells, strict=True)))
    print(save("accuracy-networks", {**provenance(**COMMON), "rows": rows}))


if __name__ == "__main__":
    main()
