"""The paper's figures on signal propagation, and those it should have had, each drawn by one function."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mimicnorm.errors import TheoryError
from mimicnorm.pictures import canvas, require_picture, save

from .kernels import block_scales, layerwise, residual_kernels
from .montecarlo import correlation_band, gradient_growth
from .networks import FiniteNetwork
from .spectrum import condition_number
from .transition import Transition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"straight": "#4477aa", "weight_mean": "#ee6677", "batch_norm": "#228833"}
LABELS = {"straight": "straight", "weight_mean": "weight mean", "batch_norm": "BatchNorm"}


def samples(inputs: Tensor | None, count: int, seed: int) -> Tensor:
    """Return inputs with |x|^2 = n_0: the caller's, or a Gaussian mixture of 10 classes."""
    rng = torch.Generator().manual_seed(seed)
    if inputs is None:
        centres = torch.randn(10, 784, dtype=torch.float64, generator=rng)
        which = torch.randint(10, (count,), generator=rng)
        x = centres[which] + torch.randn(count, 784, dtype=torch.float64, generator=rng) + 0.7
    else:
        flat = inputs.flatten(1).to(torch.float64)
        x = flat[torch.randperm(len(flat), generator=rng)[:count]]
    return x / x.norm(dim=1, keepdim=True) * math.sqrt(x.shape[1])


def deep_layers(kind: str, x: Tensor, layers: tuple[int, ...] = (20, 50), seed: int = 0) -> dict[int, Tensor]:
    """Return the pre-activations of some layers of a random network, 51 layers of width 256."""
    net = FiniteNetwork(x.shape[1], 256, 51, Transition(kind), outputs=256, seed=seed, last_norm=True)
    with torch.no_grad():
        return {i: h for i, h in enumerate(net.hidden(x), 1) if i in layers}


def pair_correlations(kind: str, x: Tensor, seed: int = 0) -> Tensor:
    """Return the correlations of pairs, one input of each half of x, after each of 30 layers of width 300."""
    half = len(x) // 2
    net = FiniteNetwork(x.shape[1], 300, 30, Transition(kind), outputs=300, seed=seed, last_norm=True)
    with torch.no_grad():  # under BatchNorm all pairs run in one batch
        steps = [torch.nn.functional.cosine_similarity(h[:half], h[half : 2 * half]) for h in net.hidden(x)]
    return torch.stack(steps)


def distributions(inputs: Tensor | None = None, seed: int = 0) -> Figure:
    """Draw 30 channels of layers 20 and 50 over a batch of 2000 (paper figures 2 and 3)."""
    x = samples(inputs, 2000, seed)
    figure, axes = canvas(2, 3, 10, 5)
    pick = torch.randperm(256, generator=torch.Generator().manual_seed(seed))[:30]
    for column, kind in enumerate(COLOURS):
        for row, (layer, h) in enumerate(deep_layers(kind, x, seed=seed).items()):
            box = axes[row][column].boxplot(h[:, pick].T.tolist(), showfliers=False, widths=0.7, patch_artist=True)
            for patch in box["boxes"]:
                patch.set(facecolor=COLOURS[kind], alpha=0.5, lw=0.5)
            axes[row][column].set(title=f"{LABELS[kind]}, layer {layer}", ylim=(-4.5, 4.5), xticks=[])
            axes[row][column].axhline(0, color="0.6", lw=0.5, zorder=0)
    axes[1][1].set_xlabel("30 channels, each a box over 2000 inputs")
    axes[0][0].set_ylabel("pre-activation")
    axes[1][0].set_ylabel("pre-activation")
    return figure


def transitions(inputs: Tensor | None = None, seed: int = 0) -> Figure:
    """Draw the transition operators, their fixed points and a path to them (paper figure 4)."""
    del inputs, seed
    figure, axes = canvas(1, 2, 9, 4.2)
    rho = torch.linspace(-1, 1, 401, dtype=torch.float64)
    for axis, kind, start in zip(axes, ("straight", "weight_mean"), (-0.6, 0.97), strict=True):
        t = Transition(kind)
        axis.plot(rho, rho, color="0.6", lw=0.8)
        axis.plot(rho, t(rho), color=COLOURS[kind], lw=2)
        path = t.iterate(start, 25).tolist()
        steps = list(pairwise(path))
        xs = [v for a, b in steps for v in (a, a, b)]
        ys = [v for i, (a, b) in enumerate(steps) for v in (a if i else -1.0, b, b)]
        axis.plot(xs, ys, color="0.2", lw=0.7)
        axis.plot([start], [-1.0], "|", color="0.2", clip_on=False)
        for point in t.fixed_points:
            face = "white" if point.stability == "unstable" else COLOURS[kind]
            axis.plot([point.rho], [point.rho], "o", ms=8, mfc=face, mec=COLOURS[kind], mew=2, zorder=4)
            words, place = f"{point.stability}, slope {point.slope:.3f}", (-14, -3 if point.rho else 6)
            axis.annotate(words, (point.rho, point.rho), xytext=place, textcoords="offset points", ha="right")
        axis.set(title=LABELS[kind], xlabel="correlation before", ylabel="correlation after", aspect="equal")
        axis.set(xlim=(-1, 1.08), ylim=(-1, 1.12))
    return figure


def correlations(inputs: Tensor | None = None, seed: int = 0) -> Figure:
    """Draw the correlations of 200 pairs over 30 layers of width 300, with their band (appendix B.1)."""
    x = samples(inputs, 400, seed)
    figure, axes = canvas(1, 3, 10, 3.3)
    band = 1.96 * correlation_band(300)
    for axis, kind in zip(axes, COLOURS, strict=True):
        paths, layers = pair_correlations(kind, x, seed), range(1, 31)
        axis.plot(layers, paths, color=COLOURS[kind], lw=0.4, alpha=0.35)
        axis.plot(layers, Transition(kind).iterate(paths[0].mean(), 29), color="black", lw=1.5, label="infinite width")
        if kind != "straight":
            axis.axhspan(-band, band, color="0.85", zorder=0, label=f"95 % band at width 300: ±{band:.2f}")
        axis.set(title=LABELS[kind], xlabel="layer", ylim=(-0.6, 1.05))
        axis.legend(frameon=False, loc="lower right" if kind == "straight" else "upper right", fontsize=8)
    axes[0].set_ylabel("correlation of a pair")
    return figure


def ntk(inputs: Tensor | None = None, seed: int = 0) -> Figure:
    """Draw condition number, gradient growth and off-diagonal decay of the NTK over depth."""
    x = samples(inputs, 64, seed)
    figure, axes = canvas(1, 3, 10, 3.3)
    depth = 30
    for kind in ("straight", "weight_mean"):
        t, style = Transition(kind), {"color": COLOURS[kind], "label": LABELS[kind]}
        path = list(layerwise(x, depth, t))
        layers = range(1, depth + 1)
        axes[0].plot(layers, [condition_number(k.ntk) for k in path], **style)
        axes[0].plot(layers, [condition_number(k.nngp) for k in path], ls=":", color=COLOURS[kind])
        axes[1].plot(layers, [t.chi1 ** (i - 1) for i in layers], **style)
        off = [(k.ntk.sum() - k.ntk.trace()) / (len(x) - 1) / k.ntk.trace() for k in path]
        axes[2].plot(layers, off, **style)
    axes[0].axhline((len(x) + 3) / 3, color="0.6", lw=0.8)
    axes[0].text(depth, (len(x) + 3) / 3, "(m + 3)/3", ha="right", va="top", color="0.4")
    at, bn = range(5, depth + 1, 5), "batch_norm"
    for kind, batch, mark in (("straight", 64, "o"), ("weight_mean", 64, "o"), (bn, 256, "s"), (bn, 4, "v")):
        growth = gradient_growth(kind, width=128, depth=8, batch=batch, count=5, seed=seed).value
        words = f"{LABELS[kind]}{f', batch {batch}' if kind == bn else ''}: {growth:.2f} per layer"
        axes[1].plot(at, [growth ** (i - 1) for i in at], mark, ms=4, color=COLOURS[kind], label=words)
    axes[1].plot([], [], " ", label="(marks: growth over 6 layers, continued)")
    axes[2].plot(layers, [0.5 ** (i - 1) for i in layers], color="0.6", lw=0.8, label="1/2 per layer")
    axes[0].set(title=f"condition number, {len(x)} points", xlabel="weight layers", yscale="log", ylim=(0.7, 5e5))
    axes[0].plot([], [], ":", color="0.4", label="dotted: NNGP kernel")
    axes[1].set(title="squared gradient, relative", xlabel="layers back", yscale="log", ylim=(1e-12, 1e14))
    axes[2].set(title="off-diagonal / diagonal NTK", xlabel="weight layers", yscale="log", ylim=(1e-9, 2))
    for axis, place in zip(axes, ("upper right", "lower left", "lower left"), strict=True):
        axis.legend(frameon=False, fontsize=7, loc=place)
    return figure


def residual(inputs: Tensor | None = None, seed: int = 0) -> Figure:
    """Draw the variance after each residual block for each rule of the branch scalar."""
    x = samples(inputs, 256, seed)
    figure, axes = canvas(1, 1, 6, 3.8)
    blocks = 16
    # the authors' weights of variance 2/n lose 1 - 1/pi per centred layer; their scalar gives 1.2^2 back
    code = [1.2**2 * (1 - 1 / math.pi) / s for s in range(1, blocks + 1)]
    rules = {
        "weight mean, 1/sqrt(l) (paper)": ("weight_mean", block_scales("sqrt", blocks), "#ee6677"),
        "BatchNorm": ("batch_norm", block_scales("none", blocks), "#228833"),
        "weight mean, 1.2^k / l (code)": ("weight_mean", code, "#ccbb44"),
        "weight mean, no scalar": ("weight_mean", block_scales("none", blocks), "#4477aa"),
    }
    for label, (kind, scales, colour) in rules.items():
        t = Transition(kind)
        theory = [1.0] + [float(residual_kernels(x[:2], b, t, scale=scales[:b]).rows[0]) for b in range(1, blocks + 1)]
        net = FiniteNetwork(x.shape[1], 256, blocks, t, residual=scales, readout=False, seed=seed, last_norm=True)
        with torch.no_grad():
            measured = [float((h**2).mean()) for h in net.hidden(x)]
        # the paper's rule and BatchNorm coincide: the wider line shows below the thinner
        wide = 5.0 if label.endswith("(paper)") else 1.5
        axes[0].plot(range(blocks + 1), theory, color=colour, label=label, lw=wide, alpha=0.5 if wide > 2 else 1)
        axes[0].plot(range(blocks + 1), measured, "o", ms=3.5, color=colour)
    axes[0].set(
        yscale="log", xlabel="residual block", ylabel="variance", title="lines: theory; dots: one net, width 256"
    )
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def phase(inputs: Tensor | None = None, seed: int = 0) -> Figure:
    """Draw the phases in the (sigma_w, sigma_b) plane for ReLU (with and without centring) and tanh."""
    del inputs, seed
    figure, axes = canvas(1, 3, 10, 3.4)
    ordered, chaotic, unbounded = ("#4477aa", 0.25), ("#ee6677", 0.25), "0.85"
    # tanh is odd: there is no mean for weight mean to take
    cases = [("relu", "straight"), ("relu", "weight_mean"), ("tanh", "straight")]
    for axis, (activation, kind) in zip(axes, cases, strict=True):
        t = Transition(kind, activation)
        # along the curve chi1 = 1 at variance q: sigma_w2 = 1 / E[phi'^2], and sigma_b2 is what q leaves
        q = torch.logspace(-4, 2.3, 300, dtype=torch.float64)
        power, slope = t.layer_power(q)
        w, b = (1 / slope).sqrt(), (q - power / slope).clamp(min=0).sqrt()
        edge = math.sqrt(t.weight_variance) if activation == "relu" else 3.0  # of bounded variance
        if activation == "relu":  # homogeneous: the curve is a vertical line
            w, b = torch.full((2,), math.sqrt(2)), torch.tensor([0.0, 1.0])
            axis.axvspan(edge, 3, color=unbounded, lw=0)
            axis.text((edge + 3) / 2, 0.5, "unbounded\nvariance", ha="center", color="0.3")
        axis.fill_betweenx(b, 0, w, color=ordered, lw=0)
        axis.fill_betweenx(b, w, edge, color=chaotic, lw=0)
        axis.plot(w, b, color="black", lw=1.5)
        axis.text(0.65, 0.5, "ordered", ha="center", color="#224466")
        if kind == "weight_mean":
            axis.text((edge + math.sqrt(2)) / 2, 0.5, "chaotic", ha="center", rotation=90, color="#aa3344")
        elif activation == "tanh":
            axis.text(2.5, 0.2, "chaotic", ha="center", color="#aa3344")
        axis.plot([math.sqrt(t.weight_variance)], [0], "k*", ms=11, clip_on=False, zorder=5)
        name = LABELS[kind] if activation == "relu" else "straight or weight mean"
        axis.set(title=f"{activation}, {name}", xlabel="sigma_w", xlim=(0, 3), ylim=(0, 1))
    axes[0].set_ylabel("sigma_b   (star: stable, no bias)")
    return figure


_DRAWERS: dict[str, Callable[..., Figure]] = {
    f.__name__: f for f in (distributions, transitions, correlations, ntk, residual, phase)
}
NAMES = tuple(_DRAWERS)


def draw(name: str, path: str | Path, *, inputs: Tensor | None = None, seed: int = 0) -> None:
    """Draw one figure of `NAMES` to a file.

    Args:
        name: one of `NAMES`.
        path: its ending chooses the format.
        inputs: samples (m, ...) for the figures that take data, such as MNIST; Gaussian mixtures when not given.
        seed: of samples and weights.
    """
    if name not in _DRAWERS:
        raise TheoryError(f"unknown figure {name!r}: choose one of {', '.join(NAMES)}.")
    require_picture(path)
    if inputs is not None and (inputs.dim() < 2 or len(inputs) < 2 or not bool(torch.isfinite(inputs).all())):
        raise TheoryError(f"inputs must be at least two finite samples (m, ...), not of shape {tuple(inputs.shape)}.")
    save(_DRAWERS[name](inputs=inputs, seed=seed), path)
