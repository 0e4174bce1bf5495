"""Carry out edits: layers change their class, BatchNorms become what replaces them, heads get their last BN.

Modules keep their identity: a layer changes its class to one derived from the class it had; a BatchNorm *becomes* an
``Identity``, a ``Shift``, a ``Scale``, a ``GroupNorm``, a ``TrainedAffine`` or a ``Remains``.
"""

from __future__ import annotations

from collections.abc import Callable
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
    TrainedAffine,
    TrainedNorm,
    centre_,
    fixup_,
    keep_,
    last_norm_,
    scale_weight_,
    standardise_,
)
from mimicnorm.methods.edits import HeadEdit, LayerEdit, NormEdit
from mimicnorm.surgery.plan import Report
from mimicnorm.surgery.probe import channels


def operate(model: nn.Module, report: Report) -> list[tuple[Tensor, Tensor]]:
    """Carry out a plan, and list in the report which parameters are new and which moved.

    Classes, attributes and registries change, values do not. Where a layer with a bias takes a beta, the two are to
    be added: those pairs are returned.

    Returns:
        (the layer's bias, the beta to add to it).
    """
    surgeon = _Surgeon(model, report)
    for edit in report.edits:
        ACTIONS[edit.action](surgeon, surgeon.modules[edit.name], edit)
    return surgeon.sums


class _Surgeon:
    """One method per action; what they share: the network's modules, its betas, the report."""

    def __init__(self, model: nn.Module, report: Report):
        self.report, self.modules = report, dict(model.named_modules())
        self.betas = {n.name: _as_parameter(getattr(self.modules[n.name], "bias", None)) for n in report.norms}
        self.sums: list[tuple[Tensor, Tensor]] = []

    # -- layers --------------------------------------------------------------------------------

    def centre(self, layer: nn.Module, edit: LayerEdit) -> None:
        centre_(layer, self._residual_scale(layer, edit), edit.centring)  # pyrefly: ignore
        self._take_beta(layer, edit)

    def standardise(self, layer: Any, edit: LayerEdit) -> None:
        outputs = layer.out_channels if getattr(layer, "transposed", False) else layer.weight.shape[0]
        gain = self._new(_key(edit.name, "gain"), 1.0, _stored_weight(layer), outputs) if edit.learns_gain else None
        scale = self._residual_scale(layer, edit)
        standardise_(layer, Standardisation(edit.weight_factor, edit.factor), gain, scale)
        self._take_beta(layer, edit)

    def bias(self, layer: nn.Module, edit: LayerEdit) -> None:
        bias = None if edit.on_raw_input else self._new(_key(edit.name, "input_bias"), 0.0, _stored_weight(layer))
        fixup_(layer, bias, self._residual_scale(layer, edit), edit.scales_output)
        self._take_beta(layer, edit)

    def keep(self, layer: nn.Module, edit: LayerEdit) -> None:
        scale = self._residual_scale(layer, edit)
        if scale is not None:
            scale_weight_(layer, scale, edit.scales_bias, edit.scales_output)
        self._take_beta(layer, edit)

    def trained(self, layer: nn.Module, edit: LayerEdit) -> None:
        norm = self._trained_norm(edit.beta_from, edit.name) if edit.beta_from is not None else None
        keep_(layer, norm, edit.centring)  # pyrefly: ignore

    def _residual_scale(self, layer: nn.Module, edit: LayerEdit) -> Parameter | None:
        if edit.scale is None:
            return None
        return self._new(_key(edit.name, "residual_scale"), edit.scale, _stored_weight(layer))

    def _take_beta(self, layer: nn.Module, edit: LayerEdit) -> None:
        """Let the beta of a BatchNorm become the bias of a layer, or join the bias it has."""
        beta = self.betas.get(edit.beta_from) if edit.beta_from is not None else None
        if beta is None:
            return
        self.report.moved_parameters[_key(str(edit.beta_from), "bias")] = _key(edit.name, "bias")
        if layer.bias is not None:
            self.sums.append((layer.bias, beta))  # pyrefly: ignore
        else:
            layer.register_parameter("bias", beta)

    # -- BatchNorms ----------------------------------------------------------------------------

    def leave(self, norm: nn.Module, edit: NormEdit) -> None:
        pass

    def remove(self, norm: nn.Module, edit: NormEdit) -> None:
        self._replace(norm, edit, None)

    def shift(self, norm: nn.Module, edit: NormEdit) -> None:
        scalar = self._new_beside(norm, edit, "scalar_bias", 0.0) if edit.scalar else None
        self._replace(norm, edit, Shift(self._beta(edit), edit.channel_dim) if scalar is None else FixupScalars(scalar))

    def scale(self, norm: nn.Module, edit: NormEdit) -> None:
        assert edit.scale is not None
        scale = self._new_beside(norm, edit, "residual_scale", edit.scale)
        if edit.scalar:
            self._replace(norm, edit, FixupScalars(self._new_beside(norm, edit, "scalar_bias", 0.0), scale))
        else:
            self._replace(norm, edit, Scale(scale, self._beta(edit), edit.channel_dim, edit.factor))

    def group(self, norm: nn.Module, edit: NormEdit) -> None:
        assert edit.groups is not None
        gamma, eps = _as_parameter(getattr(norm, "weight", None)), float(getattr(norm, "eps", 1e-5))
        grouped = GroupNorm(edit.groups, channels(norm), gamma, self._beta(edit), edit.channel_dim, eps)
        self._replace(norm, edit, grouped)

    def affine(self, norm: nn.Module, edit: NormEdit) -> None:
        affine = TrainedAffine(self._trained_norm(edit.name, _replacement(edit)), edit.channel_dim, edit.before_relu)
        self._replace(norm, edit, affine)

    def _trained_norm(self, name: str, to: str) -> TrainedNorm:
        """Return what a trained BatchNorm computes, and list that its tensors move to the module ``to``."""
        norm: Any = self.modules[name]
        moves = {"weight": "gamma", "bias": "beta", "running_mean": "norm_mean", "running_var": "norm_var"}
        moves = {old: new for old, new in moves.items() if getattr(norm, old, None) is not None}
        self.report.moved_parameters |= {_key(name, old): _key(to, new) for old, new in moves.items()}
        gamma, eps = _as_parameter(getattr(norm, "weight", None)), float(getattr(norm, "eps", 1e-5))
        return TrainedNorm(gamma, self.betas[name], norm.running_mean, norm.running_var, eps)

    def _beta(self, edit: NormEdit) -> Parameter | None:
        """Return the beta of a BatchNorm, if no layer takes it."""
        return self.betas[edit.name] if edit.beta_into is None else None

    def _new_beside(self, norm: nn.Module, edit: NormEdit, name: str, value: float) -> Parameter:
        """Make a parameter of a BatchNorm's replacement; it trains if the BatchNorm's layer does."""
        key = _key(_replacement(edit), name)
        if edit.owners:
            return self._new(key, value, _stored_weight(self.modules[edit.owners[0]]))
        tensors = (self._beta(edit), next(iter(norm.buffers()), None), torch.empty(0))
        return self._new(key, value, next(t for t in tensors if t is not None), trains=True)

    def _replace(self, norm: nn.Module, edit: NormEdit, instead: nn.Module | None) -> None:
        """Let a BatchNorm become its replacement, followed by the children that it ran."""
        if instead is not None:
            instead.train(norm.training)
            same_name = {id(norm.weight), id(norm.bias)} if edit.action == "group" else {id(self._beta(edit))}
            for key, p in instead.named_parameters():
                if id(p) in same_name and edit.action != "affine":
                    self.report.moved_parameters[_key(edit.name, key)] = _key(_replacement(edit), key)
        children = {name: getattr(norm, name) for name in edit.children}
        become(norm, Remains(instead, children) if children else instead or nn.Identity())

    # -- heads ---------------------------------------------------------------------------------

    def last_norm(self, head: nn.Module, edit: HeadEdit) -> None:
        like = next((p for p in head.parameters() if p.is_floating_point()), torch.empty(0))
        norm = LastNorm(edit.outputs, edit.dim, logit_scale=edit.logit_scale, device=like.device, dtype=like.dtype)
        norm.train(head.training)
        if norm.logit_scale is not None:
            norm.logit_scale.requires_grad_(like.requires_grad)
            key = _key(edit.name, "last_norm.logit_scale")
            self.report.new_parameters += [(key, norm.logit_scale)] * like.requires_grad
        last_norm_(head, norm)

    def _new(self, key: str, value: float, like: Tensor, size: int = 1, trains: bool | None = None) -> Parameter:
        """Make a parameter that did not exist before; the report lists it if it trains."""
        trains = like.requires_grad if trains is None else trains
        parameter = Parameter(torch.full((size,), value, device=like.device, dtype=like.dtype), requires_grad=trains)
        self.report.new_parameters += [(key, parameter)] * trains
        return parameter


ACTIONS: dict[str, Callable[[_Surgeon, Any, Any], None]] = {
    "centre": _Surgeon.centre,
    "standardise": _Surgeon.standardise,
    "bias": _Surgeon.bias,
    "keep": _Surgeon.keep,
    "trained": _Surgeon.trained,
    "leave": _Surgeon.leave,
    "remove": _Surgeon.remove,
    "fold": _Surgeon.remove,
    "affine": _Surgeon.affine,
    "shift": _Surgeon.shift,
    "scale": _Surgeon.scale,
    "group": _Surgeon.group,
    "last norm": _Surgeon.last_norm,
}
"""What each action of an edit does to a module."""


def become(module: nn.Module, other: nn.Module) -> None:
    """Let a module take the class and state of another; it stays the same object, with its mode and its hooks.

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


def _stored_weight(layer: nn.Module) -> Parameter:
    """Return a layer's weight or what it is computed from: computing that of a spectral norm would change its state."""
    weight = layer._parameters.get("weight")
    return weight if weight is not None else next(layer.parameters())


def _as_parameter(t: Any) -> Parameter | None:
    if t is None or isinstance(t, Parameter):
        return t
    return Parameter(t.detach().clone(), requires_grad=False)  # a frozen BatchNorm keeps it as a buffer


def _replacement(edit: NormEdit) -> str:
    """Return the qualified name of what replaces a BatchNorm: a child of its own, if it has children that stay."""
    return _key(edit.name, "instead") if edit.children else edit.name


def _key(module: str, attribute: str) -> str:
    """Return the state-dict key of a module's attribute; the root has no name."""
    return f"{module}.{attribute}" if module else attribute
