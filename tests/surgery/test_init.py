"""Starting weights: variances as predicted, on real networks of the zoo too."""

from __future__ import annotations

import copy

import invariants
import nets
import pytest
import torch
import torch.nn.functional as F
import zoo
from signals import largest_variance, variances
from torch import nn

from mimicnorm.errors import ExampleError, InitError, RefusedError
from mimicnorm.methods import GroupNormWS, MimicNorm, NoNorm, ScaledWS
from mimicnorm.surgery.convert import convert_, init_

SMALL = MimicNorm(min_fan_in=8)


def test_theory_draws_what_it_says():
    model = nn.Sequential(
        nets.conv(64, 64), nn.BatchNorm2d(64), nn.ReLU(), nets.conv(64, 64), nn.BatchNorm2d(64), nn.Conv2d(64, 2, 1)
    )
    with torch.no_grad():
        model[1].bias.fill_(3.0)
    report = convert_(model, MimicNorm(last_norm=False), example=(2, 64, 8, 8), init="theory")
    for step in report.layers:
        layer = model.get_submodule(step.name)
        assert layer.weight.std().item() == pytest.approx(step.gain / step.fan_in**0.5, rel=0.02)
        assert not layer.bias.any()
    assert report.layers[0].gain < 1.01 < 1.7 < report.layers[1].gain


def test_plain_linear_stack_keeps_unit_variance_as_theory_says():
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(512, 4))
    x = torch.randn(64, 512)
    for method in (MimicNorm(last_norm=False), NoNorm()):
        twin = copy.deepcopy(model)
        report = convert_(twin, method, example=x, init="theory")
        found = variances(twin, [s.name for s in report.layers], x)
        assert 0.75 < min(found.values()) < max(found.values()) < 1.3, (method, found)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_theory_on_resnets_first_conv_of_each_branch(name):
    model = getattr(zoo.torchvision().models, name)()
    report = convert_(model, MimicNorm(), example=(1, 3, 224, 224))
    assert report.init == "theory"
    steps = {s.name: s for s in report.layers if s.name.endswith("conv1") and s.name != "conv1"}
    assert [s.v for s in steps.values()] == list(range(1, len(steps) + 1))
    found = variances(model.eval(), steps, torch.randn(2, 3, 224, 224))
    ratios = [found[n] / steps[n].v for n in steps]
    assert max(ratios) / min(ratios) <= 2.5


def test_theory_on_vgg():
    model = zoo.torchvision().models.vgg16_bn(init_weights=False)
    report = convert_(model, MimicNorm(), example=(1, 3, 224, 224))
    assert report.init == "theory"
    found = variances(model.eval(), [s.name for s in report.layers], torch.randn(1, 3, 224, 224))
    assert max(found.values()) / min(found.values()) <= 4


CALIBRATED = {
    "mobilenetv3_small_100": 96,
    "efficientnet_b0": 96,
    "regnety_002": 96,
    "densenet121": 64,
    "repvgg_a0": 64,
    "mobileone_s0": 64,
    "resnetv2_50": 64,
    "hrnet_w18_small": 64,
}


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrate_brings_every_owner_to_one(name):
    size = CALIBRATED[name]
    model = zoo.timm().create_model(name)
    x = torch.randn(8, 3, size, size)
    report = convert_(model, MimicNorm(), example=x, init="calibrate")
    owners = [s.name for s in report.layers]
    found = variances(model, owners, x)
    assert set(found) == set(owners)
    assert all(0.9 < v < 1.1 for v in found.values()), {n: v for n, v in found.items() if not 0.9 < v < 1.1}
    other = torch.randn_like(x)
    found = variances(model, owners, other)
    assert all(0.25 < v < 4 for v in found.values()), {n: v for n, v in found.items() if not 0.25 < v < 4}
    assert largest_variance(model, other) < 100


def test_calibrate_lets_gates_start_near_constant():
    """With the fan-out weights that timm gives a squeeze, loud samples get louder from block to block."""
    model, x = nets.SqueezeExcite(), torch.randn(16, 3, 8, 8)
    model.fc1_bn = nn.Identity()  # now no BatchNorm holds the gate
    with torch.no_grad():
        model.fc1.weight.mul_(20)
    twin = copy.deepcopy(model)
    report = convert_(model, SMALL, example=x, init="calibrate")
    assert report.gates == ["fc1", "fc2"]
    assert "2 layers of gates" in str(report)
    found = variances(model, report.gates, x)
    assert found["fc1"] == pytest.approx(0.1, rel=0.2)
    assert found["fc2"] < 0.11
    assert torch.equal(model.fc2.weight, twin.fc2.weight)  # small already
    convert_(twin, SMALL, example=x, init="theory")
    assert variances(twin, ["fc1"], x)["fc1"] > 1


class CountsSamples(nn.Module):
    """Notes how many samples it is given; takes only so many if it is told."""

    def __init__(self, only: int | None = None):
        super().__init__()
        self.body, self.only, self.batches = nets.plain(), only, torch.zeros(1, dtype=torch.long)

    def forward(self, x):
        CountsSamples.seen.add(len(x))
        assert self.only in (None, len(x)), "another batch size"
        return self.body(x)


@pytest.mark.parametrize("only", [None, 2])
def test_a_shape_is_calibrated_on_many_samples_if_the_model_takes_them(only):
    CountsSamples.seen = set()
    model = CountsSamples(only)
    convert_(model, SMALL, example=(2, 6, 8, 8), init="calibrate")
    assert 64 in CountsSamples.seen
    weights = model.body[0].weight.clone()
    init_(model, "calibrate", example=(2, 6, 8, 8))
    torch.testing.assert_close(model.body[0].weight, weights)
    found = variances(model, ["body.0", "body.3"], torch.randn(2, 6, 8, 8))
    assert all(0.5 < v < 2 for v in found.values())
    if only:
        with pytest.raises(ExampleError, match="another batch size"):
            init_(model, "calibrate", example=torch.randn(3, 6, 8, 8))


def test_calibrate_scales_weights_and_starts_residual_scalars_as_planned():
    model, x = nets.resnet(), torch.randn(16, 3, 8, 8)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    report = convert_(model, SMALL, example=x, init="calibrate")
    for name in ("blocks.1.conv1", "blocks.1.conv2"):
        ratio = model.get_submodule(name).weight / weights[f"{name}.weight"]
        torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio))
    scales = {step.name: step.scale for step in report.layers if step.scale is not None}
    assert scales["blocks.1.conv2"] == pytest.approx(2**-0.5)
    for name, scale in scales.items():
        assert model.get_submodule(name).residual_scale.item() == pytest.approx(scale), name
    found = variances(model, scales, x)
    assert all(v == pytest.approx(1, rel=1e-3) for v in found.values()), found


class PooledEnd(nn.Module):
    """Blocks whose branch is pooled, padded or concatenated before its BatchNorm."""

    def __init__(self, between):
        super().__init__()
        self.between = between
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norms, self.fc = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3)), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(x + norm(self.between(conv(x))))
        return self.fc(x.mean((2, 3)))


BETWEEN = [lambda y: F.avg_pool2d(y, 3, 1, 1), lambda y: F.pad(y[:, :, 1:-1, 1:-1], (1, 1, 1, 1)), lambda y: y.clone()]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("method", [MimicNorm(), MimicNorm(min_fan_in=2), NoNorm(residual="sqrt")], ids=str)
def test_calibrate_brings_the_end_of_a_branch_to_its_variance_behind_pooling(between, method):
    model, x, ends = PooledEnd(between), torch.randn(64, 3, 12, 12), []
    report = convert_(model, method, example=x, init="calibrate")
    assert all(n.scale_into for n in report.norms if n.scale is not None)
    for norm in model.norms:
        norm.register_forward_hook(lambda module, args, output: ends.append(output.detach().var().item()))
    model(x)
    aims = [n.scale**2 * n.v for n in report.norms if n.scale is not None]
    assert ends == pytest.approx(aims, rel=0.02)


class TiedEnds(nn.Module):
    """Two residual branches that end in one weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(2))
        self.b.weight = self.a.weight
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = x + self.norms[0](self.a(x))
        return self.head(x + self.norms[1](self.b(3 * x)))


def test_calibrate_scales_the_scalar_where_a_tied_weight_is_scaled_already():
    model, x = TiedEnds(), torch.randn(256, 64)
    convert_(model, MimicNorm(), example=x, init="calibrate")
    assert model.a.residual_scale.item() == pytest.approx(1)
    assert model.b.weight is model.a.weight
    found = variances(model, ["a", "b"], x)
    assert all(v == pytest.approx(1, rel=1e-3) for v in found.values()), found


def test_calibrate_redraws_what_no_factor_can_mend():
    model = nets.resnet()
    nn.init.zeros_(model.blocks[0].conv2.weight)
    nn.init.constant_(model.blocks[1].conv1.weight, 0.1)
    convert_(model, SMALL, example=torch.randn(8, 3, 8, 8), init="calibrate")
    assert model.blocks[0].conv2.weight.std() > 0
    assert model.blocks[1].conv1.weight.std() > 0


def test_calibrate_leaves_layers_without_a_signal_to_the_theory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    report = convert_(model, MimicNorm(), example=torch.zeros(8, 64), init="calibrate")
    (step,) = report.layers
    assert model[0].weight.std().item() == pytest.approx(step.gain / step.fan_in**0.5, rel=0.05)
    assert report.notes == ["the example gives no signal to calibrate '0' with: theirs is the theory's start"]
    init_(model, "calibrate", example=torch.randn(256, 64))
    assert variances(model, ["0"], torch.randn(256, 64))["0"] == pytest.approx(1, rel=0.1)
    with pytest.raises(InitError, match=r"cannot calibrate 0: the variance of its output .8, 64. is nan"):
        init_(model, "calibrate", example=torch.full((8, 64), torch.nan))


class Recurrent(nn.Module):
    """Its state begins at zero, so the first use of ``on_state`` gives no signal."""

    def __init__(self):
        super().__init__()
        self.on_input, self.on_state = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norms, self.head = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(2)), nn.Linear(64, 4)

    def forward(self, x):
        state = torch.zeros_like(x)
        for _ in range(3):
            state = torch.tanh(self.norms[0](self.on_input(x)) + self.norms[1](self.on_state(state)))
        return self.head(state)


def test_calibrate_waits_for_a_signal():
    model, uses = Recurrent(), []
    report = convert_(model, MimicNorm(residual=None, last_norm=False), example=torch.randn(256, 64))
    assert report.init == "calibrate"
    assert not any("signal" in note for note in report.notes)
    model.on_state.register_forward_hook(lambda module, args, output: uses.append(output.var(correction=0).item()))
    model(torch.randn(256, 64))
    assert uses[0] == 0
    assert uses[1] == pytest.approx(1, rel=0.2)


def test_calibrate_leaves_flags_statistics_and_other_layers():
    model = nn.Sequential(nets.resnet(), nn.Dropout(0.5)).eval()
    head = model[0].fc.weight.clone()
    norm = model[0].stem[1]
    convert_(model, SMALL, example=torch.randn(8, 3, 8, 8), init="calibrate", where=lambda m, n: n != "0.stem.1")
    assert torch.equal(model[0].fc.weight, head)
    assert not any(m.training for m in model.modules())
    assert not norm.running_mean.any()
    assert norm.num_batches_tracked == 0
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_init_again_and_wrongly():
    model = nets.resnet()
    convert_(model, SMALL, example=(2, 3, 8, 8), init=None)
    with pytest.raises(InitError, match="needs an example"):
        init_(model, "calibrate")
    with pytest.raises(InitError, match="init='keep'"):
        init_(model, "keep")
    init_(model, "calibrate", example=torch.randn(8, 3, 8, 8))
    torch.manual_seed(1)
    init_(model, "theory")
    first = model.blocks[0].conv1.weight.clone()
    torch.manual_seed(1)
    init_(nn.Sequential(model), "theory")
    assert torch.equal(model.blocks[0].conv1.weight, first)


class Own(nn.Conv2d):
    """A layer with parameters of its own under names that the conversion uses, too."""

    def __init__(self, *args, names=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.names = names
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.full((1,), 0.7)))

    def forward(self, x):
        for name in self.names:
            x = x * getattr(self, name)
        return super().forward(x)


def own(*names: str) -> nn.Sequential:
    return nn.Sequential(Own(8, 8, 3, names=names), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


@pytest.mark.parametrize("name", ["gain", "scalar_bias", "input_bias", "residual_scale"])
@pytest.mark.parametrize("init", ["theory", "calibrate"])
def test_a_users_own_parameters_are_not_reset(name: str, init: str):
    for method in (NoNorm(), SMALL):
        model = own(name)
        if name == "residual_scale" and method is SMALL:
            with pytest.raises(RefusedError, match="0: it has an attribute 'residual_scale' of its own"):
                convert_(model, method, example=(4, 8, 8, 8), init=init)
        else:
            convert_(model, method, example=(4, 8, 8, 8), init=init)
        assert getattr(model[0], name).item() == pytest.approx(0.7)


@pytest.mark.parametrize(("method", "name"), [(ScaledWS(), "gain"), (GroupNormWS(), "standardisation")])
def test_names_that_other_methods_add_are_refused(method, name: str):
    with pytest.raises(RefusedError, match=f"0: it has an attribute '{name}' of its own"):
        convert_(own(name), method, example=(4, 8, 8, 8))


def test_a_head_with_a_last_norm_of_its_own_is_refused():
    model = own()
    model[4].last_norm = nn.Identity()
    with pytest.raises(RefusedError, match="4: has an attribute 'last_norm' of its own"):
        convert_(model, SMALL, example=(4, 8, 8, 8))


class Equalised(nn.Conv2d):
    """Scales its weight in its own forward."""

    def forward(self, x):
        return self._conv_forward(x, self.weight * (2 / self.weight[0].numel()) ** 0.5, self.bias)


class FaintBias(nn.Conv2d):
    """Scales its bias in its own forward."""

    def forward(self, x):
        return self._conv_forward(x, self.weight, self.bias * 0.01)


class Octave(nn.Conv2d):
    """Works on two maps at once."""

    def forward(self, pair):
        return tuple(self._conv_forward(t, self.weight, self.bias) for t in pair)


class OctaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.a, self.b = Octave(8, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        a, b = self.conv((x, nn.functional.avg_pool2d(x, 2)))
        return self.fc(torch.cat([self.a(a).relu().mean((2, 3)), self.b(b).relu().mean((2, 3))], 1))


def test_a_forward_of_ones_own_has_no_formula():
    blocks = [m for _ in range(4) for m in (Equalised(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(*blocks, nn.Conv2d(8, 4, 1))
    report = convert_(model, NoNorm(), example=(4, 8, 8, 8))
    assert (report.init, report.init_why) == ("calibrate", "no formula for the forward of 0 (Equalised)")
    assert variances(model, ["9"], torch.randn(32, 8, 8, 8))["9"] == pytest.approx(1, rel=0.3)


def test_a_beta_joins_only_a_bias_that_is_added():
    model = nn.Sequential(FaintBias(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    invariants.surgery_removes_normalisation_and_nothing_else(model, torch.randn(4, 8, 8, 8))


def test_a_layer_that_returns_several_tensors_is_calibrated():
    convert_(OctaveNet(), NoNorm(), example=torch.randn(4, 8, 12, 12), init="calibrate")


def test_init_sets_a_logit_scale_back_to_1():
    model = nets.resnet()
    convert_(model, MimicNorm(), example=(2, 3, 8, 8))
    nn.init.constant_(model.fc.last_norm.logit_scale, 3.0)
    init_(model)
    assert model.fc.last_norm.logit_scale.tolist() == [1.0]
    nn.init.constant_(model.fc.last_norm.logit_scale, 3.0)
    with pytest.raises(InitError):
        init_(model, "calibrate")  # fails without an example, after the scale was reset
    assert model.fc.last_norm.logit_scale.tolist() == [3.0]
