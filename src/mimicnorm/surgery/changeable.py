"""Whether a layer can be given another forward, other weights or a start; if not, why and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from mimicnorm.layers import has_own_forward
from mimicnorm.methods.edits import LayerEdit
from mimicnorm.surgery.probe import LayerProbe

REPLACED = (
    "its forward was replaced on the instance (a wrapper, a patch), so a change of its class would have no effect",
    "Take the wrapper off (del module.forward), convert, and put it back",
)
_DONE = {"centre": "centred", "standardise": "standardised"}
_ADDED = {
    "centre": ("residual_scale",),
    "standardise": ("residual_scale", "gain", "standardisation"),
    "bias": ("residual_scale", "input_bias"),
    "scale": ("residual_scale",),
    "trained": ("gamma", "beta", "norm_mean", "norm_var", "norm_eps", "centring"),
}  # attributes that a layer gets, by what is done to it


@dataclass(frozen=True)
class Ways:
    """What is known of a layer.

    Attributes:
        probe: What it lets be done to it.
        holds_weight: Whether its weight is a parameter of its own, not computed from others.
        inside: Whether every use of its weight is a call of the layer.
    """

    probe: LayerProbe
    holds_weight: bool
    inside: bool


def _centres(edit: LayerEdit) -> bool:
    """Whether the weight or its gradient is centred, alone or with more."""
    return edit.action in _DONE or (edit.action == "trained" and edit.centring is not None)


def why_not_tied(name: str, modules: Mapping[str, nn.Module], edits: Mapping[str, LayerEdit]) -> tuple[str, str] | None:
    """Say why a layer that is to be centred or standardised cannot be: another one has its weight, without that."""
    layer, edit = modules[name], edits[name]
    if not _centres(edit):
        return None
    weight = layer._parameters.get("weight")
    for other, module in modules.items():
        if module is layer or weight is None or not any(p is weight for p in module._parameters.values()):
            continue
        same = other in edits and _centres(edits[other])
        if not same or getattr(module, "transposed", False) != getattr(layer, "transposed", False):
            return (
                f"its weight is also that of {other}, which would not be {_DONE.get(edit.action, 'centred')} with it",
                "Give each a weight of its own, or leave its BatchNorm with where=",
            )
    return None


def why_not(layer: nn.Module, action: str, scaled: bool, starts: bool, ways: Ways) -> tuple[str, str] | None:
    """Say why a layer cannot be changed as planned, and what to do; or return None.

    Args:
        layer: The layer.
        action: "centre", "standardise", "bias", "keep" or "trained".
        scaled: Whether it gets a scalar.
        starts: Whether its weights are given a start.
        ways: What is known of it.
    """
    kind = type(layer).__name__
    changes = action != "keep" or scaled
    if (changes or starts) and not ways.holds_weight:
        return (
            "its weight is computed from other parameters (weight norm, a parametrization), so what would be "
            f"{_DONE.get(action, 'changed')} and initialised is not what the optimizer sees",
            "Remove it first (torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, "
            "remove_spectral_norm or prune.remove), "
            "or leave its BatchNorm with where=",
        )
    taken = [name for name in _ADDED.get(action, _ADDED["scale"] if scaled else ()) if hasattr(layer, name)]
    if taken:
        return (
            f"it has an attribute {taken[0]!r} of its own, and the conversion adds one of that name",
            "Rename it, or leave its BatchNorm with where=",
        )
    if changes and not ways.inside:
        return (
            "its weight is used by a function outside its own forward, which would not be changed",
            "Call the module itself, or leave its BatchNorm with where=",
        )
    if changes and "forward" in layer.__dict__:
        return REPLACED
    if changes and any(p.is_complex() for p in layer.parameters(recurse=False)):
        return (
            "its weight is complex, and a changed layer has the gradients of a real one",
            "Give real and imaginary parts a layer each, or leave its BatchNorm with where=",
        )
    if action == "trained" and not ways.probe.keeps:
        return f"{kind} does not just apply its weight", "Leave its BatchNorm with where=, or use a plain layer"
    if action in _DONE and not ways.probe.centres:
        version = "weight-mean" if action == "centre" else "standardised"
        if not has_own_forward(type(layer)):
            return (
                f"a hook writes into its weight (a mask, say), which its {version} version would undo",
                "Leave its BatchNorm with where=, or remove the hook",
            )
        return (
            f"{kind} has a forward of its own, and its {version} version gives another output",
            "Leave its BatchNorm with where=, or use a plain layer",
        )
    if (changes or starts) and not ways.probe.follows:
        return (
            f"the output of {kind} is not proportional to its weight (a standardised weight, for one), so neither "
            "initial weights nor a scalar can set the size of its signal",
            "Put a plain layer in its place (centred weights do what standardised ones are for), or leave its "
            "BatchNorm with where=",
        )
    return None
