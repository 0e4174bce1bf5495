from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import nets
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stirred import stirred
from test_random_networks import STEPS, WIDTH, Random
from torch import nn

import mimicnorm as mn
from mimicnorm.deploy import fold, fold_with_report, fuse
from mimicnorm.errors import DeployError, RefusedError
from mimicnorm.layers import scale_weight_

METHODS = (mn.MimicNorm(min_fan_in=3), mn.WeightMean(min_fan_in=3), mn.LastBN(), mn.NoNorm(), mn.Fixup())
METHODS += (mn.SkipInit(), mn.GroupNormWS(), mn.ScaledWS(skip_gain=0.5))
SMALL = {
    "plain": (nets.plain, (3, 6, 8, 8)),
    "resnet": (nets.resnet, (3, 3, 8, 8)),
    "preact": (nets.preact, (3, 3, 8, 8)),
    "dense": (nets.Dense, (3, 3, 8, 8)),
    "squeeze-excite": (nets.SqueezeExcite, (3, 3, 8, 8)),
    "segmenter": (nets.Segmenter, (3, 3, 8, 8)),
    "mlp": (nets.Mlp, (3, 4, 64)),
}
ZOO = ("torchvision:shufflenet_v2_x0_5", "torchvision:googlenet", "timm:resnetv2_50", "timm:repvgg_a0")


def outputs(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with torch.no_grad():
        return [t for t in torch.utils._pytree.tree_leaves(model(x.clone())) if isinstance(t, torch.Tensor)]


def folds_to_the_same(converted: nn.Module, x: torch.Tensor) -> nn.Module:
    """Single and double precision; plain classes; the argument as it was. Returns the folded network."""
    classes = [type(m) for m in converted.modules()]
    state = copy.deepcopy(converted.state_dict())
    folded = fold(converted)
    assert [type(m) for m in converted.modules()] == classes
    assert all(torch.equal(t, state[k]) for k, t in converted.state_dict().items())
    assert not any(type(m).__module__.startswith("mimicnorm") for m in folded.modules())
    assert not any("_mimicnorm" in m.__dict__ for m in folded.modules())
    wide = copy.deepcopy(converted).double()
    pairs = ((converted, folded, x, 1e-5), (wide, fold(wide), x.double(), 1e-10))
    for before, after, batch, tolerance in pairs:
        for a, b in zip(outputs(before, batch), outputs(after, batch), strict=True):
            assert a.std() > 0
            assert (a - b).abs().max() <= tolerance * a.abs().max()
    return folded


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_output_of_every_method_as_in_eval_mode(name, method):
    make, shape = SMALL[name]
    try:
        converted = stirred(make(), method, shape)
    except RefusedError:
        assert method.needs_branches
        return
    folds_to_the_same(converted, torch.randn(5, *shape[1:]))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", [mn.MimicNorm(min_fan_in=3), mn.NoNorm()], ids=lambda m: m.name)
def test_trained_networks(name, method):
    make, shape = SMALL[name]
    model = make()
    for m in model.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(m.weight, 0.5, 1.5), nn.init.normal_(m.bias)
            m.running_mean.normal_(), m.running_var.uniform_(0.5, 2.0), m.num_batches_tracked.fill_(100)
    x = torch.randn(5, *shape[1:])
    expected = outputs(model.eval(), x)
    mn.convert_(model, method, example=shape, init="keep")
    folded = folds_to_the_same(model, x)
    for got, wanted in zip(outputs(folded, x), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    if name == "preact":  # its hook on state dicts and its affine maps are gone, too
        folded.load_state_dict(folded.state_dict())
        assert not any(
            isinstance(getattr(h, "hook", h), mn.layers.OriginalKeys)
            for h in folded._load_state_dict_pre_hooks.values()
        )


def test_weights_centred_in_the_backward_pass():
    model = stirred(nets.resnet(), mn.MimicNorm(min_fan_in=3, centre="backward"), (3, 3, 8, 8))
    folds_to_the_same(model, torch.randn(5, 3, 8, 8))


@pytest.mark.parametrize("spec", ZOO)
@pytest.mark.parametrize("method", [METHODS[0], METHODS[4]], ids=lambda m: m.name)
def test_networks_that_nobody_here_wrote(spec, method):
    from test_zoo import build

    try:
        converted = stirred(build(spec), method, (2, 3, 64, 64))
    except RefusedError:
        assert method.needs_branches
        return
    folds_to_the_same(converted, torch.randn(2, 3, 64, 64))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=4),
    inplace=st.booleans(),
    linear=st.booleans(),
    method=st.sampled_from(METHODS),
)
def test_random_networks(steps, inplace, linear, method):
    torch.manual_seed(0)
    x = torch.randn((4, WIDTH) if linear else (4, WIDTH, 5, 5))
    try:
        converted = stirred(Random(steps, inplace, linear), method, x)
    except RefusedError:
        return
    folds_to_the_same(converted, torch.randn_like(x))


# -- what a folded network is -----------------------------------------------------------------------------------


def test_unpickles_where_mimicnorm_is_not_installed(tmp_path):
    converted = stirred(zoo.torchvision().models.resnet18(num_classes=7), mn.MimicNorm(), (2, 3, 32, 32))
    x = torch.randn(2, 3, 32, 32)
    torch.save({"model": fold(converted), "x": x, "y": outputs(converted, x)[0]}, tmp_path / "folded.pt")
    code = (
        f"import sys; sys.path.insert(0, {str(Path(zoo.__file__).parent)!r}); sys.modules['mimicnorm'] = None\n"
        "import torch, zoo; zoo.torchvision()\n"
        f"saved = torch.load({str(tmp_path / 'folded.pt')!r}, weights_only=False)\n"
        "assert (saved['model'](saved['x']) - saved['y']).abs().max() < 1e-5\n"
        "assert not [name for name in sys.modules if name.startswith('mimicnorm.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["resnet18", "vgg11_bn", "shufflenet_v2_x0_5"])
def test_state_dict_loads_into_the_original_architecture_without_its_norms(name):
    make = getattr(zoo.torchvision().models, name)
    converted = stirred(make(num_classes=7), mn.MimicNorm(), (2, 3, 32, 32))
    state = fold(converted).state_dict()
    original = make(num_classes=7).eval()
    for key, module in list(original.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            original.set_submodule(key, nn.Identity())
        elif isinstance(module, nn.Conv2d) and module.bias is None:
            module.bias = nn.Parameter(torch.zeros(module.out_channels))  # where beta went
    original.load_state_dict(state)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(outputs(original, x), outputs(converted, x), rtol=1e-5, atol=1e-5)


def test_report_names_what_no_layer_can_take_up():
    report = fold_with_report(stirred(nets.preact(), mn.MimicNorm(), (2, 3, 8, 8)))
    assert report.standalone == ["blocks.0.bn1", "blocks.1.bn1"]
    layer = report.model.blocks[0].bn1
    assert isinstance(layer, nn.Conv2d)
    assert (layer.groups, layer.kernel_size) == (16, (1, 1))
    assert report.into == {"fc.last_norm": ("fc",)}
    assert "blocks.0.bn1" in str(report)


def test_layers_stay_what_they_were():
    converted = stirred(nets.resnet().to(memory_format=torch.channels_last), mn.MimicNorm(), (2, 3, 8, 8))
    converted.blocks[0].conv1.weight.requires_grad_(False)
    folded = fold(converted)
    conv = folded.blocks[0].conv1
    assert type(conv) is nn.Conv2d
    assert not conv.weight.requires_grad
    assert folded.blocks[1].conv1.weight.requires_grad
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert "residual_scale" not in "".join(folded.state_dict())
    pickle.loads(pickle.dumps(folded))


# -- heads ------------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """A convolution makes class scores that are pooled and flattened afterwards."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.body = nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())
        self.classifier = nn.Sequential(nn.Conv2d(8, 5, 1), activation, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, x):
        return self.classifier(self.body(x))


def test_last_bn_goes_through_pooling_and_flatten():
    converted = stirred(Pooled(nn.Identity()), mn.MimicNorm(), (4, 3, 8, 8), head="classifier")
    assert type(converted.classifier).__name__ == "LastNormedSequential"
    folded = folds_to_the_same(converted, torch.randn(4, 3, 8, 8))
    assert type(folded.classifier) is nn.Sequential
    assert fold_with_report(converted).into == {"classifier.last_norm": ("classifier.0",)}


def test_a_head_behind_an_activation_is_refused():
    converted = stirred(Pooled(nn.ReLU()), mn.MimicNorm(), (4, 3, 8, 8), head="classifier")
    with pytest.raises(DeployError, match=r"classifier: its last BN cannot be folded.*head="):
        fold(converted)


# -- odd layers -------------------------------------------------------------------------------------------------


def test_tied_layers_come_apart():
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
    net.append(nn.Linear(8, 3))
    converted = stirred(net, mn.MimicNorm(min_fan_in=3), (4, 8))
    converted[6].weight = nn.Parameter(converted[0].weight.detach()[:3].clone())
    converted[3].weight = converted[0].weight
    folds_to_the_same(converted, torch.randn(4, 8))


def test_parametrized_weights_are_baked_in():
    net = nets.plain()
    converted = stirred(net, mn.MimicNorm(min_fan_in=3), (2, 6, 8, 8))
    nn.utils.parametrizations.weight_norm(converted[0])
    folded = folds_to_the_same(converted.eval(), torch.randn(2, 6, 8, 8))
    assert type(folded[0]) is nn.Conv2d


class Doubling(nn.Module):
    def forward(self, t):
        return 2 * t


@pytest.mark.parametrize("method", [mn.MimicNorm(min_fan_in=3), mn.NoNorm()], ids=lambda m: m.name)
@pytest.mark.parametrize("way", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrized_layers_that_keep_left_alone_are_baked_in(way, method):
    net = nets.plain()
    net[0].register_buffer("steps", torch.arange(3))
    nn.utils.parametrize.register_parametrization(net[0], "steps", Doubling())
    getattr(nn.utils.parametrizations, way)(net[0])
    for _ in range(20):
        net(torch.randn(8, 6, 8, 8))
    converted = mn.convert(net, method, example=(2, 6, 8, 8), init="keep").eval()
    assert isinstance(converted[1], mn.layers.TrainedAffine)
    folded = folds_to_the_same(converted, torch.randn(2, 6, 8, 8))
    assert (type(folded[0]), type(folded[1])) == (nn.Conv2d, nn.Identity)
    assert torch.equal(folded[0]._buffers["steps"], 2 * torch.arange(3))


class Masked(nn.Conv2d):
    """Computes another weight from its own, so that a residual scalar multiplies its output."""

    def forward(self, input):
        return F.conv2d(input, self.weight * (self.weight > 0), self.bias, padding=1)


def test_a_scalar_on_the_output_of_a_foreign_forward_becomes_a_layer_behind_it():
    converted = stirred(nets.resnet(), mn.WeightMean(), (2, 3, 8, 8))
    scale = nn.Parameter(torch.tensor([0.3]))
    converted.blocks[0].conv2 = scale_weight_(Masked(8, 8, 3).eval(), scale, scales_output=True)
    report = fold_with_report(converted)
    assert report.standalone == ["blocks.0.conv2"]
    assert [type(m) for m in report.model.blocks[0].conv2] == [Masked, nn.Conv2d]
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(report.model(x), converted(x), rtol=1e-5, atol=1e-5)


def test_a_weight_used_behind_the_layers_back_is_noticed():
    class Peeking(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.fc = nets.conv(8, 8), nn.BatchNorm2d(8), nn.Linear(8, 3)
            self.peeks = False

        def forward(self, x):
            y = F.relu(self.bn(self.conv(x))).mean((2, 3))
            return self.fc(y * (1 + self.conv.weight.sum((1, 2, 3))) if self.peeks else y)

    converted = stirred(Peeking(), mn.WeightMean(min_fan_in=3), (2, 8, 8, 8))
    converted.peeks = True  # before the conversion it would be refused
    with pytest.raises(DeployError, match=r"output differs.*in double precision"):
        fold(converted)


class ForeignLinear(nn.Linear):
    """As timm's: a forward of its own that does the same."""

    def forward(self, input):
        return F.linear(input, self.weight, self.bias)


class Doubled(nn.Linear):
    """Its bias counts twice, so the last BN's addend would, too."""

    def forward(self, input):
        return F.linear(input, self.weight, 2 * self.bias)


def test_a_head_with_its_own_forward_is_probed():
    for head in (ForeignLinear, Doubled):
        net = nets.plain()
        net[8] = head(8, 5)
        converted = stirred(net, mn.MimicNorm(), (2, 6, 8, 8))
        if head is ForeignLinear:
            assert type(folds_to_the_same(converted, torch.randn(2, 6, 8, 8))[8]) is ForeignLinear
        else:
            with pytest.raises(DeployError, match="8: its last BN cannot be folded"):
                fold(converted)


def test_a_network_that_amplifies_rounding_is_judged_in_double_precision():
    class Chaotic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nets.plain()

        def forward(self, x):
            y = torch.sigmoid(self.net(x))
            for _ in range(18):  # the logistic map doubles an error in each step
                y = 4 * y * (1 - y)
            return y

    converted = stirred(Chaotic(), mn.MimicNorm(), (16, 6, 8, 8), head="net.8")
    report = fold_with_report(converted)
    assert report.error > 1e-4
    assert report.error_fp64 < 1e-5
    assert "double precision" in str(report)


# -- bad input --------------------------------------------------------------------------------------------------


def test_bad_input_is_one_clear_error():
    with pytest.raises(DeployError, match="was not converted"):
        fold(nets.plain().eval())
    with pytest.raises(DeployError, match="must be a torch"):
        fold("resnet18")
    converted = stirred(nets.plain(), mn.MimicNorm(), (2, 6, 8, 8))
    with pytest.raises(DeployError, match=r"wrapped in DataParallel: fold"):
        fold(nn.DataParallel(converted))
    converted[4].train()
    with pytest.raises(DeployError, match=r"4 is in training mode: call model.eval\(\)"):
        fold(converted)


def test_an_example_is_asked_for_where_none_is_known():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nets.plain()

        def forward(self, *, image):
            return self.net(image)

    image = torch.randn(2, 6, 8, 8)
    converted = stirred(Named(), mn.MimicNorm(), {"image": image})
    with pytest.raises(DeployError, match="example="):
        fold(converted)
    folded = fold(converted, example={"image": image})
    torch.testing.assert_close(folded(image=image), converted(image=image), rtol=1e-5, atol=1e-5)


def test_fusion_of_batch_norms_by_pytorch():
    model, x = nets.resnet(), torch.randn(8, 3, 8, 8)
    model(x)  # statistics move
    fused = fuse(model.eval())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules())
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(DeployError, match="training mode"):
        fuse(model.train())


class Kinds(nn.Module):
    """Inputs of two kinds take different ways; what is written with ``other`` does not run on the example."""

    def __init__(self, way: str):
        super().__init__()
        self.stem, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)
        self.other = nn.BatchNorm2d(8) if way == "norm" else nn.Conv2d(8 if way == "reader" else 3, 8, 1)
        self.fc, self.way, self.of_example = nn.Linear(8, 4), way, True

    def forward(self, x):
        others = {} if self.of_example else {self.way: self.other}
        x = others.get("norm", self.norm)(others.get("layer", self.stem)(x))
        return self.fc(others.get("reader", self.last)(x).relu().mean((2, 3)))


@pytest.mark.parametrize("init", [None, "keep"])
@pytest.mark.parametrize("way", ["norm", "layer", "reader"])
def test_what_the_example_does_not_show_is_folded_right(way, init):
    torch.manual_seed(0)
    model = Kinds(way)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        for t in (norm.bias, norm.running_mean):
            nn.init.normal_(t)
    converted = mn.convert(model, mn.NoNorm(), example=(2, 3, 8, 8), init=init).eval()
    report, x = fold_with_report(converted), torch.randn(2, 3, 8, 8)
    for kind in (True, False):
        converted.of_example = report.model.of_example = kind
        with torch.no_grad():
            torch.testing.assert_close(report.model(x), converted(x))


class NeedsTargets(Kinds):
    def forward(self, x, targets=None):
        if self.training and targets is None:
            raise ValueError("targets are missing")
        return super().forward(x)


def test_a_network_that_takes_targets_in_training_mode_is_folded():
    x = torch.randn(2, 3, 8, 8)
    converted = mn.convert(NeedsTargets("norm"), mn.NoNorm(), example=(x, torch.zeros(2))).eval()
    torch.testing.assert_close(fold(converted, example=(x,))(x), converted(x))
