"""Frozen filter banks, copies and sparse weights: what somebody chose stays."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.layers import Reweighted
from mimicnorm.methods import METHODS
from mimicnorm.surgery.given_weights import given

IMAGE = (4, 1, 16, 16)


def cosines(size: int = 4) -> Tensor:
    """The filters of a two-dimensional cosine transform: all but the first have mean zero, the first is constant."""
    steps = torch.arange(size)
    rows = torch.cos(math.pi * (2 * steps[None] + 1) * steps[:, None] / (2 * size))
    return torch.einsum("ai,bj->abij", rows, rows).reshape(size**2, 1, size, size)


class Bank(nn.Module):
    """Fixed filters, BatchNorm, then layers that train; a residual branch besides."""

    def __init__(self):
        super().__init__()
        self.dct = nn.Conv2d(1, 16, 4, stride=4, bias=False)
        self.dct.weight = nn.Parameter(cosines(), requires_grad=False)
        self.norm, self.conv, self.norm2 = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.dct(x)).relu()
        return self.fc((x + self.norm2(self.conv(x))).relu().mean((2, 3)))


@pytest.mark.parametrize("init", ["auto", "theory", None])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "batchnorm"])
def test_a_fixed_filter_bank_is_applied_as_it_was(method: str, init: str | None):
    model = Bank()
    chosen = METHODS[method]()
    planned = mn.plan(model, chosen, example=IMAGE, init=init)
    assert any("1 frozen layer (dct) keep their weights" in note for note in planned.notes)
    x = torch.randn(IMAGE)
    expected = model.dct(x)
    mn.convert_(model, chosen, example=IMAGE, init=init)
    assert torch.equal(model.dct.weight, cosines())
    assert not isinstance(model.dct, Reweighted)
    torch.testing.assert_close(model.dct(x), expected)


def test_a_bank_alone_and_one_with_a_bias_of_its_own():
    """Every layer that is planned is frozen, and yet the network trains."""
    model = nn.Sequential(nn.Conv2d(1, 16, 4), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 169, 5))
    model[0].requires_grad_(False)
    before = {k: v.clone() for k, v in model[0].state_dict().items()}
    mn.convert_(model, mn.MimicNorm(min_fan_in=1), example=IMAGE, init="calibrate")
    assert all(torch.equal(model[0].state_dict()[k], v) for k, v in before.items())


def test_auto_calibrates_what_reads_a_bank():
    planned = mn.plan(Bank(), mn.MimicNorm(), example=IMAGE)
    assert planned.init == "calibrate"
    assert planned.init_why == "no formula for the weights of dct, which stay as they are"
    model = Bank()
    mn.convert_(model, mn.MimicNorm(), example=IMAGE)
    variances = []
    model.conv.register_forward_hook(lambda module, args, output: variances.append(output.var().item()))
    model(torch.randn(64, *IMAGE[1:]))
    assert 0.5 < variances[0] < 2


class Pair(nn.Module):
    """A network and the copy that follows it."""

    def __init__(self, online: str = "online", target: str = "target"):
        super().__init__()
        self.names = (online, target)
        for name in self.names:
            self.add_module(name, nn.Sequential(nn.Conv2d(1, 16, 8), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()))
        self.get_submodule(target).requires_grad_(False)
        self.fc = nn.Linear(16 * 81, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = (self.get_submodule(name)(x) for name in self.names)
        return self.fc(a), b


def test_a_frozen_copy_stays_a_copy():
    model = Pair()
    assert given(model, ["online.0", "target.0"]) == {}
    mn.convert_(model, mn.MimicNorm(), example=IMAGE)
    model.target.load_state_dict(model.online.state_dict())
    x = torch.randn(IMAGE)
    torch.testing.assert_close(model.target(x), model.online(x))


def test_layers_of_one_shape_are_not_copies_of_each_other():
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    model[0].requires_grad_(False)
    assert given(model, ["0", "2"]) == {"0": "frozen"}
    assert given(model.requires_grad_(False), ["0", "2"]) == {}


def sparse(hook: bool) -> nn.Sequential:
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * 144, 5)),
    )
    weight = model[3].weight
    mask = (torch.rand_like(weight) < 0.3).float()
    weight.data.mul_(mask)
    if hook:
        weight.register_hook(lambda grad: grad * mask)
    return model


@pytest.mark.parametrize("init", ["theory", "calibrate", None])
@pytest.mark.parametrize("method", [mn.MimicNorm(min_fan_in=1), mn.GroupNormWS(), mn.ScaledWS()], ids=str)
def test_sparse_weights_under_a_gradient_mask_stay_sparse(method, init: str | None):
    if method.own_init and init == "calibrate":
        init = "auto"
    model = sparse(hook=True)
    zeros = model[3].weight == 0
    report = mn.convert_(model, method, example=IMAGE, init=init)
    assert any("1 layer (3) with zeros under a gradient hook" in note for note in report.notes)
    assert not isinstance(model[3], Reweighted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(IMAGE)), torch.arange(4)).backward()
        optimizer.step()
    assert torch.equal(model[3].weight == 0, zeros)


def test_a_sparse_layer_starts_with_the_variance_of_a_dense_one():
    model = sparse(hook=True)
    mn.convert_(model, mn.MimicNorm(min_fan_in=1), example=IMAGE, init="theory")
    variances = []
    model[3].register_forward_hook(lambda module, args, output: variances.append(output.var().item()))
    model(torch.randn(256, *IMAGE[1:]))
    assert 0.4 < variances[0] < 2.5


def test_zeros_that_nothing_keeps_are_noted():
    planned = mn.plan(sparse(hook=False), mn.MimicNorm(min_fan_in=1), example=IMAGE)
    assert any(note.startswith("3: many weights are exactly zero and will not stay so") for note in planned.notes)
    dense = mn.plan(sparse(hook=False), mn.NoNorm(), example=IMAGE, init=None)
    assert not [note for note in dense.notes if "zero" in note]
