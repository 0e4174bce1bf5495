"""How large the signal is, layer by layer."""

from __future__ import annotations

import torch
from torch import nn


def variances(model: nn.Module, names, x) -> dict[str, float]:
    """Variance of each layer's output at its first use."""
    found: dict[str, float] = {}

    def note(name):
        def hook(module, args, output):
            found.setdefault(name, float(output.detach().var()))

        return hook

    handles = [model.get_submodule(n).register_forward_hook(note(n)) for n in names]
    with torch.no_grad():
        model(x)
    for h in handles:
        h.remove()
    return found


def largest_variance(model: nn.Module, x) -> float:
    seen = []

    def hook(module, args, output):
        if isinstance(output, torch.Tensor):
            seen.append(float(output.detach().float().var(correction=0)))

    handles = [m.register_forward_hook(hook) for m in model.modules()]
    with torch.no_grad():
        model(x)
    for h in handles:
        h.remove()
    return max(seen)
