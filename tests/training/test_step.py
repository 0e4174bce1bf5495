"""One step: exact in parts, in every precision, with the decay that was asked for."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm.data import load
from mimicnorm.errors import NonFiniteError, RecipeError
from mimicnorm.layers import LastNormed, WeightMeanConv2d
from mimicnorm.methods import MimicNorm
from mimicnorm.training import recipe
from mimicnorm.training.build import chosen_method, network
from mimicnorm.training.processes import Processes
from mimicnorm.training.step import Trainer

ALONE = Processes(torch.device("cpu"))


def trainer(**changes) -> Trainer:
    r = tiny.recipe(**{"model": "tiny:dry", "warmup_epochs": 0.0, **changes})
    return Trainer(r, network(r, tiny.SOURCES[0]), ALONE, 7)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return next(tiny.SOURCES[0].batches([torch.arange(8)], seed=0, epoch=0, augment=True))


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in t.bare.parameters()])


def test_a_step_is_that_of_plain_sgd():
    ours = trainer()
    model = copy.deepcopy(ours.bare)
    images, labels = batch()
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for step in range(3):
        loss, correct = ours.step(images, labels, step)
        plain.zero_grad()
        logits = model(images.to(memory_format=torch.channels_last))
        wanted = F.cross_entropy(logits, labels)
        wanted.backward()
        plain.step()
        torch.testing.assert_close(loss, wanted.detach())
        assert int(correct) == int((logits.argmax(1) == labels).sum())
    torch.testing.assert_close(weights(ours), torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_micro_batches_change_nothing(micro_batch):
    whole, parts = trainer(), trainer(micro_batch=micro_batch)
    for step in range(3):
        (a, right), (b, as_right) = (t.step(*batch(), step) for t in (whole, parts))
        torch.testing.assert_close(a, b)
        assert int(right) == int(as_right)
    torch.testing.assert_close(weights(whole), weights(parts), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "last"), [(0.125, False), (0.25, True)])
def test_channels_last_but_where_the_backward_pass_would_crash(width, last):
    r = recipe("digits-resnet10", width=width, method="batchnorm")
    ours = Trainer(r, network(r, tiny.SOURCES[0]), ALONE, 7)
    assert (ours.format is torch.channels_last) == last
    assert ours.bare.layer1[0].conv1.weight.is_contiguous() != last


def test_dropout_depends_on_seed_and_step_alone():
    one, two = trainer(model="tiny:net"), trainer(model="tiny:net")
    torch.manual_seed(1)
    first = one.step(*batch(), 5)[0]
    torch.manual_seed(2)
    assert torch.equal(first, two.step(*batch(), 5)[0])
    assert torch.equal(weights(one), weights(two))


def test_scalars_and_biases_are_decayed_only_if_asked():
    both, weights_only = trainer(), trainer(decay_scalars=False)
    assert [g["weight_decay"] for g in both.optimizer.param_groups] == [5e-4]
    decayed, free = weights_only.optimizer.param_groups
    assert (decayed["weight_decay"], free["weight_decay"]) == (5e-4, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2, 4}
    assert {p.dim() for p in free["params"]} == {1}
    assert len(decayed["params"]) + len(free["params"]) == len(list(both.bare.parameters()))


def test_single_numbers_have_the_rate_of_the_methods_authors():
    def rates(**changes) -> dict[float, set[int]]:
        r = recipe("digits-resnet10", width=0.0625, warmup_epochs=0.0, lr=0.05, **changes)
        t = Trainer(r, network(r, tiny.SOURCES[0]), ALONE, 7)
        t.step(*batch(), 0)
        return {g["lr"]: {p.numel() == 1 for p in g["params"]} for g in t.optimizer.param_groups}

    assert rates(method="fixup") == {0.05: {False}, 0.05 * 0.1: {True}}
    assert rates(method="fixup", scalar_rate=1.0) == {0.05: {False, True}}
    assert rates(method="mimicnorm") == {0.05: {False, True}}
    assert rates(method="mimicnorm", scalar_rate=0.5) == {0.05: {False}, 0.025: {True}}
    with pytest.raises(RecipeError, match="scalar_rate=0: it must be above 0"):
        rates(scalar_rate=0)


@pytest.mark.parametrize("method", ["batchnorm", "mimicnorm", "nonorm"])
@pytest.mark.parametrize("variance", [2.0, 1 / 3])
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


@pytest.mark.parametrize("method", ["batchnorm", "mimicnorm", "nonorm"])
@pytest.mark.parametrize(
    ("model", "classifier"), [("mlp10", "31"), ("vgg11", "classifier.6"), ("squeezenet1_1", "classifier.1")]
)
def test_only_the_classifier_has_the_classifiers_variance(method, model, classifier):
    """Hidden linear layers are no classifiers, and a convolution may be one: data flow tells, not the class."""
    changes = {"model": model, "method": method, "classifier_variance": 0.1, "width": 0.25}
    source = load("digits", limit=40)
    found = variances(network(dataclasses.replace(recipe("digits-mlp10"), **changes), source))
    assert found.pop(classifier) == pytest.approx(0.1, rel=0.3)
    assert min(found.values()) > 0.7  # 2; 1 on the raw input; more where layers are centred


def test_hidden_linear_layers_of_the_baseline_start_as_its_convolutions_do():
    r = recipe("digits-mlp10", method="batchnorm", width=1.0)
    *hidden, _ = variances(network(r, load("digits", limit=40))).values()
    assert hidden == [pytest.approx(2.0, rel=0.1)] * 10


def test_the_classifier_of_other_packages_stays_as_it_was_built():
    r = tiny.recipe(method="batchnorm")
    torch.manual_seed(r.seed)
    built = tiny.net(num_classes=tiny.SOURCES[0].classes)
    assert torch.equal(network(r, tiny.SOURCES[0])[9].weight, built[9].weight)


@pytest.mark.parametrize("method", ["batchnorm", "mimicnorm"])
@pytest.mark.parametrize(
    ("output", "says"),
    [
        (lambda net, x: (x, x), "gives tuple in training mode; it must give one tensor of logits, .2, 4. for 2 images"),
        (lambda net, x: x[:, :3], r"gives \(2, 3\) in training mode"),
        (lambda net, x: x if net.training else (x, x), "gives tuple in evaluation mode"),
        (lambda net, x: x @ x, r"does not run on images of shape \(2, 3, 6, 6\): RuntimeError: "),
    ],
)
def test_a_network_that_gives_no_logits_is_refused(monkeypatch, method, output, says):
    class Odd(nn.Sequential):
        def forward(self, x):
            return output(self, super().forward(x))

    monkeypatch.setattr(tiny, "odd", lambda num_classes=4: Odd(*tiny.net(num_classes)), raising=False)
    with pytest.raises(RecipeError, match=says):
        network(tiny.recipe(model="tiny:odd", method=method), tiny.SOURCES[0])


def test_a_state_that_is_put_back_goes_on_bit_for_bit():
    one, two = trainer(), trainer(seed=1)
    for step in range(2):
        one.step(*batch(), step)
    two.restore({k: v.detach().clone() for k, v in one.tensors().items()}, one.scaler.state_dict())
    two.recipe = one.recipe
    for step in range(2, 4):
        assert torch.equal(one.step(*batch(), step)[0], two.step(*batch(), step)[0])
    assert all(map(torch.equal, one.tensors().values(), two.tensors().values()))


@pytest.mark.parametrize(("precision", "micro_batch"), [("fp16", 0), ("fp16", 4), ("bf16", 0), ("bf16", 4)])
def test_half_precision_follows_full_precision(precision, micro_batch):
    half = trainer(precision=precision, micro_batch=micro_batch)
    assert half.scaler.is_enabled() == (precision == "fp16")
    half.scaler.load_state_dict({**half.scaler.state_dict(), "scale": 256.0})  # its first scale overflows: a step lost
    full = trainer()
    for step in range(3):
        a, b = half.step(*batch(), step)[0], full.step(*batch(), step)[0]
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    torch.testing.assert_close(weights(half), weights(full), rtol=0.1, atol=0.03)


def test_a_loss_that_is_not_finite_in_parts():
    broken = trainer(micro_batch=2)
    nn.init.constant_(broken.bare[9].weight, float("nan"))
    with pytest.raises(NonFiniteError, match="NaN logits"):
        broken.step(*batch(), 0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"width": 0.25}, 12),
        ({"width": 0.25, "method": "weight-mean"}, 12),
        ({"width": 0.01}, 1),
        ({}, 50),
        ({"width": 2.0}, 50),
        ({"width": 0.25, "settings": ("min_fan_in=50",)}, 50),
        ({"width": 0.25, "model": "tiny:net"}, 50),
    ],
)
def test_the_least_fan_in_of_centred_layers_follows_the_width(changes, expected):
    assert chosen_method(tiny.recipe(**{"model": "resnet10", **changes})).min_fan_in == expected
    assert MimicNorm().min_fan_in == 50


def test_shortcuts_of_a_narrow_network_are_centred_as_at_full_width():
    narrow, authors = (
        network(tiny.recipe(model="resnet18", width=0.25, settings=given), tiny.SOURCES[0])
        for given in ((), ("min_fan_in=50",))
    )
    assert isinstance(narrow.layer2[0].downsample[0], WeightMeanConv2d)
    assert not isinstance(authors.layer2[0].downsample[0], WeightMeanConv2d)
