"""Weights that somebody chose and that must not be drawn: frozen filter banks, sparse weights under a mask."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from mimicnorm.methods.edits import LayerEdit
from mimicnorm.surgery.plan import count, first_names

_MANY_ZEROS = 0.1  # of a drawn weight none is exactly zero


def given(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the layers among ``names`` whose weights must stay as they are or keep their zeros, with the reason.

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
    """Return the fraction of a weight that is exactly zero; 0 if it is all of it (a branch that starts at zero)."""
    if weight.is_meta:
        return 0.0
    zeros = float((weight.detach() == 0).float().mean())
    return zeros if zeros < 1 else 0.0


def notes_on_given(modules: Mapping[str, nn.Module], layers: Iterable[LayerEdit], starts: bool) -> list[str]:
    """Say in a plan's notes what becomes of weights that somebody chose.

    Args:
        modules: The network's, by name.
        layers: The planned layers.
        starts: Whether initial weights are set.
    """
    layers = list(layers)
    weights = {edit.name: modules[edit.name]._parameters.get("weight") for edit in layers}
    computed = [edit.name for edit in layers if weights[edit.name] is None and edit.start == "keep"]
    frozen = [edit.name for edit in layers if edit.start == "keep" and edit.name not in computed]
    sparse = [edit.name for edit in layers if edit.start == "scale"]
    drawn = {edit.name: weights[edit.name] for edit in layers if edit.start == "draw"}
    copies = [n for n, w in drawn.items() if w is not None and not w.requires_grad]
    as_it_is = () if starts else ("keep", "trained")
    changed = [edit.name for edit in layers if edit.name in drawn and edit.action not in as_it_is]
    masked = [n for n in changed if (w := drawn[n]) is not None and share_of_zeros(w) > _MANY_ZEROS]
    notes = []
    if frozen:
        notes.append(
            f"{count(len(frozen), 'frozen layer')} ({first_names(frozen)}) keep their weights: neither centred nor "
            "initialised. Unfreeze them before converting to change that"
        )
    if sparse:
        notes.append(
            f"{count(len(sparse), 'layer')} ({first_names(sparse)}) with zeros under a gradient hook: not centred, and "
            "only scaled, so that the zeros stay"
        )
    if starts and computed:
        notes.append(
            f"{count(len(computed), 'layer')} ({first_names(computed)}) keep their weights: these are computed from "
            "other parameters (weight norm, a parametrization), so no initial weights are set"
        )
    if starts and copies and len(copies) < len(layers):
        notes.append(
            f"{count(len(copies), 'frozen layer')} ({first_names(copies)}) will get new initial weights, too: load or "
            "copy the weights of copies and teachers again"
        )
    if masked:
        notes.append(
            f"{first_names(masked)}: many weights are exactly zero and will not stay so (nothing seen keeps them "
            "zero). If they are masked, freeze them before converting, or leave their BatchNorms with where="
        )
    return notes


def _is_copy(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Tell whether a layer is in a module whose sibling has the same parameters and trains."""
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
