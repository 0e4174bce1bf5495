"""Trained networks, converted with ``init="keep"``: the same function, and gradients as with frozen BatchNorms."""

from __future__ import annotations

import copy
import pickle

import nets
import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn

import mimicnorm as mn
from mimicnorm.errors import InitError, MimicNormError, RefusedError
from mimicnorm.layers import LastNorm, TrainedAffine, TrainedLayer
from mimicnorm.surgery.keeping import looks_fresh
from mimicnorm.surgery.recorder import is_batch_norm


class Shared(nn.Module):
    """One layer under two BatchNorms, one BatchNorm on the input, one on an output that is read twice."""

    def __init__(self):
        super().__init__()
        self.first, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3, padding=1)
        self.a, self.b, self.c = (nn.BatchNorm2d(6) for _ in range(3))
        self.tap, self.fc = nn.Conv2d(6, 6, 1), nn.Linear(6, 5)

    def forward(self, x):
        x = self.first(x)
        x = self.a(self.conv(x)) + self.b(self.conv(F.relu(x)))
        y = self.tap(x)
        return self.fc((self.c(y) + y).mean((2, 3)))


class NoAffine(nn.Module):
    """BatchNorms without gamma and beta, behind a layer with a bias and behind none."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)
        self.norm2, self.fc = nn.BatchNorm2d(8, affine=False), nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.norm2(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


class Aliased(nn.Module):
    """Modules under several names: a layer and its BatchNorm, a layer alone, a BatchNorm alone, one by itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)])
        self.body = nn.Sequential(*self.layers)
        self.conv, self.norm = nn.Conv2d(8, 6, 1), nn.BatchNorm2d(6)
        self.stem, self.last = self.layers[0], self.norm
        self.pair = nn.ModuleDict({"conv": nn.Conv2d(6, 6, 1), "norm": nn.BatchNorm2d(6)})
        self.final, self.fc = self.pair["conv"], nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(self.body(x))))
        return self.fc(self.pair["norm"](self.final(x)).mean((2, 3)))


class Viewed(nn.Module):
    """A BatchNorm gives contiguous tensors, of whatever strides: code relies on it."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.fc = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8 * 64, 5)

    def forward(self, x):
        x = self.layer(x.flatten(2).transpose(1, 2))
        return self.fc(F.relu(self.norm(x.transpose(1, 2))).view(len(x), -1))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 6, 1), *nets.plain())


IMAGES = (4, 3, 8, 8)
NETS = {
    "plain": plain,
    "resnet": nets.resnet,
    "preact": nets.preact,
    "dense": nets.Dense,
    "squeeze": nets.SqueezeExcite,
    "segmenter": nets.Segmenter,
    "shared": Shared,
    "no affine": NoAffine,
    "aliased": Aliased,
    "viewed": Viewed,
}
every_net = pytest.mark.parametrize("name", NETS)


def trained(model: nn.Module) -> nn.Module:
    """Give every BatchNorm statistics and an affine map as training would; double precision, evaluation mode."""
    generator = torch.Generator().manual_seed(1)
    for m in model.modules():
        if is_batch_norm(m):
            with torch.no_grad():
                m.running_mean.normal_(0, 0.3, generator=generator)
                m.running_var.uniform_(0.5, 2, generator=generator)
                if m.weight is not None:
                    m.weight.uniform_(0.5, 1.5, generator=generator)
                    m.bias.normal_(0, 0.3, generator=generator)
                if getattr(m, "num_batches_tracked", None) is not None:
                    m.num_batches_tracked.fill_(100)
    return model.double().eval()


def images() -> Tensor:
    return torch.randn(IMAGES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return trained(NETS[name]())


def first(output):
    return output if isinstance(output, Tensor) else next(iter(output.values()))


@every_net
@pytest.mark.parametrize("method", [mn.MimicNorm(), mn.NoNorm(), mn.LastBN(), mn.WeightMean()], ids=lambda m: m.name)
def test_computes_the_same(name, method):
    model, x = build(name), images()
    kept = mn.convert(model, method, example=IMAGES, init="keep").eval()
    torch.testing.assert_close(first(kept(x)), first(model(x)), rtol=1e-10, atol=1e-10)
    mn.check(kept)
    assert not any(map(is_batch_norm, kept.modules()))
    assert not any(isinstance(m, LastNorm) for m in kept.modules())


@every_net
def test_gradients_are_those_of_frozen_batch_norms(name):
    model, x = build(name), images()
    kept = copy.deepcopy(model)
    report = mn.convert_(kept, mn.NoNorm(), example=IMAGES, init="keep")
    for network in (model, kept):
        first(network(x)).pow(2).sum().backward()
    new = dict(kept.named_parameters())
    assert len(new) == len(list(model.parameters()))
    for key, p in model.named_parameters():
        torch.testing.assert_close(new[report.moved_parameters.get(key, key)].grad, p.grad, rtol=1e-9, atol=1e-9)


@every_net
def test_samples_are_independent_in_training_mode(name):
    kept, x = mn.convert(build(name), mn.MimicNorm(), example=IMAGES, init="keep").train(), images()
    torch.testing.assert_close(first(kept(x))[:1], first(kept(x[:1])), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(first(kept(x)), first(kept.eval()(x)), rtol=1e-10, atol=1e-10)


@every_net
def test_loads_checkpoints_of_the_original_and_its_own(name):
    model, x = build(name), images()
    kept = mn.convert(trained(NETS[name]()), mn.MimicNorm(), example=IMAGES, init="keep").eval()
    kept.load_state_dict(model.state_dict())
    torch.testing.assert_close(first(kept(x)), first(model(x)), rtol=1e-10, atol=1e-10)
    wrapped = nn.Sequential(pickle.loads(pickle.dumps(kept)))
    wrapped.load_state_dict({f"0.{k}": v for k, v in model.state_dict().items()})
    own = mn.convert(trained(NETS[name]()), mn.MimicNorm(), example=IMAGES, init="keep").eval()
    own.load_state_dict(kept.state_dict())
    assert torch.equal(first(own(x)), first(kept(x)))


def test_moved_parameters_are_listed_under_every_name():
    model = build("aliased")
    keys = {key for key in model.state_dict() if not key.endswith("num_batches_tracked")}
    moved = mn.convert_(model, mn.MimicNorm(), example=IMAGES, init="keep").moved_parameters
    assert keys - model.state_dict().keys() == moved.keys()
    assert set(moved.values()) <= model.state_dict().keys()
    assert (moved["layers.1.bias"], moved["body.1.bias"]) == ("layers.0.beta", "body.0.beta")
    assert (moved["norm.weight"], moved["last.weight"]) == ("conv.gamma", "conv.gamma")


def test_row_means_stay_under_sgd():
    kept, x = mn.convert(build("resnet"), mn.MimicNorm(), example=IMAGES, init="keep"), images()
    layers = [m for m in kept.modules() if isinstance(m, TrainedLayer) and m.centring == "backward"]
    means = [m.weight.detach().mean((1, 2, 3)) for m in layers]
    before = [m.weight.detach().clone() for m in layers]
    optimizer = torch.optim.SGD(kept.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    for _ in range(5):
        optimizer.zero_grad()
        kept(x).pow(2).sum().backward()
        optimizer.step()
    assert layers
    for layer, mean, weight in zip(layers, means, before, strict=True):
        torch.testing.assert_close(layer.weight.mean((1, 2, 3)), mean, rtol=0, atol=1e-12)
        assert not torch.equal(layer.weight, weight)
    mn.check(kept)  # rows that are off centre are what was kept
    with pytest.raises(MimicNormError, match='init="keep"'):
        mn.project_(kept)


def test_frozen_parameters_stay_frozen():
    model = build("resnet")
    model.blocks[0].bn1.weight.requires_grad_(False)
    report = mn.convert_(model, mn.NoNorm(), example=IMAGES, init="keep")
    assert not model.blocks[0].conv1.gamma.requires_grad
    assert model.blocks[0].conv1.beta.requires_grad
    assert not report.new_parameters


def test_an_affine_map_costs_its_input_unless_gamma_is_frozen():
    model = build("preact")
    planned = mn.plan(model, mn.NoNorm(), example=IMAGES, init="keep")
    assert planned.totals()["affines"] > 0
    assert not any("saved for backward" in note for note in planned.notes)  # in-place ReLUs: recovered from the output
    for m in model.modules():
        if isinstance(m, nn.ReLU):
            m.inplace = False
    assert any("saved for backward" in n for n in mn.plan(model, mn.NoNorm(), example=IMAGES, init="keep").notes)
    for m in model.modules():
        if is_batch_norm(m):
            m.weight.requires_grad_(False)
    assert not any("saved for backward" in n for n in mn.plan(model, mn.NoNorm(), example=IMAGES, init="keep").notes)


def test_frozen_batch_norms_of_torchvision_are_kept_frozen():
    model, x = plain(), images()
    frozen = zoo.torchvision().ops.FrozenBatchNorm2d(8)
    model[5] = frozen
    model = trained(model)
    kept = mn.convert(model, mn.MimicNorm(), example=IMAGES, init="keep").eval()
    torch.testing.assert_close(kept(x), model(x))
    assert not kept[4].gamma.requires_grad
    kept.load_state_dict(model.state_dict())


def test_a_layer_that_cannot_take_it_up_leaves_an_affine_map():
    model = build("plain")
    nn.utils.parametrizations.weight_norm(model[4])
    kept = mn.convert(model, mn.MimicNorm(), example=IMAGES, init="keep").eval()
    assert isinstance(kept[5], TrainedAffine)
    torch.testing.assert_close(kept(images()), model(images()))


class Bare(nn.Module):
    """A BatchNorm behind a weight that is in no convolution or linear layer."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.bilinear, self.weight = nn.Bilinear(6, 6, 12), nn.Parameter(torch.randn(16, 6))
        self.norm, self.fc = nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x):
        y = self.bilinear(x, x) if self.way == "bilinear" else F.linear(x, self.weight[:12])
        return self.fc(self.norm(y).relu())


@pytest.mark.parametrize("way", ["bilinear", "sliced"])
@pytest.mark.parametrize("method", [mn.MimicNorm(), mn.WeightMean(), mn.NoNorm()], ids=lambda m: m.name)
def test_no_layer_that_could_be_changed(way, method):
    model, x = trained(Bare(way)), torch.randn(4, 6, dtype=torch.float64)
    kept = mn.convert(model, method, example=(4, 6), init="keep").train()
    assert isinstance(kept.norm, TrainedAffine)
    torch.testing.assert_close(kept(x), model(x), rtol=1e-10, atol=1e-10)
    with pytest.raises(RefusedError, match="norm: MimicNorm changes"):
        mn.convert(Bare(way), mn.MimicNorm(), example=(4, 6))


# -- what cannot be kept -----------------------------------------------------------------------------------------


def spoil_nan(norm):
    norm.running_mean[2] = float("nan")


def spoil_negative(norm):
    norm.running_var[1] = -1.0


def spoil_missing(norm):
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    norm.track_running_stats = False


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (nn.BatchNorm2d.reset_running_stats, "never set"),
        (spoil_nan, "NaN"),
        (spoil_negative, "negative"),
        (spoil_missing, "track_running_stats=False"),
    ],
)
def test_statistics_that_cannot_be_kept(spoil, reason):
    model = build("resnet")
    spoil(model.blocks[1].bn2)
    before, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(RefusedError, match=reason) as error:
        mn.convert_(model, mn.MimicNorm(), example=IMAGES, init="keep")
    assert [r.name for r in error.value.refusals] == ["blocks.1.bn2"]
    assert [type(m) for m in model.modules()] == classes
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)
    mn.convert_(
        model, mn.NoNorm(), example=IMAGES, init="keep", where=lambda module, name: name != "blocks.1.bn2"
    )  # the way out


def test_a_fresh_network_is_refused_once():
    with pytest.raises(RefusedError, match=r"never set.*other BatchNorms") as error:
        mn.convert_(nets.resnet(), mn.MimicNorm(), example=IMAGES, init="keep")
    assert len(error.value.refusals) == 1


def test_on_the_meta_device():
    with torch.device("meta"):
        model = plain()
    with pytest.raises(RefusedError, match="meta"):
        mn.convert_(model, mn.NoNorm(), example=IMAGES, init="keep")


def test_a_network_that_looks_trained_is_offered_keep():
    with pytest.raises(RefusedError, match='init="keep"'):
        mn.convert_(build("resnet"), mn.MimicNorm(), example=IMAGES)


@pytest.mark.parametrize("method", [mn.Fixup(), mn.SkipInit(), mn.GroupNormWS(), mn.ScaledWS()], ids=lambda m: m.name)
def test_methods_that_cannot_keep(method):
    with pytest.raises(RefusedError, match=r"use MimicNorm"):
        mn.plan(build("resnet"), method, example=IMAGES, init="keep")


def test_init_is_refused_afterwards():
    kept = mn.convert(build("plain"), mn.NoNorm(), example=IMAGES, init="keep")
    with pytest.raises(InitError, match="keep"):
        mn.init_(kept, "theory")


# -- the last BN -------------------------------------------------------------------------------------------------


def test_a_last_norm_only_on_a_fresh_head():
    model = build("resnet")
    with torch.no_grad():
        model.fc.weight.mul_(3)
    with pytest.raises(RefusedError, match=r"fc: last_norm=True on a head that looks trained"):
        mn.convert_(model, mn.MimicNorm(last_norm=True), example=IMAGES, init="keep")
    model.fc = nn.Linear(model.fc.in_features, 7).double()
    report = mn.convert_(model, mn.MimicNorm(last_norm=True), example=IMAGES, init="keep")
    assert report.totals()["last_norms"] == 1
    assert model.train()(images()).shape == (4, 7)


@pytest.mark.parametrize(("features", "classes"), [(16, 2), (64, 10), (512, 1000)])
def test_looks_fresh(features, classes):
    torch.manual_seed(0)
    for _ in range(20):
        layer = nn.Linear(features, classes)
        assert looks_fresh(layer)
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.zeros_(layer.bias)
        assert looks_fresh(layer)
        layer = nn.Linear(features, classes)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(layer(torch.randn(32, features).relu()), torch.randint(classes, (32,))).backward()
            optimizer.step()
        with torch.no_grad():
            layer.weight[0, 0] = 1.0  # a trained weight outside of what is drawn
        assert not looks_fresh(layer)


@pytest.mark.parametrize("method", [mn.MimicNorm(), mn.LastBN()], ids=lambda m: m.name)
def test_last_norm_by_default_in_fresh_networks(method):
    assert mn.plan(nets.resnet(), method, example=IMAGES).totals()["last_norms"] == 1
    assert mn.plan(nets.resnet(), method, example=IMAGES).method.last_norm is True
