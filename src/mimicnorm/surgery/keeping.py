"""Trained networks (``init="keep"``): which BatchNorms and heads cannot be kept, and what keeping the others costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from mimicnorm.layers import WEIGHT_LAYERS, recoverable
from mimicnorm.surgery.graph import Graph
from mimicnorm.surgery.plan import Plan, count, first_names
from mimicnorm.surgery.preconditions import differs

_LEAVE = "leave the BatchNorm with where="


def refuse_statistics(norms: Mapping[str, nn.Module], plan: Plan) -> None:
    """Refuse BatchNorms whose running statistics cannot become constants: one refusal for each reason."""
    problems: dict[tuple[str, str], list[str]] = {}
    for name, norm in norms.items():
        if (problem := _problem(norm)) is not None:
            problems.setdefault(problem, []).append(name)
    for (reason, remedy), names in problems.items():
        others = f" (and in {count(len(names) - 1, 'other BatchNorm')}: {first_names(names[1:])})" if names[1:] else ""
        plan.refuse(names[0], f'init="keep" keeps running statistics, and here {reason}{others}', remedy)


def _problem(norm: Any) -> tuple[str, str] | None:
    """Say why a BatchNorm cannot be kept, and what to do; or return None."""
    values = [getattr(norm, name, None) for name in ("running_mean", "running_var", "weight", "bias")]
    mean, var, gamma, beta = values
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return "there are none (track_running_stats=False)", f"Estimate them before converting, or {_LEAVE}"
    tensors = [t for t in values if isinstance(t, Tensor)]
    if any(t.is_meta for t in tensors):
        return "they are on the meta device and hold no values", "Load the trained weights before converting"
    if not all(bool(t.isfinite().all()) for t in tensors) or bool((var < 0).any()):
        bad = "a mean, variance, gamma or beta is NaN or infinite, or a variance is negative"
        return bad, f"Load a whole checkpoint, or {_LEAVE}"
    batches = getattr(norm, "num_batches_tracked", None)
    counted = isinstance(batches, Tensor)
    seen = counted and int(batches) > 0
    moved = bool((mean != 0).any() or (var != 1).any())
    folded = not counted and (differs(gamma) or differs(beta))  # a frozen BatchNorm, its statistics in its affine
    if not (moved or seen or folded):
        return (
            "they were never set: mean 0, variance 1, no batch seen",
            'Load the trained weights, buffers included, before converting; a fresh network wants init="auto"',
        )
    return None


def refuse_trained_heads(model: nn.Module, plan: Plan) -> None:
    """Refuse a last BN on a head that was trained: it drops the means and variances of the classes."""
    for head in plan.heads:
        layers = [m for m in model.get_submodule(head.name).modules() if isinstance(m, WEIGHT_LAYERS)]
        if not layers or not all(map(looks_fresh, layers)):
            plan.refuse(
                head.name,
                "last_norm=True on a head that looks trained: an affine-free BatchNorm drops the means and variances "
                "that its classes have",
                "Leave the last BN out (last_norm=None), or replace the head before converting, as in "
                f"model.{head.name or 'head'} = nn.Linear(features, classes)",
            )


def looks_fresh(layer: Any) -> bool:
    """Tell whether a layer's weights are as they were drawn.

    They are if the bias is zero, or if weights and bias are distributed as PyTorch draws them: uniform on
    +-1 / sqrt(fan-in), which training leaves at once.

    Example:
        >>> layer = nn.Linear(64, 10)
        >>> looks_fresh(layer), looks_fresh(nn.Linear(64, 10).requires_grad_(False).apply(lambda m: m.weight.mul_(3)))
        (True, False)
    """
    weight, bias = layer.weight.detach().float(), layer.bias
    if weight.is_meta:
        return False
    if bias is not None and not bool(bias.detach().any()):
        return True
    bound = 1 / math.sqrt(max(1, weight[0].numel()))
    inside = all(bool((t.detach().abs() <= bound * (1 + 1e-3)).all()) for t in (weight, bias) if t is not None)
    second, fourth = (float((weight / bound).pow(k).mean()) for k in (2, 4))  # 1/3 and 1/5 if uniform
    noise = 5 / math.sqrt(weight.numel())
    return inside and abs(second - 1 / 3) < 0.3 * noise and abs(fourth - 1 / 5) < 0.27 * noise


def note_affines(plan: Plan, graph: Graph, modules: Mapping[str, nn.Module]) -> None:
    """Say what BatchNorms that no layer takes up cost: the gradient of gamma needs their input."""
    names = []
    for edit in plan.norms:
        gamma, beta = (getattr(modules[edit.name], key, None) for key in ("weight", "bias"))
        trains = isinstance(gamma, Tensor) and gamma.requires_grad
        if edit.action == "affine" and trains and not (edit.before_relu and recoverable(gamma, beta)):
            names.append(edit.name)
    calls = [call for name in names for call in graph.calls(name)]
    if calls:
        saved = sum(math.prod(c.shape[1:]) * c.dtype.itemsize for c in calls) / 2**20
        plan.notes.append(
            f"{count(len(names), 'BatchNorm')} ({first_names(names)}) stay as affine maps whose inputs are saved for "
            f"backward, for the gradients of gamma (up to {saved:.2f} MiB per sample). Freeze those gammas "
            "(gamma.requires_grad_(False)) to save nothing there"
        )
