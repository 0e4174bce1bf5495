"""Residual scalars go into weights, so that a converted network saves what a network without norms saves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mimicnorm import memory
from mimicnorm.methods import MimicNorm, NoNorm, SkipInit
from mimicnorm.surgery.convert import convert, convert_
from mimicnorm.surgery.planning import plan

IMAGES = (2, 16, 16, 16)


class Bottleneck(nn.Module):
    """16-4-16: the last layer's fan-in is below MimicNorm's threshold, so it is not centred."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(16, 4, 1, bias=False), nn.Conv2d(4, 16, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm2(self.up(F.relu(self.norm1(self.down(x))))))


class Concatenated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 8, 1, bias=False), nn.Conv2d(16, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm(torch.cat((self.a(x), self.b(x)), 1)))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm(F.avg_pool2d(self.conv(x), 3, 1, 1)))


class Shared(nn.Module):
    """Two norms on one layer: no weight can hold both scalars."""

    def __init__(self):
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x):
        x = F.relu(x + self.a(self.conv(x)))
        return F.relu(x + self.b(self.conv(x)))


class Activated(nn.Module):
    """The norm follows an activation, as in ConvMixer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        return x + self.norm(F.gelu(self.conv(x)))


def network(block):
    return nn.Sequential(*(block() for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


@pytest.mark.parametrize("method", [MimicNorm(), MimicNorm(min_fan_in=2), SkipInit(alpha=0.5)], ids=str)
@pytest.mark.parametrize("block", [Bottleneck, Concatenated, Pooled])
def test_a_converted_network_saves_no_more_than_one_without_norms(block, method):
    shape = (16, *IMAGES[1:])
    saved = [
        memory.measure(convert(network(block), m, example=shape, init=None), shape).saved_bytes
        for m in (method, NoNorm())
    ]
    assert saved[0] <= 1.005 * saved[1]


@pytest.mark.parametrize("block", [Bottleneck, Concatenated, Pooled])
def test_a_folded_scalar_multiplies_its_branch(block):
    model = network(block)
    report = convert_(model, MimicNorm(last_norm=False), example=torch.randn(IMAGES))
    scalars = {name: p for name, p in report.new_parameters if name.endswith("residual_scale")}
    expected = {"Bottleneck": ["up"], "Concatenated": ["a", "b"], "Pooled": ["conv"]}[block.__name__]
    assert [*scalars] == [f"{i}.{name}.residual_scale" for i in range(3) for name in expected]
    x = torch.randn(IMAGES)
    with torch.no_grad():
        whole = model[0](x)
        for p in scalars.values():
            p.zero_()
        torch.testing.assert_close(model[0](x), F.relu(x))  # nothing is left of a branch whose scalar is zero
    assert not torch.allclose(whole, F.relu(x))


@pytest.mark.parametrize(("block", "names"), [(Shared, "0.b, 1.a, 1.b"), (Activated, "0.norm, 1.norm, 2.norm")])
def test_what_cannot_be_folded_is_noted_with_its_cost(block, names):
    planned = plan(network(block), MimicNorm(), example=IMAGES)
    count = planned.totals()["scales"]
    (note,) = [n for n in planned.notes if "saved for backward" in n]
    assert note.startswith(f"{count} residual scalars (")
    assert f"{count * 16 * 16 * 16 * 4 / 2**20:.2f} MiB per sample" in note
    assert set(names.split(", ")) <= {n.name for n in planned.norms if n.action == "scale"}


class Branch(nn.Module):
    """A residual block: x + norm(make(self, x)), with two convolutions to make it of."""

    def __init__(self, make, a, b=None):
        super().__init__()
        self.make, self.a, self.b, self.norm = make, a, b, nn.BatchNorm2d(16)

    def forward(self, x):
        return F.relu(x + self.norm(self.make(self, x)))


def in_network(make, a, b=None):
    stem = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return nn.Sequential(stem, Branch(make, a, b), *head)


def same(i=16, o=16, k=3, **kwargs):
    return nn.Conv2d(i, o, k, padding=k // 2, bias=False, **kwargs)


def concatenated(block, x):
    return torch.cat((block.a(x), block.b(x)), 1)


def with_a_constant(block, x):
    return torch.cat((block.a(x), torch.ones(len(x), 4, *x.shape[2:])), 1)


def padded_with_ones(block, x):
    return F.pad(block.a(x), (1, 1, 1, 1), value=1.0)


def partly_overwritten(block, x):
    y = block.a(x).clone()
    y[:, :4] = 2.0
    return y


def with_alpha_dropout(block, x):
    return F.alpha_dropout(block.a(x), 0.5, block.training)


def detached(block, x):
    return block.a(x).detach()


AFFINE = [
    (with_a_constant, same(16, 12)),
    (padded_with_ones, nn.Conv2d(16, 16, 3, bias=False)),
    (partly_overwritten, same()),
    (with_alpha_dropout, same()),
    (detached, same()),
]


@pytest.mark.parametrize(("make", "conv"), AFFINE, ids=[make.__name__ for make, _ in AFFINE])
def test_a_scalar_stays_behind_what_does_not_scale_with_the_weights(make, conv):
    model = in_network(make, copy.deepcopy(conv))
    report = convert_(model, MimicNorm(last_norm=False), example=torch.randn(IMAGES), init=None)
    assert {n.name: n.action for n in report.norms}["1.norm"] == "scale"
    x = torch.randn(IMAGES)
    with torch.no_grad():
        model[1].norm.residual_scale.zero_()
        torch.testing.assert_close(model[1](x), F.relu(x))


@pytest.mark.parametrize("init", ["theory", "calibrate", "auto", None])
def test_frozen_parts_of_a_concat_stay_as_they_are(init):
    model = in_network(concatenated, same(16, 8).requires_grad_(False), same(16, 8))
    before, x = model[1].a.weight.clone(), torch.randn(IMAGES)
    expected = model[1].a(x)
    report = convert_(model, MimicNorm(last_norm=False), example=x, init=init)
    assert torch.equal(model[1].a.weight, before)
    torch.testing.assert_close(model[1].a(x), expected)
    assert [n for n, _ in report.new_parameters if n.endswith("residual_scale")] == ["1.norm.residual_scale"]


@pytest.mark.parametrize("init", ["theory", "calibrate"])
def test_sparse_parts_of_a_concat_keep_their_zeros(init):
    model = in_network(concatenated, same(16, 8), same(16, 8))
    weight = model[1].a.weight
    with torch.no_grad():
        weight[:, ::2] = 0
    weight.register_hook(lambda grad: grad * (weight != 0))
    convert_(model, MimicNorm(last_norm=False), example=torch.randn(IMAGES), init=init)
    assert float((weight == 0).float().mean()) == 0.5


class Masked(nn.Conv2d):
    """Applies a weight computed from its own, and adds its bias."""

    def forward(self, x):
        return F.conv2d(x, self.weight * 0.5, self.bias)


class Several(nn.Conv2d):
    """Returns more than its output."""

    def forward(self, x):
        return F.conv2d(x, self.weight * 0.5, self.bias), 3


def with_own_attribute(outputs):
    conv = same(16, outputs, 1)
    conv.residual_scale = 3.0
    return conv


def patched(outputs):
    conv = same(16, outputs, 1)
    conv.forward = lambda x: F.conv2d(x, conv.weight) + 0 * x.mean()
    return conv


def alone(block, x):
    return block.a(x)


def first_of_several(block, x):
    return block.a(x)[0]


UNCHANGED = [
    (alone, Masked(16, 16, 1), None),
    (first_of_several, Several(16, 16, 1), None),
    (alone, with_own_attribute(16), None),
    (concatenated, same(16, 8), with_own_attribute(8)),
    (concatenated, same(16, 8), patched(8)),
]


@pytest.mark.parametrize(("make", "a", "b"), UNCHANGED)
@pytest.mark.parametrize("method", [MimicNorm(last_norm=False), SkipInit(alpha=0.5)], ids=str)
def test_a_scalar_stays_behind_layers_that_cannot_take_it(make, a, b, method):
    classes = type(a), type(b)
    model, x = in_network(make, a, b), torch.randn(IMAGES)
    model = convert(model, method, example=x, init=None)
    assert (type(model[1].a), type(model[1].b)) == classes
    block = model[1]
    with torch.no_grad():
        for bias in (block.a.bias, block.norm.bias):
            if bias is not None:
                bias.normal_()
        block.norm.residual_scale.fill_(0.5)
        beta = 0.0 if block.norm.bias is None else block.norm.bias[:, None, None]
        torch.testing.assert_close(block(x), F.relu(x + 0.5 * block.make(block, x) + beta))


class PreActivated(nn.Module):
    """Its last layer ends a branch with no BatchNorm after it."""

    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(16), Masked(16, 16, 1)

    def forward(self, x):
        return x + self.conv(F.relu(self.norm(x)))


@pytest.mark.parametrize("method", [MimicNorm(last_norm=False), SkipInit(alpha=0.5)], ids=str)
def test_a_foreign_forward_without_a_norm_after_it_has_its_output_scaled(method):
    model, x = network(PreActivated), torch.randn(IMAGES)
    model[0] = nn.Conv2d(16, 16, 1)
    plain = copy.deepcopy(model[1].conv)
    convert_(model, method, example=x, init=None)
    with torch.no_grad():
        model[1].conv.residual_scale.fill_(0.5)
        torch.testing.assert_close(model[1].conv(x), 0.5 * plain(x))


class SharedNorm(nn.Module):
    """One norm, hence one scalar, for the branches of several layers."""

    def __init__(self):
        super().__init__()
        self.convs, self.norm = nn.ModuleList(same() for _ in range(3)), nn.BatchNorm2d(16)

    def forward(self, x):
        for conv in self.convs:
            x = F.relu(x + self.norm(conv(x)))
        return x


def test_a_norm_shared_by_several_layers_keeps_one_scalar():
    model = nn.Sequential(SharedNorm(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    report = convert_(model, MimicNorm(), example=torch.randn(16, *IMAGES[1:]), init="calibrate")
    assert [n for n, _ in report.new_parameters] == ["0.norm.residual_scale", "3.last_norm.logit_scale"]
    assert all(layer.scale is None for layer in report.layers)
