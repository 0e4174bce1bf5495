"""Weights that are given and not to be drawn: frozen filter banks, sparse weights under a gradient mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from mimicnorm.surgery.steps import LayerStep, count, few

_MANY_ZEROS = 0.1  # of a drawn weight none is exactly zero


def given(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """The layers among ``names`` whose weights must stay as they are or keep their zeros, each with the reason.

    - "frozen": the weight does not train (a DCT, Gabor or wavelet bank), in a network that does. Not so in a frozen
      copy of a module that trains (a momentum encoder, a teacher): it must stay a copy. Nor in a network that is
      frozen altogether.
    - "sparse": the weight has zeros, and a hook on its gradient, which keeps them zero.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 8, 8).requires_grad_(False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3))
        >>> given(net, ["0", "2"])
        {'0': 'frozen'}
    """
    modules = dict(model.named_modules())
    trains = any(p.requires_grad for p in model.parameters())
    reasons: dict[str, str] = {}
    for name in names:
        weight = modules[name]._parameters.get("weight")
        if weight is None:
            continue
        if trains and not weight.requires_grad and not _is_copy(modules, name):
            reasons[name] = "frozen"
        elif (weight._backward_hooks or weight._post_accumulate_grad_hooks) and share_of_zeros(weight) > 0:
            reasons[name] = "sparse"
    return reasons


def share_of_zeros(weight: Tensor) -> float:
    """The fraction of a weight that is exactly zero; 0 if it is all of it (a branch that starts at zero)."""
    if weight.is_meta:
        return 0.0
    zeros = float((weight.detach() == 0).float().mean())
    return zeros if zeros < 1 else 0.0


def notes_on_given(
    modules: Mapping[str, nn.Module], reasons: Mapping[str, str], layers: Iterable[LayerStep], starts: bool
) -> list[str]:
    """What becomes of weights that somebody chose, as notes of a plan.

    Args:
        modules: The network's, by name.
        reasons: What ``given`` returned.
        layers: The planned layers.
        starts: Whether starting weights are set.
    """
    layers = list(layers)
    weights = {step.name: modules[step.name]._parameters.get("weight") for step in layers}
    frozen, sparse = ([n for n, reason in reasons.items() if reason == r] for r in ("frozen", "sparse"))
    copies = [n for n, w in weights.items() if n not in reasons and w is not None and not w.requires_grad]
    changed = [step.name for step in layers if step.name not in reasons and (starts or step.action != "keep")]
    masked = [n for n in changed if (w := weights[n]) is not None and share_of_zeros(w) > _MANY_ZEROS]
    notes = []
    if frozen:
        notes.append(
            f"{count(len(frozen), 'frozen layer')} ({few(frozen)}) keep their weights: neither centred nor given a "
            "start. Unfreeze them before converting if they shall be"
        )
    if sparse:
        notes.append(
            f"{count(len(sparse), 'layer')} ({few(sparse)}) with zeros under a gradient hook: not centred, and only "
            "scaled, so that the zeros stay"
        )
    if starts and copies and len(copies) < len(layers):
        notes.append(
            f"{count(len(copies), 'frozen layer')} ({few(copies)}) will get new starting weights, too: copies and "
            "teachers must be loaded or copied anew"
        )
    if masked:
        notes.append(
            f"{few(masked)}: many weights are exactly zero and will not stay so (nothing seen keeps them zero). If "
            "they are masked, freeze them before converting, or leave their BatchNorms with where="
        )
    return notes


def _is_copy(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether a layer is in a module beside which stands one of the same parameters that trains."""
    parts = name.split(".")
    for i in range(len(parts) - 1):
        parent, own, rest = ".".join(parts[:i]), parts[i], ".".join(parts[i + 1 :])
        copies = {n: m for n, m in modules[parent].named_children() if not n.isdigit()}
        if own not in copies:
            continue
        shapes = _shapes(copies[own])
        for other, module in copies.items():
            if other != own and _shapes(module) == shapes:
                weight: Tensor = module.get_submodule(rest).weight  # pyrefly: ignore
                if weight.requires_grad:
                    return True
    return False


def _shapes(module: nn.Module) -> list[tuple]:
    return [(name, p.shape) for name, p in module.named_parameters()]
