"""Measure every number that docs/theory.md and docs/errata.md state; writes results/theory.json and the figures.

Run with MIMICNORM_DATA (or --data-dir) naming a folder that holds mnist/*.parquet for the parts on real digits:

    python benchmarks/theory.py --figures docs/figures
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import time
from dataclasses import asdict
from pathlib import Path

import torch
from provenance import provenance

from mimicnorm.data import Memory, load
from mimicnorm.theory import (
    FiniteNetwork,
    Transition,
    activation_stats,
    condition_number,
    dual,
    empirical_ntk,
    figures,
    gain,
    kernels,
    last_norm_floor,
    montecarlo,
    residual_kernels,
)
from mimicnorm.theory.quadrature import normal_nodes

SEED = 0
SIX = ("relu", "leaky_relu", "gelu", "silu", "tanh", "erf")
RHOS = (-0.9, 0.0, 0.5, 0.9, 0.99)
DEPTHS = (1, 2, 5, 10, 20, 50)
S = 1 - 1 / math.pi


def mnist(folder: str | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return 3,000 test digits, pixel-normalised, and their labels; None without the data."""
    if not (folder or os.environ.get("MIMICNORM_DATA")):
        return None
    source = load("mnist", "test", data_dir=folder)
    assert isinstance(source, Memory)
    return (source.images[:3000].double() / 255 - source.mean[0]) / source.std[0], source.labels[:3000]


def pairs_at(rhos: tuple[float, ...]) -> torch.Tensor:
    """Return a base vector and one partner per correlation, all with |x|^2 = n_0 = 2."""
    angles = torch.tensor([0.0, *(math.acos(rho) for rho in rhos)], dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], 1) * math.sqrt(2)


def predicted_spread(t: Transition, depth: int, width: int) -> float:
    """Return the sd of a network's variance at the last layer around its limit 1, to first order in 1/sqrt(width).

    A layer of n channels samples the second moment of phi with relative variance c/n, and every later layer
    multiplies what is there by the slope of the variance map.
    """
    z, w = normal_nodes(t.activation.kinks)
    phi = t.activation(z).detach()
    square = (phi - (w * phi).sum() * t.centred) ** 2
    c = t.effective_w2**2 * float((w * square**2).sum() - (w * square).sum() ** 2)
    return math.sqrt(c / width * sum(slope(t) ** (2 * layer) for layer in range(depth - 1)))


def slope(t: Transition) -> float:
    """Return dV/dq of the variance map at 1."""
    return (t.variance_map(1.001) - t.variance_map(0.999)) / 0.002


def agreement(width: int = 256, count: int = 16) -> dict:
    """Hold NNGP and NTK of random networks against the closed forms over activations, depths, correlations.

    What is counted was fixed before drawing: a row counts if the predicted spread of the variance is below 1,
    whatever came out; the others are in the file, too. Where the variance map repels (GELU, SiLU) a bias of
    variance 0.2, which makes it attract, is run beside the network without bias, at all depths.
    """
    x, rows = pairs_at((1.0, *RHOS))[1:], []
    stable = [Transition(kind, name) for kind in ("straight", "weight_mean") for name in SIX]
    biased = [Transition(t.kind, t.activation, sigma_b2=0.2) for t in stable if slope(t) > 1 + 1e-6]
    assert all(slope(t) < 1 for t in biased)
    for t in stable + biased:
        for depth in DEPTHS:
            exact, seeds = kernels(x, depth, t), range(SEED, SEED + count)
            with torch.no_grad():
                h = [FiniteNetwork(2, width, depth, t, outputs=width, seed=seed)(x) for seed in seeds]
            nets = (FiniteNetwork(2, width, depth, t, seed=seed + 1000) for seed in seeds)
            draws = {"nngp": [a @ a[0] / width for a in h], "ntk": [empirical_ntk(net, x)[0] for net in nets]}
            case = {"kind": t.kind, "activation": t.activation.name, "sigma_b2": t.sigma_b2, "depth": depth}
            case["predicted_spread"] = predicted_spread(t, depth, width)
            for name, values in draws.items():
                right, mean, error = getattr(exact, name)[0], torch.stack(values).mean(0), torch.stack(values).std(0)
                for j, rho in enumerate((1.0, *RHOS)):
                    row = {"kernel": name, **case, "rho": rho, "exact": float(right[j]), "estimate": float(mean[j])}
                    row |= {"standard_error": float(error[j]) / math.sqrt(count), "diagonal": float(right[0])}
                    # one layer has one NTK, whatever its weights: no spread, and only rounding as gap
                    row["sigmas"] = (row["estimate"] - row["exact"]) / max(row["standard_error"], 1e-12)
                    rows.append(row)
        print(f"  {t.kind} {t.activation.name} bias {t.sigma_b2}", flush=True)
    within = [row for row in rows if row["predicted_spread"] < 1]
    beyond = [row for row in rows if row["predicted_spread"] >= 1]
    by_depth = {d: summary([row for row in within if row["depth"] == d]) for d in DEPTHS}
    counted = {"width": width, "count": count, "within_reach": summary(within), "beyond_reach": summary(beyond)}
    return counted | {"within_reach_by_depth": by_depth, "rows": rows}


def summary(rows: list[dict]) -> dict:
    """Count how many standard errors the rows are off, and how large those are beside the kernel's diagonal."""
    sigmas = torch.tensor([row["sigmas"] for row in rows], dtype=torch.float64)
    relative = torch.tensor([row["standard_error"] / row["diagonal"] for row in rows])
    return {
        "rows": len(rows),
        "within_2": int((sigmas.abs() < 2).sum()),
        "within_4": int((sigmas.abs() < 4).sum()),
        "largest": float(sigmas.abs().max()),
        "mean": float(sigmas.mean()),
        "median_error_over_diagonal": float(relative.median()),
    }


def errata(count: int) -> dict:
    """Measure the numbers of each correction."""
    wm, straight = Transition("weight_mean"), Transition("straight")
    x = pairs_at((0.5,))
    off = []
    for t in (wm, straight):
        for rho in (-0.9, -0.5, 0.5, 0.9):
            path = t.iterate(rho, 50)
            slopes = t.derivative(path)
            for depth in (2, 3, 10, 50):
                right = sum(float(path[i]) * math.prod(slopes[i : depth - 1].tolist()) for i in range(depth))
                printed = sum(float(path[i]) * math.prod(slopes[i + 1 : depth].tolist()) for i in range(depth))
                assert abs(right - float(kernels(pairs_at((rho,)), depth, t).ntk[0, 1])) < 1e-9
                row = {"kind": t.kind, "rho": rho, "depth": depth, "right": right, "as_printed": printed}
                off.append(row | {"off_by": printed / right - 1})
    m = 32
    orthogonal = torch.eye(m, dtype=torch.float64) * math.sqrt(m)
    conditions = {}
    for depth in (2, 10, 50, 400):
        conditions[depth] = {
            f"{kind}_{name}": condition_number(getattr(kernels(orthogonal, depth, Transition(kind)), name))
            for kind in ("straight", "weight_mean")
            for name in ("nngp", "ntk")
        }
    ratio = [float(k[0, 1] / k[0, 0]) for k in (kernels(x, d, wm).ntk for d in (40, 41))]
    bn = FiniteNetwork(16, 256, 4, Transition("batch_norm"), outputs=4, last_norm=True, seed=SEED)
    data = torch.randn(24, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    bn_ntk = empirical_ntk(bn, data, mode="batch")
    row_sums = float(bn_ntk.sum(1).abs().max() / bn_ntk.diagonal().mean())
    growth = {"straight": montecarlo.gradient_growth("straight", count=count)}
    growth["weight_mean"] = montecarlo.gradient_growth("weight_mean", count=count)
    for batch in (4, 16, 64, 256):
        growth[f"batch_norm_{batch}"] = montecarlo.gradient_growth("batch_norm", batch=batch, count=count)
    blocks = {}
    for n in (8, 16):
        code = [1.44 * S / (i + 1) for i in range(n)]
        rules = {"sqrt": ("weight_mean", "sqrt"), "batch_norm": ("batch_norm", 1.0)}
        rules |= {"code": ("weight_mean", code), "none": ("weight_mean", "none")}
        for name, (kind, scale) in rules.items():
            estimate = montecarlo.residual_variance(kind, scale, n, count=count)
            blocks[f"{name}_{n}"] = {"exact": estimate.predicted, "estimate": estimate.value}
            blocks[f"{name}_{n}"]["standard_error"] = estimate.standard_error
    exact = residual_kernels(orthogonal[:2], 8, wm).rows
    return {
        "lemma1": [asdict(montecarlo.lemma1(n, 0.5, count=20 * count)) for n in (16, 64, 512)],
        "theorem1": [asdict(montecarlo.theorem1(kind, depth=5, width=512)) for kind in ("straight", "weight_mean")],
        "theorem2": [asdict(montecarlo.theorem2(n, 0.5, count=2 * count)) for n in (16, 64, 512)],
        "theorem3": [
            asdict(montecarlo.theorem3(kind, rho, depth, count=2 * count))
            for kind in ("straight", "weight_mean")
            for rho, depth in ((1.0, 1), (0.9, 10), (-0.9, 10))
        ],
        "ntk_product_range": off,
        "gain_1.2_variance_after_50": (1.2**2 * S) ** 50,
        "gain_exact": gain("relu") / math.sqrt(2),
        "condition_numbers_32_orthogonal_points": conditions,
        "ntk_off_diagonal_factor": ratio[1] / ratio[0],
        "straight_approach": float(1 - straight.iterate(0.0, 4000)[-1]) * 4000**2 / (9 * math.pi**2 / 2),
        "bn_output_ntk_row_sums_over_diagonal": row_sums,
        "bn_output_ntk_condition_centred": condition_number(bn_ntk, centered=True),
        "gradient_growth": {name: asdict(estimate) for name, estimate in growth.items()},
        "correlation_spread": asdict(montecarlo.correlation_spread(count=count)),
        "correlation_band_1.96_at_300": 1.96 * montecarlo.correlation_band(300),
        "residual": blocks,
        "residual_exact_8": float(exact[0]),
    }


def generalisation(data: tuple[torch.Tensor, torch.Tensor] | None, points: int = 500) -> dict | str:
    """Regress on MNIST with the NTK of plain networks by depth: training ease and test accuracy part ways."""
    if data is None:
        return "skipped: no MNIST folder was given"
    x = data[0][: 2 * points].flatten(1)
    x = x / x.norm(dim=1, keepdim=True) * math.sqrt(x.shape[1])
    y = torch.nn.functional.one_hot(data[1][: 2 * points], 10).double() - 0.1
    measured: dict = {"train_points": points, "test_points": points}
    for kind in ("straight", "weight_mean"):
        for depth in (2, 5, 10, 20, 50):
            ntk = kernels(x, depth, Transition(kind)).ntk
            train = ntk[:points, :points]
            predicted = ntk[points:, :points] @ torch.linalg.solve(train, y[:points])  # trained to the end
            right = predicted.argmax(1) == y[points:].argmax(1)
            measured[f"{kind}_{depth}"] = {
                "condition_number": condition_number(train),
                "test_accuracy": float(right.double().mean()),
                "test_prediction_rms": float(predicted.pow(2).mean().sqrt()),
            }
    return measured


def tails(data: tuple[torch.Tensor, torch.Tensor] | None) -> dict | str:
    """Measure variance and kurtosis of the channels that the figure of distributions shows without outliers."""
    if data is None:
        return "skipped: no MNIST folder was given"
    x = figures.samples(data[0], 2000, SEED)
    measured = {}
    for kind in ("straight", "weight_mean", "batch_norm"):
        net = FiniteNetwork(x.shape[1], 256, 51, Transition(kind), outputs=256, seed=SEED, last_norm=True)
        with torch.no_grad():
            for layer, h in enumerate(net.hidden(x), 1):
                if layer in (20, 50):
                    z = (h - h.mean(0)) / h.std(0)
                    measured[f"{kind}_{layer}"] = {"variance": float(h.var(0).mean()), "kurtosis": float((z**4).mean())}
    return measured


def speed() -> dict:
    """Time the kernels of 2,000 points at depth 50 and the NTK of a width-512, depth-10 network on 512 points."""
    x = torch.randn(2000, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))
    cpu: dict[str, float] = {}
    wall: dict[str, float] = {}
    threads = torch.get_num_threads()
    for name in ("relu", "gelu", "silu", "elu", "tanh"):
        # without a bias SiLU's variances drift apart over 50 layers, beyond what its interpolant covers
        transition = Transition("weight_mean", name, sigma_b2=0.2 * (name == "silu"))
        torch.set_num_threads(1)
        start = time.process_time()
        kernels(x, 50, transition)
        cpu[name] = time.process_time() - start
        torch.set_num_threads(2)
        start = time.perf_counter()
        kernels(x, 50, transition)
        wall[name] = time.perf_counter() - start
    torch.set_num_threads(threads)
    net = FiniteNetwork(100, 512, 10, Transition("weight_mean"), seed=SEED)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    empirical_ntk(net, x[:512])
    return {
        "kernels_2000_points_depth_50_cpu_seconds_one_thread": cpu,
        "kernels_2000_points_depth_50_seconds_two_threads": wall,
        "empirical_ntk_512_points_cpu_seconds": time.process_time() - start,
        "empirical_ntk_peak_mib_above_start": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "full_jacobian_mib": 512 * sum(p.numel() for p in net.parameters()) * 8 / 2**20,
    }


def confidence() -> dict:
    """How far a last BN lets the cross entropy fall: balanced classes, and one of four that has 92 %."""
    imbalanced = [276, 8, 8, 8]
    return {
        "balanced": {classes: last_norm_floor([1] * classes) for classes in (2, 10, 20, 80, 100, 1000)},
        "92_percent": last_norm_floor(imbalanced),
        "92_percent_by_scale": {scale: last_norm_floor(imbalanced, scale) for scale in (5, 10, 15, 20)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir")
    parser.add_argument("--figures", help="folder for the figures; none are drawn without it")
    parser.add_argument("--out", default="results/theory.json")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="measure these parts alone and update the file")
    parser.add_argument("--threads", type=int, default=1, help="small tensors: more threads mostly wait")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = mnist(options.data_dir)
    about = provenance(seed=SEED, count=options.count, threads=options.threads)
    result = {
        **about,
        "commits": {},
        "activations": {name: {"gain": gain(name), **asdict(activation_stats(name))} for name in SIX},
        "dual_relu_at_0_times_2pi": float(dual("relu", 0.0)) * 2 * math.pi,
    }
    parts = {
        "dual": lambda: [asdict(montecarlo.dual_activation(a, rho, count=40)) for a in SIX for rho in RHOS],
        "errata": lambda: errata(options.count),
        "generalisation_mnist": lambda: generalisation(data),
        "tails_mnist": lambda: tails(data),
        "agreement": agreement,
        # the one counted row beyond 4 standard errors, on 64 fresh networks
        "agreement_again": lambda: asdict(
            montecarlo.tangent_kernel(Transition("straight", "erf"), 1.0, 50, outputs=1, count=64, seed=5000)
        ),
        "confidence": confidence,
        "speed": speed,
    }
    out = Path(options.out)
    if options.only is not None and out.exists():
        result = json.loads(out.read_text()) | {k: v for k, v in result.items() if k != "commits"}
    for name in options.only or parts:
        start = time.perf_counter()
        result[name], result["commits"][name] = parts[name](), about["commit"]
        text = json.dumps(result, indent=1)  # the innermost lists and objects on one line each
        text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda match: re.sub(r"\s+", " ", match.group()), text)
        out.write_text(text + "\n")
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    if options.figures:
        for name in figures.NAMES:
            path = Path(options.figures, f"theory-{name}.png")
            figures.draw(name, path, inputs=None if data is None else data[0], seed=SEED)


if __name__ == "__main__":
    main()
