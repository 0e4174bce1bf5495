"""The surgery on small networks: invariants, whole or not at all, and what a user does afterwards."""

from __future__ import annotations

import copy
import io
import pickle

import invariants
import nets
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.errors import CheckError, InitError, MimicNormError, RefusedError
from mimicnorm.layers import LastNorm, LastNormed, Shift, WeightMean
from mimicnorm.methods import METHODS, BatchNorm, LastBN, MimicNorm, NoNorm, ScaledWS
from mimicnorm.surgery.convert import check, convert, convert_, init_

SMALL = MimicNorm(min_fan_in=8)
NETS = {
    "plain": (nets.plain, (3, 6, 8, 8)),
    "resnet": (nets.resnet, (3, 3, 8, 8)),
    "preact": (nets.preact, (3, 3, 8, 8)),
    "dense": (nets.Dense, (3, 3, 8, 8)),
    "gated": (nets.SqueezeExcite, (3, 3, 8, 8)),
    "segmenter": (nets.Segmenter, (3, 3, 8, 8)),
    "mlp": (nets.Mlp, (3, 6, 64)),
}


@pytest.mark.parametrize("name", NETS)
def test_invariants(name):
    make, shape = NETS[name]
    converted = invariants.hold(make(), torch.randn(shape), SMALL)
    check(converted)
    assert any(isinstance(m, WeightMean) for m in converted.modules())
    assert any(isinstance(m, LastNorm) for m in converted.modules())


@pytest.mark.parametrize("name", NETS)
def test_copies_pickles_and_reloads(name):
    make, shape = NETS[name]
    model = convert(make(), SMALL, example=shape)
    x = torch.randn(shape)
    model.eval()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    fresh = make()
    convert_(fresh, SMALL, example=shape)
    fresh.load_state_dict(model.state_dict())
    for twin in (*twins, fresh.eval()):
        torch.testing.assert_close(twin(x), model(x))
        check(twin)


def test_parameters_stay_the_same_objects():
    model = nets.resnet()
    conv, beta, fc = model.blocks[0].conv1, model.blocks[0].bn1.bias, model.fc
    weight, norm = conv.weight, model.blocks[0].bn1
    report = convert_(model, SMALL, example=(2, 3, 8, 8))
    assert model.blocks[0].conv1 is conv
    assert conv.weight is weight
    assert conv.bias is beta
    assert model.blocks[0].bn1 is norm
    assert type(norm) is nn.Identity
    assert model.fc is fc
    assert isinstance(fc, nn.Linear)
    assert fc.in_features == 16
    assert report.moved_parameters["blocks.0.bn1.bias"] == "blocks.0.conv1.bias"
    scalars = {f"blocks.{i}.conv2.residual_scale" for i in range(3)} | {"fc.last_norm.logit_scale"}
    assert {n for n, _ in report.new_parameters} == scalars
    assert all(dict(model.named_parameters())[n] is p for n, p in report.new_parameters)
    assert all(p.shape == (1,) for _, p in report.new_parameters)


@pytest.mark.parametrize("change", ["double", "channels_last", "eval", "frozen", "mixed"])
def test_type_layout_flags_and_freezing_survive(change):
    model = nets.resnet()
    x = torch.randn(2, 3, 8, 8)
    if change == "double":
        model, x = model.double(), x.double()
    elif change == "channels_last":
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    elif change == "eval":
        model.eval()
    elif change == "frozen":
        model.stem.requires_grad_(False)
    elif change == "mixed":
        model.blocks[1].eval()
    converted = convert(model, SMALL, example=x)
    invariants.nothing_is_lost(model, converted)
    if change == "channels_last":
        assert converted.blocks[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    if change == "frozen":
        assert not converted.stem[0].bias.requires_grad
    if change == "double":
        assert converted.fc.last_norm.running_mean.dtype == torch.float64


def test_meta_device_then_init():
    with torch.device("meta"):
        model = nets.resnet()
    with pytest.raises(InitError, match=r"meta.*init=None"):
        convert_(model, SMALL, example=(2, 3, 8, 8))
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    convert_(model, SMALL, example=(2, 3, 8, 8), init=None)
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.normal_(p)
    model.fc.last_norm.reset_running_stats()
    init_(model, "theory")
    assert model(torch.randn(4, 3, 8, 8)).isfinite().all()
    assert model.blocks[2].conv2.residual_scale.item() == pytest.approx(3**-0.5)


def test_init_none_leaves_every_weight():
    model = nets.resnet()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    convert_(model, SMALL, example=(2, 3, 8, 8), init=None)
    after = model.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before.keys() & after.keys())


def test_two_biases_become_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
    invariants.identity_norms_(model)
    with torch.no_grad():
        model[1].bias.fill_(2.0)
    x = torch.randn(2, 3, 4, 4)
    expected = model(x)
    bias = model[0].bias
    convert_(model, NoNorm(), example=x, init=None)
    assert model[0].bias is bias
    torch.testing.assert_close(model(x), expected)


class ReadsItsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nets.conv(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)) * self.bn.weight.mean())


class Stumbles(nn.Module):
    """Runs on fake tensors, fails on real ones."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nets.conv(8, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        y = self.fc(self.bn(self.conv(x)))
        if type(x) is torch.Tensor and not torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE):
            raise RuntimeError("no")
        return y


@pytest.mark.parametrize(
    ("make", "kw", "says"),
    [
        (ReadsItsNorm, {}, "does not run any more.*where="),
        (Stumbles, {"init": "calibrate"}, "while calibrating"),
        (nets.plain, {"init": "calibrate", "example": torch.full((2, 6, 8, 8), torch.nan)}, "cannot calibrate 0"),
        (nets.plain, {"head": "nowhere"}, "names no module"),
    ],
)
def test_a_failed_conversion_leaves_the_model_bit_for_bit(make, kw, says):
    model = make()
    example = kw.pop("example", torch.randn(2, 8 if make is not nets.plain else 6, 8, 8))
    classes = [type(m) for m in model.modules()]
    attributes = [dict(m.__dict__) for m in model.modules()]
    state = {k: (v, v.clone()) for k, v in model.state_dict(keep_vars=True).items()}
    with pytest.raises(MimicNormError, match=f"(?s){says}"):
        convert_(model, SMALL, example=example, **kw)
    assert [type(m) for m in model.modules()] == classes
    for m, before in zip(model.modules(), attributes, strict=True):
        assert m.__dict__.keys() == before.keys()
    for key, value in model.state_dict(keep_vars=True).items():
        assert value is state[key][0]
        assert torch.equal(value, state[key][1])


def test_convert_twice_is_refused_and_batchnorm_changes_nothing():
    model = convert(nets.resnet(), SMALL, example=(2, 3, 8, 8))
    with pytest.raises(RefusedError, match="converted before"):
        convert_(model, SMALL, example=(2, 3, 8, 8))
    original = nets.resnet()
    report = convert_(original, BatchNorm(), example=(2, 3, 8, 8))
    assert sum(isinstance(m, _BatchNorm) for m in original.modules()) == report.totals()["left"] == 8
    convert_(original, SMALL, example=(2, 3, 8, 8))


def test_conversion_takes_two_passes():
    model, passes = nets.resnet(), []
    once = model.forward
    model.forward = lambda *args: passes.append(args) or once(*args)
    convert_(model, SMALL, example=(2, 3, 8, 8), init="theory")
    assert len(passes) == 2  # one to plan, one to see that the result does the same and mixes no samples


def test_inference_mode_is_refused_in_one_sentence():
    model = nets.resnet()
    with torch.inference_mode():
        with pytest.raises(MimicNormError, match="outside"):
            convert_(model, SMALL, example=(2, 3, 8, 8))
        born_there = nets.resnet()
    with pytest.raises(RefusedError, match=r"weight was made inside torch.inference_mode"):
        convert_(born_there, SMALL, example=(2, 3, 8, 8))


def test_check_says_what_was_lost():
    model = convert(nets.resnet(), SMALL, example=(2, 3, 8, 8))
    check(model)
    check(nn.Sequential(model))
    with pytest.raises(CheckError, match="not converted"):
        check(nets.resnet())
    model.fc = nn.Linear(16, 3)
    model.blocks[0].conv1 = nn.Conv2d(8, 8, 3)
    model.blocks[0].bn1 = nn.BatchNorm2d(8)
    with pytest.raises(CheckError) as caught:
        check(model)
    for words in ("fc: the head was replaced", "blocks.0.conv1: the layer was replaced", "blocks.0.bn1: a BatchNorm2d"):
        assert words in str(caught.value)


def test_hooks_and_stray_references_survive():
    model = nets.resnet()
    seen = []
    model.blocks[0].bn1.register_forward_hook(lambda m, a, o: seen.append(o.shape))
    stray = model.blocks[0].bn1
    convert_(model, SMALL, example=(2, 3, 8, 8))
    seen.clear()
    model(torch.randn(2, 3, 8, 8))
    assert len(seen) == 1
    assert type(stray) is Shift  # the hook may look at the layer's output, so beta cannot be in it


def test_where_keeps_a_batch_norm_working():
    model = convert(nets.resnet(), SMALL, example=(4, 3, 8, 8), where=lambda m, n: n != "stem.1")
    assert isinstance(model.stem[1], nn.BatchNorm2d)
    check(model)
    model(torch.randn(4, 3, 8, 8))
    assert model.stem[1].running_mean.abs().max() > 0


def test_head_by_name_on_a_model_without_an_evident_one():
    model = nn.Sequential(nets.conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Tanh())
    convert_(model, SMALL, example=(2, 3, 4, 4), head="3")
    assert isinstance(model[3], LastNormed)
    y = model[:4](torch.randn(16, 3, 4, 4))
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var((0, 2, 3), correction=0), torch.ones(4), atol=1e-2, rtol=0)


def test_inception_like_auxiliary_heads_only_in_training():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.bn = nets.conv(3, 8), nn.BatchNorm2d(8)
            self.aux_conv, self.aux_bn = nets.conv(8, 8), nn.BatchNorm2d(8)
            self.aux, self.fc = nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x):
            y = F.relu(self.bn(self.stem(x)))
            out = self.fc(y.mean((2, 3)))
            return (out, self.aux(self.aux_bn(self.aux_conv(y)).mean((2, 3)))) if self.training else out

    model = Net().eval()
    report = convert_(model, SMALL, example=(2, 3, 8, 8))
    assert {h.name for h in report.heads} == {"fc", "aux"}
    assert not model.training
    assert not model.aux.last_norm.training


def test_one_dimensional_and_volumetric():
    for conv, norm, shape in (
        (nn.Conv1d, nn.BatchNorm1d, (3, 4, 9)),
        (nn.Conv3d, nn.BatchNorm3d, (3, 4, 5, 5, 5)),
        (nn.ConvTranspose1d, nn.BatchNorm1d, (3, 4, 9)),
        (nn.ConvTranspose3d, nn.BatchNorm3d, (3, 4, 5, 5, 5)),
    ):
        model = nn.Sequential(
            conv(4, 4, 3), norm(4), nn.ReLU(True), conv(4, 4, 3, groups=2), norm(4), nn.ReLU(), conv(4, 2, 1)
        )
        converted = invariants.hold(model, torch.randn(shape), MimicNorm(min_fan_in=2))
        assert sum(isinstance(m, WeightMean) for m in converted.modules()) == 2


def test_last_bn_alone_and_shift_for_a_norm_nobody_owns():
    model = convert(nets.preact(), LastBN(), example=(2, 3, 8, 8))
    assert isinstance(model.fc, LastNormed)
    assert not any(isinstance(m, WeightMean) for m in model.modules())
    assert isinstance(model.blocks[0].bn1, Shift)


def test_trains_after_compiling_whole():
    torch._dynamo.reset()
    model = convert(nets.resnet(), SMALL, example=(4, 3, 8, 8))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 3, 8, 8)
    eager = copy.deepcopy(model)
    target = torch.tensor([0, 1, 2, 3])  # (squares of normalised logits sum to a constant: no gradient to compare)
    F.cross_entropy(eager(x), target).backward()
    F.cross_entropy(compiled(x), target).backward()
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)


class NormedConv(nn.Conv2d):
    """A layer that holds its BatchNorm."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm = nn.BatchNorm2d(self.out_channels)

    def forward(self, x):
        return self.norm(super().forward(x)).relu()


@pytest.mark.parametrize("method", [MimicNorm(min_fan_in=3, last_norm=False), NoNorm(), ScaledWS()], ids=str)
def test_a_root_that_is_a_layer_and_holds_its_norm_converts_like_a_child(method):
    x = torch.randn(4, 8, 6, 6)
    root = NormedConv(8, 16, 3)
    child = nn.Sequential(copy.deepcopy(root))
    reports = [convert_(m, method, example=x, init=None) for m in (root, child)]
    check(root)
    torch.testing.assert_close(root(x), child(x))
    keys = [{k.removeprefix("0."): v.removeprefix("0.") for k, v in r.moved_parameters.items()} for r in reports]
    assert keys[0] == keys[1]
    assert set(root.state_dict()) == {k.removeprefix("0.") for k in child.state_dict()}
    invariants.no_sample_sees_another(root, x)


class ForeignLinear(nn.Module):
    """A linear layer of another package: a 2-d weight and a call of F.linear, no other attribute of nn.Linear."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outputs, inputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class ForeignResidual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm1 = ForeignLinear(64, 64), nn.BatchNorm1d(64)
        self.b, self.norm2 = ForeignLinear(64, 64), nn.BatchNorm1d(64)
        self.fc = nn.Linear(64, 4)

    def forward(self, x):
        x = self.norm1(self.a(x)).relu()
        return self.fc((x + self.norm2(self.b(x))).relu())


@pytest.mark.parametrize("name", [name for name in METHODS if name != "batchnorm"])
def test_linear_layers_of_other_packages_convert_with_every_method(name):
    x = torch.randn(6, 64)
    model = ForeignResidual()
    report = convert_(model, METHODS[name](), example=x)
    assert {"a", "b"} <= {layer.name for layer in report.layers}
    check(model)
    invariants.every_gradient_is_finite(model, x)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nets.conv(8, 16), nn.BatchNorm2d(16), nn.ReLU()])
        self.body, self.fc = nn.Sequential(*self.layers), nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


def test_modules_under_two_names_load_and_are_listed_under_both():
    model, again = TwoNames(), TwoNames()
    state = model.state_dict()
    report = convert_(model, SMALL, example=(4, 8, 6, 6))
    assert report.moved_parameters == {"layers.1.bias": "layers.0.bias", "body.1.bias": "body.0.bias"}
    convert_(again, SMALL, example=(4, 8, 6, 6), init=None)
    again.load_state_dict(model.state_dict())
    left = again.load_state_dict({report.moved_parameters.get(k, k): v for k, v in state.items()}, strict=False)
    assert all(key.startswith("fc.last_norm.") for key in left.missing_keys)
    assert all(key.startswith(("layers.1.", "body.1.")) for key in left.unexpected_keys)
    torch.testing.assert_close(again.body[0].weight, state["body.0.weight"])
