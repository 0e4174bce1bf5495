from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from mimicnorm.theory import TheoryError, activation_stats, gain, resolve
from mimicnorm.theory.activations import names

S = 1 - 1 / math.pi


def test_relu_has_the_papers_numbers():
    stats = activation_stats("relu")
    assert stats.mean == pytest.approx(1 / math.sqrt(2 * math.pi), rel=1e-14)
    assert stats.variance == pytest.approx(S / 2, rel=1e-14)
    assert stats.chi1 == pytest.approx(1 / S, rel=1e-14)
    assert stats.tbar_slope_at_zero == pytest.approx(1 / (2 * S), rel=1e-14)
    assert stats.variance_slope == pytest.approx(1, rel=1e-13)
    assert gain("relu", fan_in=300) ** 2 == pytest.approx(2 * 300 / (299 * S), rel=1e-14)
    assert gain("relu", "plain") ** 2 == pytest.approx(2, rel=1e-14)
    assert gain("relu", "straight") == gain("relu", "plain")


# published to five digits; computed here, not pasted into the source
TABLE = {
    "relu6": (1.71286, 1.46694, 0.7335, 1.00),
    "leaky_relu": (1.70483, 1.45337, 0.7412, 1.00),
    "gelu": (1.70093, 1.31884, 0.7233, 1.06),
    "silu": (1.78719, 1.21208, 0.7985, 1.10),
    "hardswish": (1.81387, 1.17962, 0.8225, 1.16),
    "mish": (1.59203, 1.21426, 0.8055, 1.00),
    "elu": (1.27084, 1.07901, 0.9367, 0.86),
    "tanh": (1.59254, 1.17781, 0.9305, 0.46),
}


@pytest.mark.parametrize("name", TABLE)
def test_table_of_gains(name):
    stats = activation_stats(name)
    expected = TABLE[name]
    assert gain(name) == pytest.approx(expected[0], abs=6e-6)
    assert stats.chi1 == pytest.approx(expected[1], abs=6e-6)
    assert stats.tbar_slope_at_zero == pytest.approx(expected[2], abs=6e-5)
    assert stats.variance_slope == pytest.approx(expected[3], abs=6e-3)


PLAIN = [
    nn.ReLU,
    nn.ReLU6,
    nn.GELU,
    nn.SELU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.SiLU,
    nn.Mish,
    nn.Softsign,
    nn.LogSigmoid,
]
SLOPED = [nn.LeakyReLU(0.2), nn.ELU(0.5), nn.CELU(0.5), nn.Softplus(2.0), nn.PReLU(init=0.1), nn.Hardtanh(-1, 2)]
MODULES = [*(kind() for kind in PLAIN), *SLOPED, nn.GELU(approximate="tanh"), nn.Tanhshrink()]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: repr(m).replace(" ", ""))
def test_torch_modules_resolve_to_the_same_function(module):
    x = torch.linspace(-8, 8, 333, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(resolve(module)(x), module.double()(x), atol=1e-7, rtol=1e-7)
    if not isinstance(module, nn.PReLU):
        bare = activation_stats(lambda t: module(t), kinks=resolve(module).kinks)
        assert activation_stats(module).chi1 == pytest.approx(bare.chi1, rel=1e-6)


@pytest.mark.parametrize("name", names())
def test_moments_agree_with_sampling(name):
    phi = resolve(name)
    z = torch.randn(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stats, y = activation_stats(name), phi(z)
    assert abs(float(y.mean()) - stats.mean) < 5 * stats.sd / math.sqrt(len(z))
    assert float(y.var()) == pytest.approx(stats.variance, rel=0.03)
    # Hermite: chi1 - 1 = sum (k - 1) a_k^2 / sum a_k^2 over k >= 1, positive unless affine
    assert stats.chi1 > 1 > stats.tbar_slope_at_zero or name == "identity"


def test_a_subclass_of_a_torch_module_keeps_its_own_forward():
    class Twice(nn.ReLU):
        def forward(self, input):
            return 2 * super().forward(input)

    assert activation_stats(Twice()).mean == pytest.approx(2 * activation_stats("relu").mean, rel=1e-13)


def test_gain_works_where_converters_call_it():
    expected = gain("gelu")
    with torch.device("meta"), torch.inference_mode():
        assert gain(lambda x: nn.functional.gelu(x)) == pytest.approx(expected, rel=1e-12)
    with torch.no_grad():
        assert gain(nn.GELU()) == expected


def test_a_callable_is_exact_with_its_kinks():
    # E[max(z - c, 0)] = density(c) - c P(z > c)
    c = 0.3
    mean = math.exp(-(c**2) / 2) / math.sqrt(2 * math.pi) - c * math.erfc(c / math.sqrt(2)) / 2
    assert activation_stats(lambda x: (x - c).clamp(min=0), kinks=[c]).mean == pytest.approx(mean, rel=1e-14)


def test_equal_functions_are_equal_activations():
    assert resolve("prelu", negative_slope=0.1) == resolve("prelu", negative_slope=0.1)
    assert resolve("prelu", negative_slope=0.1) != resolve("prelu", negative_slope=0.2)
    assert resolve(torch.sin) == resolve(torch.sin) != resolve(torch.cos)
    assert resolve(torch.sin) != resolve(torch.sin, kinks=[1.0])


def test_a_prelu_with_a_slope_per_channel_averages_moments_not_slopes():
    module = nn.PReLU(3)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([-1.0, 0.3, 1.0]))
    stats = activation_stats(module)
    each = [activation_stats("prelu", negative_slope=a) for a in module.weight.tolist()]  # as rounded to float32
    mean, second = (sum(getattr(s, name) for s in each) / 3 for name in ("mean", "second_moment"))
    assert [stats.mean, stats.second_moment] == pytest.approx([mean, second], rel=1e-12)
    assert stats.variance == pytest.approx(second - mean**2, rel=1e-12)
    for name in ("chi1", "tbar_slope_at_zero"):
        shared = sum(getattr(s, name) * s.variance for s in each) / 3
        assert getattr(stats, name) * stats.variance == pytest.approx(shared, rel=1e-12)
    # the layer after it, by sampling
    z = torch.randn(3, 400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.where(z > 0, z, module.weight.detach().double()[:, None] * z)
    assert gain(module, "plain") == pytest.approx(float(y.square().mean()) ** -0.5, rel=5e-3)
    assert gain(module) == pytest.approx(float(y.var()) ** -0.5, rel=5e-3)


def test_a_prelu_with_several_slopes_is_refused_where_one_function_is_needed():
    module = nn.PReLU(2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([0.1, 0.4]))
    with pytest.raises(TheoryError, match=r"2 different slopes.*pass one slope"):
        resolve(module)
    assert resolve(nn.PReLU(4)).parameters == (("negative_slope", 0.25),)
