"""Samples that see each other through what looks like no BatchNorm."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.errors import RefusedError
from mimicnorm.methods import METHODS
from mimicnorm.surgery import mixing
from mimicnorm.surgery.graph import Graph


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


def written(x: Tensor) -> Tensor:
    stats = x.new_zeros(2, *x.shape[1:])
    stats[0] = x.mean(0)
    return stats[0]


MIXING = {
    "mean and deviation": Standardised(),
    "through a view": Flat(),
    "one number": Apply(lambda x: x / x.abs().max()),
    "softmax": Apply(lambda x: x.softmax(0)),
    "rolled": Apply(lambda x: x + x.roll(1, 0)),
    "flipped": Apply(lambda x: x + x.flip(0)),
    "shuffled": Apply(lambda x: x + x[torch.randperm(len(x))]),
    "first": Apply(lambda x: x - x[:1]),
    "last": Apply(lambda x: x - x[-1:]),
    "sliced": Apply(lambda x: x + torch.cat([x[1:], x[:1]])),
    "cumulative": Apply(lambda x: x.cumsum(0)),
    "covariance": Apply(lambda x: (x.flatten(1) @ (x.flatten(1).T @ x.flatten(1))).view_as(x)),
    "chosen": Apply(lambda x: x + x.index_select(0, torch.arange(len(x)).flip(0))),
    "fused attention": Apply(
        lambda x: F.scaled_dot_product_attention(*[x.flatten(1)[None, None]] * 3)[0, 0].view_as(x)
    ),
    "layer norm of a transposed view": Apply(lambda x: F.layer_norm(x.flatten(1).T, (len(x),)).T.reshape(x.shape)),
    "layer norm of everything": Apply(lambda x: F.layer_norm(x, x.shape)),
    "convolved": Apply(lambda x: F.conv1d(x.flatten(1).T[:, None], torch.ones(1, 1, 3), padding=1)[:, 0].T.view_as(x)),
    "rolled as one": Apply(lambda x: x + x.roll(7)),
    "in place": Apply(lambda x: x.clone().cumsum_(0)),
    "torn by a view": Apply(lambda x: x.movedim(0, -1).reshape(x.shape)),
    "torn by a view for good": Apply(
        lambda x: x.movedim(0, -1).reshape(-1, 8).softmax(1).view(6, 4, 4, -1).movedim(-1, 0)
    ),
    "taken apart in another order": Apply(
        lambda x: x.permute(2, 0, 1, 3).flatten(0, 1).relu().unflatten(0, (len(x), 4)).transpose(1, 2)
    ),
    "scattered": Apply(
        lambda x: torch.zeros_like(x).scatter_reduce(
            0, (torch.arange(len(x)) // 2).view(-1, 1, 1, 1).expand_as(x), x, "sum"
        )
    ),
    "resized": Apply(
        lambda x: F.interpolate(F.interpolate(x.flatten(1).T[None], 5), len(x), mode="linear")[0].T.view_as(x)
    ),
    "scattered by a mask": Apply(lambda x: torch.zeros_like(x).masked_scatter(x > 0, x)),
    "through written memory": Apply(lambda x: x - written(x)),
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
    "time in the batch": Apply(lambda x: x.transpose(1, 2).flatten(0, 1).relu().unflatten(0, (-1, 4)).transpose(1, 2)),
    "the batch in time": Apply(
        lambda x: x.permute(2, 0, 1, 3).flatten(0, 1).relu().unflatten(0, (4, -1)).permute(1, 2, 0, 3)
    ),
    "two batches in one": Apply(lambda x: torch.cat([x, -x]).relu().view(2, *x.shape).sum(0)),
    "drop path": Apply(lambda x: x * torch.bernoulli(torch.full((len(x), 1, 1, 1), 0.5))),
    "statistics that nobody reads": Apply(lambda x: (x.mean(), x)[1]),
}


def network(middle: nn.Module) -> nn.Sequential:
    tail = [nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 1), middle, *tail)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("kind", MIXING)
def test_a_network_that_mixes_samples_is_refused_by_name_and_put_back(kind: str, batch: int):
    torch.manual_seed(0)
    model = network(MIXING[kind])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RefusedError, match=r"'4' \((Apply|Standardised|Flat)\) works across the batch"):
        mn.convert_(model, mn.MimicNorm(), example=torch.randn(batch, 3, 6, 6))
    assert type(model[1]) is nn.BatchNorm2d
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("kind", INDEPENDENT)
def test_what_works_within_samples_passes(kind: str):
    torch.manual_seed(0)
    report = mn.convert_(network(INDEPENDENT[kind]), mn.MimicNorm(), example=(4, 3, 6, 6), init="theory")
    assert not [n for n in report.notes if "across" in n]


class Residual(nn.Module):
    """A network whose norm by hand is inside a residual branch."""

    def __init__(self):
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.inner, self.norm, self.outer, self.bn2 = (
            nn.Conv2d(8, 8, 1),
            Standardised(),
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8),
        )
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x)).relu()
        x = x + self.bn2(self.outer(self.norm(self.inner(x)).relu()))
        return self.fc(x.relu().mean((2, 3)))


@pytest.mark.parametrize("method", [m for m in METHODS if m != "batchnorm"])
def test_whatever_starts_at_zero_hides_nothing(method: str):
    with pytest.raises(RefusedError, match=r"'norm' \(Standardised\) works across the batch"):
        mn.convert_(Residual(), METHODS[method](), example=(4, 3, 6, 6))


class HandsOver(nn.Module):
    """Takes the mean over the batch in one module and uses it in another, as an argument or as an attribute."""

    def __init__(self, by_attribute: bool):
        super().__init__()
        self.by_attribute, self.inner = by_attribute, Uses()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.mean = x.mean(0) if self.by_attribute else None
        return self.inner(x, None if self.by_attribute else x.mean(0))


class Uses(nn.Module):
    def forward(self, x: Tensor, mean: Tensor | None) -> Tensor:
        return x - (self.mean if mean is None else mean)


@pytest.mark.parametrize("by_attribute", [True, False])
def test_statistics_that_go_from_module_to_module_are_seen(by_attribute: bool):
    with pytest.raises(RefusedError, match=r"'4.inner' \(Uses\) works across the batch"):
        mn.convert_(network(HandsOver(by_attribute)), mn.MimicNorm(), example=(4, 3, 6, 6))


def test_mixing_that_is_meant_is_accepted_by_name():
    model = network(Standardised())
    report = mn.convert_(model, mn.MimicNorm(), example=(4, 3, 6, 6), allow_mixing=("4",))
    assert type(model[1]) is nn.Identity
    assert "'4' (Standardised) works across the batch (sub), which allow_mixing= accepts" in report.notes
    around = nn.Sequential(network(Standardised()), nn.Identity())
    mn.plan(around, mn.MimicNorm(), example=(4, 3, 6, 6), allow_mixing=["0"]).require()  # with what is inside


@pytest.mark.parametrize(
    "where", [lambda module, name: name != "4", lambda module, name: True, lambda m, n: "4" not in n]
)
def test_where_is_about_batch_norms_and_accepts_no_mixing(where):
    with pytest.raises(RefusedError, match=r"'4' \(Standardised\) works across the batch.*allow_mixing=\('4',\)"):
        mn.convert_(network(Standardised()), mn.MimicNorm(), example=(4, 3, 6, 6), where=where)


def test_where_is_asked_about_batch_norms_only():
    asked = []
    mn.plan(network(nn.Identity()), mn.MimicNorm(), example=(4, 3, 6, 6), where=lambda m, n: asked.append(n) or True)
    assert asked == ["1"]


@pytest.mark.parametrize("names", ["4", ("no.such",), 4, (4,), None])
def test_names_to_accept_must_be_names(names):
    with pytest.raises(mn.MimicNormError, match="use a tuple of qualified module names"):
        mn.plan(network(nn.Identity()), mn.MimicNorm(), example=(4, 3, 6, 6), allow_mixing=names)


def test_what_was_accepted_is_not_blamed_on_others():
    halves = INDEPENDENT["in halves"]
    model = nn.Sequential(network(Standardised())[:5], halves, nn.Flatten(), nn.Linear(6 * 16, 5))
    report = mn.convert_(model, mn.MimicNorm(), example=(4, 3, 6, 6), allow_mixing=("0.4",))
    assert any("'1' (Apply) may work across the batch" in note for note in report.notes)


def test_the_plan_refuses_already():
    planned = mn.plan(network(Standardised()), mn.MimicNorm(), example=(4, 3, 6, 6))
    assert not planned.ok
    assert [r.name for r in planned.refusals] == ["4"]


def test_a_batch_norm_that_was_left_does_not_count():
    model = nn.Sequential(network(nn.BatchNorm2d(6)), nn.Identity())
    report = mn.convert_(model, mn.MimicNorm(), example=(4, 3, 6, 6), where=lambda m, name: name == "0.1")
    assert isinstance(model[0][4], nn.BatchNorm2d)
    assert not [n for n in report.notes if "across" in n]


class Wrapped(nn.Module):
    """A network inside a function that changes what goes in or out."""

    def __init__(self, function, middle: nn.Module):
        super().__init__()
        self.function, self.net = function, network(middle)

    def forward(self, *args, **kwargs):
        return self.function(self.net, *args, **kwargs)


def steered(net: nn.Module, x: Tensor) -> Tensor:
    return net(x) if x.mean() < 1e9 else x


def fixed(net: nn.Module, x: Tensor) -> Tensor:
    return net(x.view(3, 3, 6, 6))


@pytest.mark.parametrize(("function", "batch"), [(steered, 4), (fixed, 3)])
def test_control_flow_and_fixed_sizes_are_tried_on_values(function, batch: int):
    mixes, does_not = (Wrapped(function, m) for m in (Standardised(), nn.Identity()))
    with pytest.raises(RefusedError, match="the network itself works across the batch"):
        mn.convert_(mixes, mn.MimicNorm(last_norm=False), example=(batch, 3, 6, 6))
    report = mn.convert_(does_not, mn.MimicNorm(last_norm=False), example=(batch, 3, 6, 6))
    assert not [n for n in report.notes if "across" in n]


class GraphNetwork(nn.Module):
    """Sums what comes along the edges of a graph: the first dimension is its nodes."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.fc = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.linear(x)
        return self.fc(self.norm(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])).relu())


def test_a_graph_network_is_told_that_its_nodes_are_taken_for_samples():
    example = (torch.randn(10, 6), torch.randint(0, 10, (2, 30)))
    (refusal,) = mn.plan(GraphNetwork(), mn.MimicNorm(min_fan_in=1), example=example).refusals
    assert "the batch (index_add), which is taken to be the first dimension of the first argument" in refusal.reason
    assert "not the batch (the nodes of a graph), accept it: allow_mixing=('',)" in refusal.remedy
    mn.convert_(GraphNetwork(), mn.MimicNorm(min_fan_in=1), example=example, allow_mixing=("",))


def listed(net: nn.Module, images: list[Tensor]) -> Tensor:
    return net(torch.stack(images))


def test_a_list_of_images_has_no_batch_dimension_that_is_known():
    example = ([torch.randn(3, 6, 6), torch.randn(3, 6, 6)],)
    report = mn.convert_(Wrapped(listed, nn.Identity()), mn.MimicNorm(), example=example)
    assert "the network itself may work across the batch: that could not be tried" in report.notes
    model = Wrapped(lambda net, images: net(torch.stack(images)) * net[1].running_var.mean(), nn.Identity())
    with pytest.raises(RefusedError, match="does not run any more"):
        mn.convert_(model, mn.MimicNorm(last_norm=False), example=example)


class Tokens(nn.Module):
    """Samples and their tokens lie along one dimension, so no module inside shows which rows are of a sample."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.embed, self.norm, self.mix, self.fc = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.middle = nn.Sequential(middle)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.embed(x.flatten(0, 1))).relu()
        return self.fc(self.middle(self.mix(rows)).relu().view(len(x), -1, 8).mean(1))


def test_where_no_module_shows_the_samples_the_network_around_it_decides():
    with pytest.raises(
        RefusedError, match=r"'middle.0' \(Standardised\) works .* output of the network itself for one"
    ):
        mn.convert_(Tokens(Standardised()), mn.MimicNorm(), example=(4, 5, 6))
    within = Apply(lambda x: torch.cat([h.relu() for h in x.chunk(2)]))
    assert not [n for n in mn.plan(Tokens(within), mn.MimicNorm(), example=(4, 5, 6)).notes if "across" in n]
    both = Tokens(nn.Sequential(Standardised(), within))
    report = mn.convert_(both, mn.MimicNorm(), example=(4, 5, 6), allow_mixing=("middle.0.0",))
    assert any("'middle.0.1' (Apply) may work across the batch" in note for note in report.notes)


def test_outputs_without_a_batch_cannot_be_judged():
    model = Wrapped(lambda net, x: (net(x) - x.mean(0).mean()).sum(), nn.Identity())
    assert mixing.watch(model, (4, 3, 6, 6), Graph())[1] == {"": "sub"}
    assert math.isnan(mixing.changes(model, (4, 3, 6, 6), [""], ignored={"net.1"})[""])


class Writes(nn.Module):
    """Writes into its input, a parameter and a buffer, as nets with a momentum encoder do."""

    def __init__(self):
        super().__init__()
        self.average, self.norm = nn.Parameter(torch.ones(3), requires_grad=False), Standardised()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.average.data.mul_(0.5)
        self.count += 1
        return self.norm(x.mul_(2) * self.average)


def test_nothing_of_the_users_is_written():
    model, x, state = Writes(), torch.randn(4, 3), torch.get_rng_state()
    before = x.clone()
    assert mixing.changes(model, x, ["norm"])["norm"] > 0.1
    assert torch.equal(x, before)
    assert torch.equal(model.average, torch.ones(3))
    assert model.count == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_where_nothing_can_be_tried_a_note_says_so():
    with torch.device("meta"):
        model = network(Standardised())
    report = mn.convert_(model, mn.MimicNorm(), example=torch.zeros(4, 3, 6, 6, device="meta"), init=None)
    assert "'4' (Standardised) may work across the batch (sub): that could not be tried" in report.notes


def test_randomness_without_a_seed_is_not_taken_for_mixing():
    unseeded = torch.Generator()
    unseeded.seed()
    model = nn.Sequential(Apply(lambda x: x + torch.randn(x.shape, generator=unseeded)))
    assert math.isnan(mixing.changes(model, (4, 3), ["0"])["0"])


def test_integers_and_masked_values():
    model = nn.Sequential(nn.Embedding(5, 3), Apply(lambda x: (x - x.mean(0)).masked_fill(x > 9, -torch.inf)))
    example = torch.zeros(4, 7, dtype=torch.long)
    example[1, 2] = 3
    assert mixing.changes(model, example, ["1"])["1"] > 1e-3
    model = Apply(lambda x: torch.cat([x, torch.full_like(x, -torch.inf)], 1))
    assert mixing.changes(model, (4, 3), [""]) == {"": 0.0}


def test_an_empty_buffer_is_no_obstacle():
    model = network(nn.Identity())
    model.register_buffer("nothing", torch.empty(0, 4))
    assert mixing.watch(model, (4, 3, 6, 6), Graph())[1] == {}


@pytest.mark.parametrize("name", ["resnet50", "swin_tiny_patch4_window7_224", "botnet26t_256", "mobileone_s0"])
def test_no_suspicion_against_the_networks_people_use(name: str):
    with torch.device("meta"):
        model = zoo.timm().create_model(name)
    size = model.default_cfg["input_size"]
    assert mixing.watch(model, (2, *size), Graph())[1] == {}


@pytest.mark.parametrize("samples", range(2, 14))
def test_samples_that_stay_see_others_through_every_flip(samples: int):
    shared = mixing._shared(samples)
    assert 0 < shared.sum() < samples
    assert not shared[0]
    assert not (shared & shared.flip(0))[torch.arange(samples) != (samples - 1) / 2].any()
    assert samples < 3 or not shared[-1]
