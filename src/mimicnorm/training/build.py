"""From a recipe to the network it trains."""

from __future__ import annotations

import copy
import dataclasses
import json
import math

import torch
from torch import Tensor, nn

from mimicnorm import models
from mimicnorm.data import Source
from mimicnorm.errors import RecipeError
from mimicnorm.methods import Method, method
from mimicnorm.surgery import heads
from mimicnorm.surgery.convert import convert_
from mimicnorm.surgery.record import record
from mimicnorm.training.recipes import Recipe


def network(recipe: Recipe, source: Source) -> nn.Module:
    """Build the recipe's network for a data set and apply its method; the seed decides every weight.

    The classifier, the layer that the data flow shows to make the logits, is drawn anew with the recipe's variance and
    bias 0, for all methods alike but those that set it themselves. All other layers start as the method sets them, or
    as N(0, 2 / fan-in), convolutions and linear layers alike. Networks of other packages keep what their makers drew.
    """
    torch.manual_seed(recipe.seed)
    channels, _, pixels = source.shape
    foreign = ":" in recipe.model
    own = {} if foreign else {"input": source.input, "image": pixels}
    model = models.find(recipe.model, num_classes=source.classes, in_channels=channels, width=recipe.width, **own)  # pyrefly: ignore
    example = _example(source)
    if foreign:
        _require_logits(model, recipe.model, example[:2], source.classes)
    classifiers = [] if foreign else heads.find(record(model, example[:2])).heads
    report = convert_(model, chosen_method(recipe), example=example, init=recipe.starting)
    set_by_method = {step.name for step in report.layers} if report.method.removes_norm else set()
    for head in classifiers:
        if head.module not in set_by_method:
            _draw_classifier(model.get_submodule(head.module), recipe.classifier_variance)
    return model


def _draw_classifier(layer: nn.Module, variance: float) -> None:
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
    nn.init.normal_(weight, 0.0, math.sqrt(variance / weight[0].numel()))
    if bias is not None:
        nn.init.zeros_(bias)


def chosen_method(recipe: Recipe) -> Method:
    """The recipe's method with its settings, and with what its width asks for."""
    chosen = method(recipe.method)
    fields = {f.name for f in dataclasses.fields(chosen)}
    changes: dict = narrowed(recipe)
    for setting in recipe.settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in fields:
            raise RecipeError(f"settings: {setting!r} is no NAME=VALUE that {chosen.name} has; it has {sorted(fields)}")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = {"None": None, "True": True, "False": False}.get(value, value)
    return dataclasses.replace(chosen, **changes)


def narrowed(recipe: Recipe) -> dict[str, int]:
    """Settings of the method that follow the width, where none were given: the least fan-in of a centred layer.

    The authors' 50 is meant for layers of full width. At a quarter of it projection shortcuts fall below, and with them
    go points of accuracy, most of which the first layer's centring brings (docs/compare.md).

    Example:
        >>> from mimicnorm.training import recipe
        >>> narrowed(recipe("cifar100-resnet18-desk")), narrowed(recipe("cifar100-resnet18"))
        ({'min_fan_in': 12}, {})
    """
    chosen, given = method(recipe.method), {setting.partition("=")[0] for setting in recipe.settings}
    narrow = recipe.width < 1 and ":" not in recipe.model  # other packages' networks have one width
    if not narrow or chosen.weights != "centre" or "min_fan_in" in given:
        return {}
    return {"min_fan_in": max(1, int(chosen.min_fan_in * recipe.width))}


def _require_logits(model: nn.Module, name: str, images: Tensor, classes: int) -> None:
    """Anybody's network may give anything; the loss takes one tensor with a logit per image and class."""
    probe, expected = copy.deepcopy(model), (len(images), classes)
    for mode in ("training", "evaluation"):
        probe.train(mode == "training")
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                output = probe(images)
        except Exception as error:  # whatever a forward of the user's raises is theirs to read
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise RecipeError(f"{name} does not run on images of shape {tuple(images.shape)}: {reason}") from error
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if found != expected:
            raise RecipeError(
                f"{name} gives {found} in {mode} mode; it must give one tensor of logits, {expected} for "
                f"{len(images)} images"
            )


def _example(source: Source) -> Tensor:
    """A few real images, always the same: what calibration looks at."""
    few = torch.arange(min(32, len(source)))
    return next(iter(source.batches([few], seed=0, epoch=0, augment=False)))[0]
