"""The surgery itself: layers change their class, BatchNorms become what is left of them, heads get their last BN.

Modules keep their identity: a layer changes its class to one derived from its own, a BatchNorm *becomes* an
``Identity``, a ``Shift``, a ``Scale`` or a ``Remains``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from mimicnorm.layers import (
    FixupScalars,
    GroupNorm,
    LastNorm,
    Remains,
    Scale,
    Shift,
    Standardisation,
    centre_,
    fixup_,
    last_norm_,
    scale_output_,
    standardise_,
)
from mimicnorm.surgery.probe import channels
from mimicnorm.surgery.steps import LayerStep, NormStep, Report


def operate(model: nn.Module, report: Report) -> list[tuple[Tensor, Tensor]]:
    """Do to a network what its plan says, and note in the report which parameters are new and which moved.

    Classes, attributes and registries change, and no value: of two biases in a row, the pairs are returned.

    Returns:
        (the layer's bias, the beta that is to be added to it).
    """
    merged: list[tuple[Tensor, Tensor]] = []
    modules = dict(model.named_modules())
    betas = {n.name: _as_parameter(getattr(modules[n.name], "bias", None)) for n in report.norms}
    for step in report.layers:
        beta = _operate_on_layer(modules[step.name], step, betas, report)
        merged += [(modules[step.name].bias, beta)] if beta is not None else []  # pyrefly: ignore
    moved = {step.beta_from for step in report.layers}
    for n in report.norms:
        if n.action != "leave":
            owner = modules[n.owner[0]] if n.owner else None
            _operate_on_norm(modules[n.name], n, None if n.name in moved else betas[n.name], owner, report)
    for h in report.heads:
        head = modules[h.name]
        like = next((p for p in head.parameters() if p.is_floating_point()), torch.empty(0))
        norm = LastNorm(h.outputs, h.dim, device=like.device, dtype=like.dtype)
        norm.train(head.training)
        last_norm_(head, norm)
    return merged


def _operate_on_layer(
    layer: nn.Module, step: LayerStep, betas: dict[str, Parameter | None], report: Report
) -> Parameter | None:
    """Change a layer; the beta that is to be added to the bias it has, if any."""

    def new(name: str, value: float, size: int = 1) -> Parameter:
        like = _stored_weight(layer)
        return _new(report, f"{step.name}.{name}", value, like, like.requires_grad, size)

    scale = new("residual_scale", step.scale) if step.scale is not None else None
    if step.action == "centre":
        centre_(layer, scale)
    elif step.action == "standardise":
        gain = new("gain", 1.0, _outputs(layer)) if step.learns_gain else None
        standardise_(layer, Standardisation(step.factor, step.output_factor), gain, scale)
    elif step.action == "bias":
        fixup_(layer, None if step.on_raw_input else new("input_bias", 0.0), scale)
    elif scale is not None:
        scale_output_(layer, scale)
    beta = betas.get(step.beta_from) if step.beta_from is not None else None
    if beta is None:
        return None
    report.moved_parameters[f"{step.beta_from}.bias"] = f"{step.name}.bias"
    if layer.bias is not None:
        return beta
    layer.register_parameter("bias", beta)
    return None


def _new(report: Report, name: str, value: float, like: Tensor, trains: bool, size: int = 1) -> Parameter:
    """A parameter that did not exist before, and a line about it in the report if it is trained."""
    parameter = Parameter(torch.full((size,), value, device=like.device, dtype=like.dtype), requires_grad=trains)
    report.new_parameters += [(name, parameter)] * trains
    return parameter


def _stored_weight(layer: nn.Module) -> Parameter:
    """What a layer's weight is, or is computed from: to compute that of a spectral norm would change its state."""
    weight = layer._parameters.get("weight")
    return weight if weight is not None else next(layer.parameters())


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def _as_parameter(t: Any) -> Parameter | None:
    if t is None or isinstance(t, Parameter):
        return t
    return Parameter(t.detach().clone(), requires_grad=False)  # a frozen BatchNorm keeps it as a buffer


def _operate_on_norm(
    norm: nn.Module, step: NormStep, beta: Parameter | None, owner: nn.Module | None, report: Report
) -> None:
    instead: nn.Module | None = None
    prefix = f"{step.name}.instead." if step.keeps else f"{step.name}."
    if step.action == "group":
        gamma = _as_parameter(getattr(norm, "weight", None))
        eps = float(getattr(norm, "eps", 1e-5))
        assert step.groups is not None
        instead = GroupNorm(step.groups, channels(norm), gamma, beta, step.channel_dim, eps)
        if step.keeps:
            report.moved_parameters |= {f"{step.name}.{k}": f"{prefix}{k}" for k, _ in instead.named_parameters()}
    elif step.action in ("shift", "scale"):
        known = (beta, next(iter(norm.buffers()), None), torch.empty(0))
        like: Any = _stored_weight(owner) if owner is not None else next(t for t in known if t is not None)
        trains = owner is None or like.requires_grad
        scale = None
        if step.action == "scale":
            assert step.scale is not None
            scale = _new(report, f"{prefix}residual_scale", step.scale, like, trains)
        if step.scalar:
            instead = FixupScalars(_new(report, f"{prefix}scalar_bias", 0.0, like, trains), scale)
        elif scale is not None:
            instead = Scale(scale, beta, step.channel_dim, step.factor)
        else:
            instead = Shift(beta, step.channel_dim)
        if beta is not None and not step.scalar:
            report.moved_parameters[f"{step.name}.bias"] = f"{prefix}bias"
    if instead is not None:
        instead.train(norm.training)
    if step.keeps:
        children = dict(norm.named_children())
        become(norm, Remains(instead, {n: children[n] for n in step.keeps}))
    else:
        become(norm, instead if instead is not None else nn.Identity())


def become(module: nn.Module, other: nn.Module) -> None:
    """Let a module take the class and state of another; it stays the same object, with its flag and its hooks.

    Plain public attributes stay readable, too: code that asks a BatchNorm for its ``num_features`` goes on working.
    """
    plain = {k: v for k, v in module.__dict__.items() if not k.startswith("_")}
    hooks = {
        k: v for k, v in module.__dict__.items() if k.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called"))
    }
    training = module.training
    module.__class__ = type(other)
    module.__dict__.clear()
    module.__dict__.update({**plain, **other.__dict__, **hooks})
    module.training = training
