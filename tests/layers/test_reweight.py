"""Centred, standardised and scaled layers: the plain expression's numbers in every mode, at a plain layer's memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from weight_layers import LAYERS, SamePad, parameter, saved_bytes

from mimicnorm.layers import (
    Standardisation,
    WeightMeanLinear,
    centre_,
    fixup_,
    scale_weight_,
    standardise_,
    standardised_class,
    weight_mean_class,
)
from mimicnorm.theory.activations import activation_stats

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")


SOME = ("conv2d", "depthwise", "transposed grouped", "linear", "own forward")
CASES = [("centred", name) for name in LAYERS] + [(kind, name) for kind in ("scaled", "standardised") for name in SOME]
every_case = pytest.mark.parametrize(("kind", "name"), CASES)
every_kind = pytest.mark.parametrize("kind", ["centred", "scaled", "standardised"])


def build(kind: str, name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A layer that makes its weight, the plain layer with that weight, made channel by channel, and an input."""
    make, shape = LAYERS[name]
    plain = make().double()
    layer = copy.deepcopy(plain)
    gain = parameter(*[0.5 + 0.1 * i for i in range(len(channels(plain)))])
    change = {
        "centred": lambda scale: centre_(layer, scale),
        "scaled": lambda scale: scale_weight_(layer, scale),
        "standardised": lambda scale: standardise_(layer, Standardisation(0.3, 0.2, 1e-4), gain, scale),
    }
    weight = layer.weight
    assert change[kind](parameter(0.7)) is layer
    assert layer.weight is weight
    with torch.no_grad():
        for row, g in zip(channels(plain), gain, strict=True):
            if kind != "scaled":
                row -= row.mean()
            if kind == "standardised":
                row *= 0.3 * 0.2 * g / (row.square().mean() + 1e-4).sqrt()
            row *= 0.7
        if kind == "standardised" and plain.bias is not None:
            plain.bias *= 0.2 * 0.7
    return layer, plain, torch.randn(shape, dtype=torch.float64, requires_grad=True)


def channels(layer: nn.Module) -> list[torch.Tensor]:
    """The weights of each output channel, as views."""
    weight = layer.weight.detach()
    if not getattr(layer, "transposed", False):
        return list(weight)
    return [part[:, j] for part in weight.chunk(layer.groups) for j in range(weight.shape[1])]


def call(layer: nn.Module, names: tuple[str, ...]):
    return lambda x, *values: functional_call(layer, dict(zip(names, values, strict=True)), (x,))


@every_case
def test_equals_the_plain_layer_with_the_made_weight(kind, name):
    layer, plain, x = build(kind, name)
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(layer.effective_weight(), plain.weight)


@every_case
def test_first_and_second_derivatives(kind, name):
    layer, _, x = build(kind, name)
    names, values = zip(*layer.named_parameters(), strict=True)
    assert torch.autograd.gradcheck(call(layer, names), (x, *values))
    assert torch.autograd.gradgradcheck(call(layer, names), (x, *values))


@every_case
def test_functorch_agrees_with_autograd(kind, name):
    layer, _, x = build(kind, name)
    p = {k: v.detach() for k, v in layer.named_parameters()}
    x = x.detach()
    loss = lambda p, x: functional_call(layer, p, (x,)).square().sum()  # noqa: E731
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    got = grad(loss)(p, x)
    torch.testing.assert_close(tuple(got.values()), expected)
    tangent = {k: torch.randn_like(v) for k, v in p.items()}
    _, directional = jvp(lambda p: loss(p, x), (p,), (tangent,))
    torch.testing.assert_close(directional, sum((got[k] * tangent[k]).sum() for k in p))
    forward, reverse = (j(lambda s: functional_call(layer, {**p, "residual_scale": s}, (x,))) for j in (jacfwd, jacrev))
    torch.testing.assert_close(forward(p["residual_scale"]), reverse(p["residual_scale"]))
    assert hessian(lambda s: loss({**p, "residual_scale": s}, x))(p["residual_scale"]).isfinite().all()


@every_kind
def test_per_sample_gradients_by_vmap(kind):
    layer, _, _ = build(kind, "conv2d")
    x = torch.randn(3, 2, 4, 5, 5, dtype=torch.float64)
    p = {k: v.detach() for k, v in layer.named_parameters()}
    loss = lambda p, x: functional_call(layer, p, (x,)).square().sum()  # noqa: E731
    each = vmap(grad(loss), (None, 0))(p, x)
    for i in range(3):
        torch.testing.assert_close(each["weight"][i], grad(loss)(p, x[i])["weight"])


@every_case
@pytest.mark.filterwarnings("ignore")
def test_compiles_whole_and_exports(kind, name):
    layer, plain, x = build(kind, name)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    got = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    torch.testing.assert_close(got, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x))
    exported = torch.export.export(layer, (x.detach(),)).module()
    torch.testing.assert_close(exported(x.detach()), plain(x.detach()))


@every_kind
@pytest.mark.parametrize("reentrant", [True, False])
def test_both_kinds_of_checkpointing(kind, reentrant):
    layer, _, x = build(kind, "conv2d")
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close([x.grad, *(p.grad for p in layer.parameters())], list(expected))


@every_kind
def test_dual_numbers_outside_functorch(kind):
    layer, plain, x = build(kind, "conv2d")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent
        wanted = torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent
    torch.testing.assert_close(tangent, wanted)


@every_case
def test_runs_on_meta_and_fake_tensors(kind, name):
    layer, _, x = build(kind, name)
    shape = layer(x).shape
    assert copy.deepcopy(layer).to("meta")(x.detach().to("meta")).shape == shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.empty(x.shape, dtype=x.dtype)).shape == shape


@every_case
def test_saves_what_a_plain_layer_saves_and_numbers_per_channel(kind, name):
    layer, plain, x = build(kind, name)
    most = {"scaled": 0, "centred": 1, "standardised": 6}[kind] * 8 * len(channels(layer))
    more = saved_bytes(layer, layer, x) - saved_bytes(plain, plain, x)
    assert 0 <= more <= most


@every_kind
@pytest.mark.filterwarnings("ignore")
def test_compiled_saves_no_made_weight(kind):
    layer, plain, x = build(kind, "linear")
    compiled = []
    for each in (layer, plain):
        torch._dynamo.reset()
        compiled.append(torch.compile(each, fullgraph=True, backend="aot_eager_decomp_partition"))
    saved = [saved_bytes(run, each, x) for run, each in zip(compiled, (layer, plain), strict=True)]
    assert saved[0] < saved[1] + layer.weight.nbytes


@every_kind
def test_frozen_weight_saves_no_input_and_gets_no_gradient(kind):
    layer, plain, x = build(kind, "conv2d")
    layer.requires_grad_(False)
    assert saved_bytes(layer, layer, x) < x.nbytes
    layer(x).sum().backward()
    assert all(p.grad is None for p in layer.parameters())
    torch.testing.assert_close(x.grad, torch.autograd.grad(plain(x).sum(), x)[0])
    layer.residual_scale.requires_grad_()
    layer(x).sum().backward()
    assert layer.residual_scale.grad is not None
    assert layer.weight.grad is None


@every_kind
def test_channels_last_in_channels_last_out(kind):
    layer, plain, x = build(kind, "conv2d")
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    layer, x = layer.to(memory_format=torch.channels_last), x.detach().to(memory_format=torch.channels_last)
    y = layer(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, plain(x))
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), list(layer.parameters())), expected)


@pytest.mark.parametrize("make", [weight_mean_class, standardised_class])
def test_autocast_runs_narrow_and_makes_the_weight_wide(make):
    layer = make(nn.Conv2d)(64, 8, 3)
    with torch.no_grad():
        layer.weight.add_(100.0)  # a mean that bf16 could not subtract
    x = torch.randn(2, 64, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        half = saved_bytes(layer, layer, x)
    assert y.dtype == torch.bfloat16
    assert half < x.nbytes
    expected = layer(x)
    torch.testing.assert_close(y.float(), expected, atol=0.02 * float(expected.detach().abs().max()), rtol=0.1)
    y.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.mean((1, 2, 3)).abs().max() < 1e-3 * layer.weight.grad.abs().max()
    with pytest.raises(RuntimeError, match="should be the same"):
        layer(x.double())


def test_half_precision_weights_are_centred_in_float():
    layer = WeightMeanLinear(4096, 4, bias=False)
    with torch.no_grad():
        layer.weight.normal_().add_(3.0)
    half = copy.deepcopy(layer).to(torch.bfloat16)
    x = torch.randn(8, 4096)
    torch.testing.assert_close(half(x.bfloat16()).float(), layer(x), atol=3.0, rtol=0.05)
    assert half.weight.dtype == torch.bfloat16


@every_case
def test_pickles_copies_and_stays_what_it_was(kind, name, tmp_path):
    layer, original, x = build(kind, name)
    added = ["gain"] * (kind == "standardised") + ["residual_scale"]
    assert isinstance(layer, type(original))
    assert list(layer.state_dict()) == [*original.state_dict(), *added]
    assert repr(layer).endswith(f"{ {'centred': 'weight_mean'}.get(kind, kind) }, {', '.join(added)})")
    twins = [copy.deepcopy(layer)]
    if name not in ("own forward", "foreign"):  # their classes are local to this file, which pickle cannot import
        torch.save(layer, tmp_path / "layer.pt")
        twins += [pickle.loads(pickle.dumps(layer)), torch.load(tmp_path / "layer.pt", weights_only=False)]
    for twin in twins:
        assert type(twin) is type(layer)
        torch.testing.assert_close(twin(x), layer(x))


def test_a_class_without_a_linear_map_is_refused():
    with pytest.raises(TypeError, match="ReLU"):
        weight_mean_class(nn.ReLU)


# -- scaled weights ----------------------------------------------------------------------------------------------


class Masked(nn.Conv2d):
    """Applies a weight computed from its own."""

    def forward(self, x):
        return F.conv2d(x, self.weight * 0.5, self.bias)


@pytest.mark.parametrize("make", [nn.Conv2d, SamePad])
def test_a_parametrized_weight_is_scaled_and_computed_once(make):
    plain = parametrizations.spectral_norm(make(3, 4, 2))
    layer = scale_weight_(copy.deepcopy(plain), nn.Parameter(torch.tensor([0.5])))
    x = torch.randn(2, 3, 5, 5)
    for _ in range(2):  # each access is one more step of the power iteration
        bias = plain.bias[:, None, None]
        torch.testing.assert_close(layer(x) - bias, 0.5 * (plain(x) - bias))


def test_a_weight_that_is_not_recognised_scales_the_output():
    plain = Masked(3, 4, 2)
    layer = scale_weight_(copy.deepcopy(plain), nn.Parameter(torch.tensor([0.5])))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(layer(x), 0.5 * plain(x))


class Mirrored(nn.Conv2d):
    """Applies its weight twice, once by way of a function."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias) + F.conv2d(x, self.weight.flip(3))


def test_the_output_of_a_foreign_forward_is_scaled_on_request():
    plain, x, scale = Mirrored(3, 4, 2), torch.randn(2, 3, 5, 5), nn.Parameter(torch.tensor([0.5]))
    layer = scale_weight_(copy.deepcopy(plain), scale, scales_output=True)
    torch.testing.assert_close(layer(x), 0.5 * plain(x))
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))
    torch.testing.assert_close(fixup_(copy.deepcopy(plain), None, scale, scales_output=True)(x), 0.5 * plain(x))


def test_the_bias_is_scaled_on_request():
    plain = nn.Linear(3, 4)
    layer = scale_weight_(copy.deepcopy(plain), nn.Parameter(torch.tensor([0.5])), scales_bias=True)
    x = torch.randn(2, 3)
    torch.testing.assert_close(layer(x), 0.5 * plain(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))


def test_a_layer_with_fixups_scalars():
    plain = nn.Conv2d(3, 4, 3, padding=1)
    layer = fixup_(copy.deepcopy(plain), nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor([2.0])))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(layer(x), 2 * plain(x + 0.5))
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))
    torch.testing.assert_close(fixup_(copy.deepcopy(plain), None)(x), plain(x))
    assert list(layer.state_dict()) == ["weight", "bias", "input_bias", "residual_scale"]


# -- standardised weights ----------------------------------------------------------------------------------------


def test_equals_timms_standardised_convolutions():
    layers = zoo.timm().layers
    stats = activation_stats("relu")
    x, gamma = torch.randn(2, 6, 9, 9), (stats.second_moment - stats.mean**2) ** -0.5
    assert gamma == pytest.approx((2 / (1 - 1 / torch.pi)) ** 0.5)
    for groups in (1, 2, 6):
        theirs = layers.StdConv2d(6, 12, 3, groups=groups, bias=True, eps=1e-6)
        scaled = layers.ScaledStdConv2d(6, 12, 3, groups=groups, gamma=gamma, eps=1e-6)
        for other, factor in ((theirs, 1.0), (scaled, gamma / (6 // groups * 9) ** 0.5)):
            ours = nn.Conv2d(6, 12, 3, padding=1, groups=groups)
            gain = None
            if factor != 1.0:
                with torch.no_grad():
                    other.gain.uniform_(0.5, 2.0)
                gain = nn.Parameter(other.gain.detach().flatten())
            ours.load_state_dict({k: v for k, v in other.state_dict().items() if k != "gain"})
            standardise_(ours, Standardisation(factor), gain)
            torch.testing.assert_close(ours(x), other(x), rtol=1e-5, atol=1e-5)
            for net in (ours, other):
                net(x).square().sum().backward()
            torch.testing.assert_close(ours.weight.grad, other.weight.grad, rtol=1e-4, atol=1e-3)
