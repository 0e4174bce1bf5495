"""The figures about random networks, the lemma and the theorems: nothing is trained, and all is of the paper's size."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mimicnorm import data
from mimicnorm.paper.scales import Rows, Runs, Setting
from mimicnorm.theory import Transition, figures, montecarlo

NETWORKS = 5


def images(setting: Setting) -> Tensor:
    """Return images as rows with |x|^2 = n_0, as the theory wants them."""
    source = data.load(setting.images, data_dir=setting.data_dir, limit=4000)
    given = torch.cat([batch for batch, _ in source.plain_batches(500)])
    return figures.samples(given, 2000, seed=0)


def channels(kinds: tuple[str, ...], layers: tuple[int, ...]) -> Any:
    """Return the reducer of Figures 2 and 3: how far channels differ, and how far inputs differ within one.

    51 layers of width 256, the mean over five networks. ``between`` is the standard deviation over channels of a
    channel's mean, ``within`` the root mean square over channels of its standard deviation over inputs.
    """

    def rows(_runs: Runs, setting: Setting) -> list[dict[str, Any]]:
        x, made = images(setting), []
        for kind in kinds:
            measured: dict[int, list[tuple[float, float]]] = {}
            for seed in range(NETWORKS):
                for layer, h in figures.deep_layers(kind, x, layers, seed).items():
                    spread = float(h.mean(0).std()), float(h.var(0).mean().sqrt())
                    measured.setdefault(layer, []).append(spread)
            for layer, spreads in measured.items():
                between, within = (sum(values) / NETWORKS for values in zip(*spreads, strict=True))
                made.append({"kind": kind, "layer": layer, "between": between, "within": within})
        return made

    return rows


def operator(_runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return the fixed points of the transition operators, with their slopes (Figure 4)."""
    made = []
    for kind in ("straight", "weight_mean"):
        t = Transition(kind)
        points = [{"rho": float(p.rho), "slope": float(p.slope), "stability": p.stability} for p in t.fixed_points]
        made.append({"kind": kind, "chi1": float(t.chi1), "fixed_points": points})
    return made


def correlations(_runs: Runs, setting: Setting) -> list[dict[str, Any]]:
    """Return the correlations of 200 pairs after each of 30 layers of width 300 (Appendix B.1): 5, 50 and 95 %."""
    x, made = images(setting)[:400], []
    for kind in ("straight", "weight_mean", "batch_norm"):
        for layer, pairs in enumerate(figures.pair_correlations(kind, x), 1):
            low, median, high = pairs.quantile(torch.tensor([0.05, 0.5, 0.95], dtype=pairs.dtype)).tolist()
            made.append({"kind": kind, "layer": layer, "low": low, "median": median, "high": high})
    return made


def residual(_runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return the variance after residual blocks under BatchNorm and under the scalar 1/sqrt(l) (Figure 5)."""
    made = []
    for kind, scale in (("batch_norm", "none"), ("weight_mean", "sqrt"), ("weight_mean", "none")):
        for blocks in (1, 2, 4, 8):
            estimate = montecarlo.residual_variance(kind, scale, blocks)
            made.append({"kind": kind, "scale": scale, "blocks": blocks, **_numbers(estimate)})
    return made


def _numbers(estimate: montecarlo.Estimate) -> dict[str, float]:
    return {name: getattr(estimate, name) for name in ("value", "standard_error", "predicted")}


CHECKS = (
    montecarlo.lemma1,
    montecarlo.theorem1,
    montecarlo.theorem2,
    montecarlo.theorem3,
    montecarlo.gradient_growth,  # chi_1 of Theorem 3
    partial(montecarlo.tangent_kernel, Transition("weight_mean")),  # Eq. 6
)


def theorems(_runs: Runs, _setting: Setting) -> list[dict[str, Any]]:
    """Return each theorem's prediction beside real networks of finite width."""
    estimates = [check(seed=0) for check in CHECKS]
    return [{"statement": estimate.statement, **_numbers(estimate)} for estimate in estimates]


def drawer(figure: str) -> Any:
    """Return the function that draws one of the theory's figures on the item's images."""

    def draw(_rows: Rows, path: Path, setting: Setting) -> None:
        uses_images = figure in ("distributions", "correlations", "residual")
        figures.draw(figure, path, inputs=images(setting) if uses_images else None)

    return draw


STABLE_GAIN = 1 / (1 - 1 / math.pi)
"""chi_1 of BatchNorm and weight mean, Theorems 2 and 3."""
