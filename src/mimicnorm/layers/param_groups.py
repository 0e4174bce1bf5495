"""Parameters in groups for an optimizer: logit scales are not decayed."""

from __future__ import annotations

from typing import Any

from torch import nn

from mimicnorm.layers.last_norm import LastNorm


def param_groups(
    *modules: nn.Module, weight_decay: float, decay_scalars: bool = True, logit_scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Group the trainable parameters of a network for any optimizer: all with weight decay, logit scales without.

    A decayed logit scale is pulled towards 0, and the network's confidence with it. A group without parameters is left
    out.

    Args:
        *modules: The network, and a loss with parameters of its own if there is one (``LastNormCrossEntropy``).
        weight_decay: Of everything else.
        decay_scalars: Decay biases, residual scalars and the affine parameters of norms, too, as the paper's authors
            do. False moves all parameters of at most one dimension to the group without.
        logit_scale_lr: Learning rate of the logit scales. By default the optimizer's, which is right for SGD. Adam
            moves a parameter by about its rate in a step, so that 0.001 takes 10,000 steps to a scale of 10: give 0.01
            or more.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), LastNorm(4, logit_scale=True))
        >>> [(len(g["params"]), g["weight_decay"]) for g in param_groups(net, weight_decay=5e-4)]
        [(2, 0.0005), (1, 0.0)]
    """
    scales = {id(m.logit_scale) for root in modules for m in root.modules() if isinstance(m, LastNorm)}
    trained = {p: None for root in modules for p in root.parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
        {"params": [], "weight_decay": 0.0},
    ]
    for p in trained:
        groups[2 if id(p) in scales else 1 if p.dim() < 2 and not decay_scalars else 0]["params"].append(p)
    if logit_scale_lr is None:
        groups[1]["params"] += groups.pop()["params"]
    else:
        groups[2]["lr"] = logit_scale_lr
    return [g for g in groups if g["params"]]
