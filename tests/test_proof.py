"""A plan without refusals can be carried out, and what it makes is the network as it was, without its norms."""

from __future__ import annotations

import copy

import invariants
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.methods import METHODS

IMAGE = (4, 3, 8, 8)


class Stack(nn.Module):
    """A network that decides by the class of a layer what to do with it."""

    def __init__(self, step, norm: type[nn.Module] = nn.BatchNorm2d):
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 1), norm(8)])
        self.fc = nn.Linear(8, 5)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = self.step(layer, x)
        return self.fc(x.mean((2, 3)))


class Embedded(nn.Module):
    """Adds an embedding of time after each norm, as diffusion networks do."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8)])
        self.time, self.fc = nn.Linear(2, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
            if isinstance(layer, nn.BatchNorm1d):
                x = x + self.time(t)
        return self.fc(x)


class Collects(nn.Module):
    """Returns, or keeps, what comes out of its norms."""

    def __init__(self, keeps: bool):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.fc, self.keeps = nn.Linear(8, 5), keeps

    def forward(self, x: Tensor) -> Tensor | tuple:
        self.seen = []
        for layer in self.body:
            x = layer(x)
            if isinstance(layer, nn.BatchNorm2d):
                self.seen.append(x)
        x = self.fc(x.mean((2, 3)))
        return x if self.keeps else (x, *[t.mean((2, 3)) for t in self.seen])


def turned(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.transpose(2, 3)).transpose(2, 3) if isinstance(layer, nn.BatchNorm2d) else layer(x)


def doubled(layer: nn.Module, x: Tensor) -> Tensor:
    return 2 * layer(x) if type(layer) is nn.Conv2d else layer(x)


def by_attribute(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) + 1 if hasattr(layer, "running_var") else layer(x)


def activated(layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)
    return F.gelu(x) if "BatchNorm" in type(layer).__name__ else x


@pytest.mark.parametrize("method", ["mimicnorm", "nonorm", "groupnorm-ws"])
@pytest.mark.parametrize("step", [turned, by_attribute, activated])
def test_a_path_that_depends_on_the_norms_class_is_refused(step, method: str):
    model = Stack(step)
    planned = mn.plan(model, METHODS[method](), example=IMAGE)
    assert "takes another path" in str(planned.refusals[0])
    invariants.refuses(model, METHODS[method](), example=IMAGE, match="the network takes another path")


def test_a_path_that_depends_on_the_layers_class_is_refused():
    invariants.refuses(
        Stack(doubled), mn.MimicNorm(min_fan_in=1), example=IMAGE, match="'mul' in the model's own forward"
    )
    mn.convert(Stack(doubled), mn.NoNorm(), example=IMAGE)  # its layers keep their classes


def test_an_embedding_that_would_not_be_added_any_more_is_refused():
    example = (torch.randn(4, 6), torch.randn(4, 2))
    invariants.refuses(Embedded(), mn.MimicNorm(), example=example, match="'linear' in 'time' is not as before")


@pytest.mark.parametrize("keeps", [True, False])
def test_features_that_would_not_be_collected_any_more_are_missed(keeps: bool):
    invariants.refuses(Collects(keeps), mn.MimicNorm(last_norm=False), example=IMAGE, match="takes another path")


def test_the_refusal_names_the_module_whose_code_asks():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Stack(turned))
    assert [r.name for r in mn.plan(model, mn.MimicNorm(), example=IMAGE).refusals] == ["1"]


def test_code_that_reads_statistics_is_refused_in_the_plan():
    model = Stack(lambda layer, x: layer(x))
    model.step = lambda layer, x: layer(x) if layer is not model.body[1] else layer(x) * layer.running_var.mean()
    planned = mn.plan(model, mn.MimicNorm(), example=IMAGE)
    assert "does not run any more (AttributeError" in str(planned.refusals[0])


class ByForward(nn.Module):
    """Calls its layers past their hooks."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu_(self.norm.forward(self.conv.forward(x))).mean((2, 3)))


class OneByOne(nn.Module):
    """Does as many operations as there are samples, or as many as fit a batch of its own."""

    def __init__(self):
        super().__init__()
        self.net = Stack(lambda layer, x: layer(x))

    def forward(self, x: Tensor) -> Tensor:
        rows = [row * 2 for row in self.net(x)]
        return torch.stack(rows) if len(rows) < 100 else torch.cat([r[None] for r in rows])


@pytest.mark.parametrize("model", [ByForward(), OneByOne(), Stack(lambda layer, x: layer(x))])
def test_other_code_is_not_refused(model: nn.Module):
    invariants.hold(copy.deepcopy(model), torch.randn(IMAGE), mn.MimicNorm(min_fan_in=8))


class ReadsValues(nn.Module):
    """Takes an early exit if it is sure, which depends on the values."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(100 * x))
        return self.fc((y.tanh() if y.abs().mean() > 1 else y.relu()).mean((2, 3)))


def test_where_values_decide_the_path_a_note_says_so():
    planned = mn.plan(ReadsValues(), mn.MimicNorm(), example=IMAGE)
    assert planned.ok
    assert any("control flow reads values" in note for note in planned.notes)


def test_a_rehearsal_leaves_no_trace():
    model = Stack(lambda layer, x: layer(x))
    with torch.no_grad():
        model.body[1].bias.normal_()
    before, random = copy.deepcopy(model), torch.get_rng_state()
    objects = [(id(m), type(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    versions = [p._version for p in model.parameters()]
    mn.plan(model, mn.MimicNorm(), example=IMAGE)
    assert objects == [(id(m), type(m), m.training, sorted(m.__dict__)) for m in model.modules()]
    assert versions == [p._version for p in model.parameters()]
    assert torch.equal(random, torch.get_rng_state())
    for (name, one), (_, other) in zip(model.state_dict().items(), before.state_dict().items(), strict=True):
        assert torch.equal(one, other), name
