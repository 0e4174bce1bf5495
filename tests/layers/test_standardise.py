"""Standardised layers: timm's numbers, derivatives, everything PyTorch can take, a plain layer's memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from torch.func import functional_call, jacrev, vmap

from mimicnorm.layers import Standardisation, Standardised, standardise_, standardised_class
from mimicnorm.theory.activations import activation_stats


class SamePad(nn.Conv2d):
    """A convolution with a forward of its own, as timm's Conv2dSame."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


CASES = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 7)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, stride=2), (2, 4, 5, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (2, 4, 3, 3)),
    "linear": (lambda: nn.Linear(5, 3), (2, 4, 5)),
    "own forward": (lambda: SamePad(4, 6, 2), (2, 4, 5, 5)),
}


def build(name: str, whole: bool = True) -> tuple[Standardised, torch.Tensor]:
    make, shape = CASES[name]
    layer = make().double()
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    gain = nn.Parameter(torch.rand(outputs, dtype=torch.float64) + 0.5) if whole else None
    scale = nn.Parameter(torch.tensor([0.7], dtype=torch.float64)) if whole else None
    standardise_(layer, Standardisation(0.3, 0.2, 1e-4), gain, scale)
    return layer, torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", CASES)
def test_each_output_channel_has_mean_zero_and_the_variance_asked_for(name):
    layer, x = build(name, whole=False)
    weight = layer.effective_weight() / (0.3 * 0.2)
    rows = weight.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1) if name == "transposed" else weight
    own = layer.weight.unflatten(0, (2, -1)).transpose(1, 2).flatten(0, 1) if name == "transposed" else layer.weight
    variance = own.flatten(1).var(1, correction=0)
    torch.testing.assert_close(rows.flatten(1).mean(1), torch.zeros(len(rows), dtype=torch.float64))
    torch.testing.assert_close(rows.flatten(1).var(1, correction=0), variance / (variance + 1e-4))
    plain = CASES[name][0]().double()
    with torch.no_grad():
        plain.weight.copy_(layer.effective_weight())
        if layer.bias is not None:
            plain.bias.copy_(layer.bias)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name):
    layer, x = build(name)
    params = dict(layer.named_parameters())

    def run(x, *values):
        return functional_call(layer, dict(zip(params, values, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *params.values()))
    assert torch.autograd.gradgradcheck(run, (x, *params.values()))


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


@pytest.mark.parametrize("name", CASES)
def test_saves_its_input_and_its_parameters_alone(name):
    layer, x = build(name)
    own = {t.untyped_storage()._cdata for t in (x, *layer.parameters())}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    big = [t for t in saved if t.untyped_storage()._cdata not in own and t.numel() > 16]
    padded = name == "own forward"  # its padding makes a new input
    assert len(big) <= padded, [t.shape for t in big]


def test_compiles_exports_and_maps():
    layer, x = build("conv2d")
    expected = layer(x)
    torch.testing.assert_close(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
    torch.testing.assert_close(torch.export.export(layer, (x.detach(),)).module()(x), expected)
    params = {k: v.detach() for k, v in layer.named_parameters()}
    each = vmap(lambda p, x: functional_call(layer, p, x), (None, 0))(params, x.detach())
    torch.testing.assert_close(each, expected.detach())
    jacobian = jacrev(lambda p: functional_call(layer, p, x.detach()).sum())(params)
    layer(x.detach()).sum().backward()
    torch.testing.assert_close(jacobian["weight"], layer.weight.grad)


def test_autocast_runs_narrow_and_standardises_wide():
    layer = standardised_class(nn.Linear)(64, 8)
    x = torch.randn(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(y.float(), layer(x), rtol=0.05, atol=0.2)
    with pytest.raises(RuntimeError, match="should be the same"):
        layer(x.double())


def test_frozen_weights_get_no_gradient():
    layer, x = build("conv2d")
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.gain.grad is not None
    assert layer.residual_scale.grad is not None
    assert x.grad is not None


@pytest.mark.parametrize("name", [n for n in CASES if n != "own forward"])
def test_pickles_and_copies(name):
    layer, x = build(name)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(twin) is type(layer)
        torch.testing.assert_close(twin(x), layer(x))
    assert "standardised, gain, residual_scale" in repr(layer)
