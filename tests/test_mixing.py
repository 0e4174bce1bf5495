"""Samples that see each other through what looks like no BatchNorm."""

from __future__ import annotations

import math

import pytest
import torch
import zoo
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm import mixing
from mimicnorm.errors import RefusedError
from mimicnorm.record import is_batch_norm


class Standardised(nn.Module):
    """A BatchNorm by hand, without running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        dims = (0, *range(2, x.dim()))
        return (x - x.mean(dims, keepdim=True)) / x.std(dims, keepdim=True)


class Flat(nn.Module):
    """The same through other views: the batch is no dimension of its own."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).reshape(x.shape[1], -1)
        return x * rows.square().mean(1).rsqrt().view(1, -1, *[1] * (x.dim() - 2))


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


MIXING = {
    "mean and deviation": Standardised(),
    "through a view": Flat(),
    "one number": Apply(lambda x: x / x.abs().max()),
    "softmax": Apply(lambda x: x.softmax(0)),
    "rolled": Apply(lambda x: x + x.roll(1, 0)),
    "flipped": Apply(lambda x: x + x.flip(0)),
    "shuffled": Apply(lambda x: x + x[torch.randperm(len(x))]),
    "sliced": Apply(lambda x: x + torch.cat([x[1:], x[:1]])),
    "cumulative": Apply(lambda x: x.cumsum(0)),
    "covariance": Apply(lambda x: (x.flatten(1) @ (x.flatten(1).T @ x.flatten(1))).view_as(x)),
    "attention": Apply(lambda x: ((x.flatten(1) @ x.flatten(1).T).sigmoid() @ x.flatten(1)).view_as(x)),
}
INDEPENDENT = {
    "centred per sample": Apply(lambda x: x - x.mean((1, 2, 3), keepdim=True)),
    "instance norm": nn.InstanceNorm2d(6),
    "instance norm by hand": Apply(lambda x: x.view(1, -1, *x.shape[2:]).relu().view_as(x)),
    "softmax over channels": Apply(lambda x: x.softmax(1)),
    "rolled windows": Apply(lambda x: x.roll((1, 1), (2, 3))),
    "attention per sample": Apply(lambda x: (x.flatten(2) @ x.flatten(2).mT @ x.flatten(2)).view_as(x)),
    "in halves": Apply(lambda x: torch.cat([h.relu() for h in x.chunk(2)])),
    "one by one": Apply(lambda x: torch.stack([row * 2 for row in x])),
    "drop path": Apply(lambda x: x * torch.bernoulli(torch.full((len(x), 1, 1, 1), 0.5))),
    "statistics that nobody reads": Apply(lambda x: (x.mean(), x)[1]),
}


def network(middle: nn.Module) -> nn.Sequential:
    tail = [nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1), middle, *tail)


@pytest.mark.parametrize("init", ["theory", "calibrate", None])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", MIXING)
def test_a_network_that_mixes_samples_is_refused_by_name_and_put_back(kind: str, batch: int, init):
    torch.manual_seed(0)
    model = network(MIXING[kind])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RefusedError, match=r"'4' \((Apply|Standardised|Flat)\) works across the batch"):
        mn.convert_(model, mn.MimicNorm(), example=torch.randn(batch, 3, 6, 6), init=init)
    assert type(model[1]) is nn.BatchNorm2d
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_what_works_within_samples_passes(kind: str):
    torch.manual_seed(0)
    report = mn.convert_(network(INDEPENDENT[kind]), mn.MimicNorm(), example=(4, 3, 6, 6), init="theory")
    assert not [n for n in report.notes if "across" in n]


def test_where_leaves_what_is_meant_to_mix():
    model = network(Standardised())
    mn.convert_(model, mn.MimicNorm(), example=(4, 3, 6, 6), where=lambda module, name: name != "4")
    assert type(model[1]) is nn.Identity


def test_a_where_that_reads_a_batch_norm_is_not_asked_in_vain():
    with pytest.raises(RefusedError, match="'4'"):
        mn.convert_(network(Flat()), mn.MimicNorm(), example=(4, 3, 6, 6), where=lambda m, _: m.num_features > 1)


def test_a_batch_norm_that_was_left_does_not_count():
    model = nn.Sequential(network(nn.BatchNorm2d(6)), nn.Identity())
    mn.convert_(model, mn.MimicNorm(), example=(4, 3, 6, 6), where=lambda m, name: name == "0.1")
    assert isinstance(model[0][4], nn.BatchNorm2d)


def test_control_flow_that_reads_values_is_tried_on_values():
    def steered(x: Tensor) -> Tensor:
        return x / x.std(0) if x.mean() < 1e9 else x

    with pytest.raises(RefusedError, match="the network works across the batch"):
        mn.convert_(network(Apply(steered)), mn.MimicNorm(), example=(4, 3, 6, 6))


def test_where_nothing_can_be_tried_a_note_says_so():
    with torch.device("meta"):
        model = network(Standardised())
    report = mn.convert_(model, mn.MimicNorm(), example=torch.zeros(4, 3, 6, 6, device="meta"), init=None)
    assert "'4' (Standardised) may work across the batch (sub): that could not be tried" in report.notes


def test_randomness_without_a_seed_is_not_taken_for_mixing():
    unseeded = torch.Generator()
    unseeded.seed()
    model = nn.Sequential(Apply(lambda x: x + torch.randn(x.shape, generator=unseeded)), Standardised())
    assert math.isnan(mixing.change(model, (4, 3), set()))


def test_statistics_and_random_numbers_stay():
    model, state = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()), torch.get_rng_state()
    assert mixing.change(model, (4, 3), set()) > 0.1
    assert mixing.change(model, (4, 3), {"0"}) == 0
    assert mixing.suspects(model, (4, 3), {"0"}) == []
    assert torch.equal(model[0].running_mean, torch.zeros(3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["resnet50", "swin_tiny_patch4_window7_224", "botnet26t_256", "mobileone_s0"])
def test_no_suspicion_against_the_networks_people_use(name: str):
    with torch.device("meta"):
        model = zoo.timm().create_model(name)
    norms = {n for n, m in model.named_modules() if is_batch_norm(m)}
    size = model.default_cfg["input_size"]
    assert mixing.suspects(model, (2, *size), norms) == []
