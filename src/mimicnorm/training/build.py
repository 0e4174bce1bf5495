"""From a recipe to the network it trains."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from mimicnorm import models
from mimicnorm.data import Source
from mimicnorm.errors import RecipeError
from mimicnorm.surgery import heads
from mimicnorm.surgery.convert import convert_
from mimicnorm.surgery.plan import Plan
from mimicnorm.surgery.record import record
from mimicnorm.training.recipes import Recipe
from mimicnorm.training.trained import load_trained


def network(recipe: Recipe, source: Source) -> nn.Module:
    """Build the recipe's network for a data set and apply its method; the seed decides every weight.

    The classifier, the layer that the data flow shows to make the logits, is drawn anew with the recipe's variance and
    bias 0, unless the method sets it itself (Fixup) or it was trained (``init_from``). All other layers start as the
    method sets them, or as N(0, 2 / fan-in), convolutions and linear layers alike, or as they were trained. Networks of
    other packages keep what their makers drew.
    """
    return converted(recipe, source)[0]


def converted(recipe: Recipe, source: Source) -> tuple[nn.Module, Plan]:
    """Build the recipe's network as `network` does; return it with the plan that was carried out."""
    torch.manual_seed(recipe.seed)
    channels, _, pixels = source.shape
    foreign = ":" in recipe.model
    shape = {} if foreign else {"input": source.input, "image": pixels}
    model = models.find(recipe.model, num_classes=source.classes, in_channels=channels, width=recipe.width, **shape)  # pyrefly: ignore
    example, _ = first_batch(source, 32)  # always the same images: calibration looks at them
    if foreign:
        _require_logits(model, recipe.model, example[:2], source.classes)
    evident = [] if foreign and not recipe.init_from else heads.find(record(model, example[:2])).heads
    classifiers = [head.module for head in evident]
    if recipe.init_from:
        classifiers = load_trained(model, *recipe.weights_file(), classifiers)
    init = None if recipe.init == "none" else recipe.init
    report = convert_(model, recipe.configured_method(), example=example, init=init)
    set_by_method = {step.name for step in report.layers} if report.method.removes_norm else set()
    for head in classifiers:
        if not foreign and head not in set_by_method:
            _draw_classifier(model.get_submodule(head), recipe.classifier_variance)
    return model, report


def first_batch(source: Source, count: int) -> tuple[Tensor, Tensor]:
    """Return the first images of a source, as they are, and their labels."""
    first = torch.arange(min(count, len(source)))
    return next(iter(source.batches([first], seed=0, epoch=0, augment=False)))


def _draw_classifier(layer: nn.Module, variance: float) -> None:
    weight, bias = layer.get_parameter("weight"), layer._parameters.get("bias")
    nn.init.normal_(weight, 0.0, math.sqrt(variance / weight[0].numel()))
    if bias is not None:
        nn.init.zeros_(bias)


def _require_logits(model: nn.Module, name: str, images: Tensor, classes: int) -> None:
    """Refuse a user's network whose output is not one tensor with a logit per image and class."""
    probe, expected = copy.deepcopy(model), (len(images), classes)
    for mode in ("training", "evaluation"):
        probe.train(mode == "training")
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                output = probe(images)
        except Exception as error:  # the user's forward may raise anything
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise RecipeError(f"{name} does not run on images of shape {tuple(images.shape)}: {reason}") from error
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != expected:
            raise RecipeError(
                f"{name} gives {shape} in {mode} mode; it must give one tensor of logits, {expected} for "
                f"{len(images)} images"
            )
