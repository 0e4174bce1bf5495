"""From a recipe to a network: starting weights, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import torch
from torch import nn

from mimicnorm.data import load
from mimicnorm.errors import RecipeError
from mimicnorm.layers import LastNormed
from mimicnorm.training import network, recipe


@pytest.mark.parametrize(("method", "variance"), [("batchnorm", 2.0), ("mimicnorm", 1 / 3), ("nonorm", 2.0)])
def test_the_classifier_starts_alike_for_all_methods(method, variance):
    r = recipe("digits-resnet10", width=0.125, method=method, classifier_variance=variance)
    fc = network(r, tiny.SOURCES[0]).fc
    assert float(fc.weight.detach().std()) == pytest.approx((variance / fc.in_features) ** 0.5, rel=0.15)
    assert not fc.bias.any()
    assert isinstance(fc, LastNormed) == (method == "mimicnorm")
    assert torch.equal(fc.weight, network(r, tiny.SOURCES[0]).fc.weight)


def variances(model: nn.Module) -> dict[str, float]:
    """Variance times fan-in of each layer."""
    layers = ((n, m.weight.detach()) for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear))
    return {name: float(w.var() * w[0].numel()) for name, w in layers}


@pytest.mark.parametrize(
    ("method", "model", "classifier"),
    [
        ("batchnorm", "mlp10", "31"),
        ("mimicnorm", "vgg11", "classifier.6"),
        ("mimicnorm", "squeezenet1_1", "classifier.1"),
    ],
)
def test_only_the_classifier_has_the_classifiers_variance(method, model, classifier):
    """A hidden linear layer is not a classifier, and a convolution may be one: data flow tells, not the class."""
    changes = {"model": model, "method": method, "classifier_variance": 0.1, "width": 0.25}
    source = load("digits", limit=40)
    starts = variances(network(dataclasses.replace(recipe("digits-mlp10"), **changes), source))
    assert starts.pop(classifier) == pytest.approx(0.1, rel=0.3)
    assert min(starts.values()) > 0.7  # 2; 1 on the raw input; more where layers are centred


def test_the_classifier_of_other_packages_stays_as_it_was_built():
    r = tiny.recipe(method="batchnorm")
    torch.manual_seed(r.seed)
    built = tiny.net(num_classes=tiny.SOURCES[0].classes)
    assert torch.equal(network(r, tiny.SOURCES[0])[9].weight, built[9].weight)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda net, x: (x, x), "gives tuple in training mode; it must give one tensor of logits, .2, 4. for 2 images"),
        (lambda net, x: x[:, :3], r"gives \(2, 3\) in training mode"),
        (lambda net, x: x if net.training else (x, x), "gives tuple in evaluation mode"),
        (lambda net, x: x @ x, r"does not run on images of shape \(2, 3, 6, 6\): RuntimeError: "),
    ],
)
def test_a_network_without_logits_is_refused(monkeypatch, output, message):
    class Odd(nn.Sequential):
        def forward(self, x):
            return output(self, super().forward(x))

    monkeypatch.setattr(tiny, "odd", lambda num_classes=4: Odd(*tiny.net(num_classes)), raising=False)
    with pytest.raises(RecipeError, match=message):
        network(tiny.recipe(model="tiny:odd"), tiny.SOURCES[0])
