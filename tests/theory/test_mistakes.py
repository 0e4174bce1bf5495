"""What a caller may get wrong: one message per mistake, which says what is wrong and what to pass."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mimicnorm.theory import (
    FiniteNetwork,
    TheoryError,
    Transition,
    activation_stats,
    condition_number,
    dual,
    dual_slope,
    empirical_ntk,
    gain,
    kernels,
    last_norm_floor,
    layerwise,
    montecarlo,
    propagate,
    residual_kernels,
)

LINEAR, ONES = nn.Linear(3, 2), torch.ones(2, 3)
X, T = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), Transition("weight_mean")


class Pair(nn.Linear):
    def forward(self, input):
        return super().forward(input), input


class Total(nn.Linear):
    def forward(self, input):
        return super().forward(input).sum()


class Text(nn.Module):
    def forward(self, x):
        return "text"


class Reentrant(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        # activations
        (lambda: gain("rellu"), "did you mean 'relu'"),
        (lambda: gain("qqq"), "known: celu"),
        (lambda: gain("relu", "fan_avg"), "'weight_mean'"),
        (lambda: gain("relu", fan_in=1), "mode='plain'"),
        (lambda: gain("relu", slope=1.0), "no parameter 'slope'"),
        (lambda: gain("leaky_relu", negative_slope=math.nan), "leaky_relu(negative_slope)=nan: use a finite number"),
        (lambda: gain("celu", alpha=0.0), "must not be 0"),
        (lambda: gain(math.tanh), "activation 'tanh' does not run"),
        (lambda: gain(nn.Softmax(-1)), "depends on other numbers"),
        (lambda: gain(lambda x: torch.exp(x**2)), "grows too fast"),
        (lambda: gain(torch.relu, kinks=3.0), "kinks must have 1 dimension"),
        (lambda: gain(lambda x: (x - 0.3).clamp(min=0)), "pass resolve(function, kinks=[...])"),
        (lambda: gain(lambda x: torch.tanh(x.float())), "computes in float32"),
        (lambda: gain(3), "must be a name"),
        (lambda: gain(torch.tanh, alpha=1.0), "named activation"),
        (lambda: gain(lambda x: x.sum()), "not element-wise"),
        (lambda: gain(lambda x: x * 0 + 2), "constant"),
        (lambda: gain(lambda x: 1 / (x * 0)), "not finite"),
        (lambda: gain(lambda x: 1 / x), "do not settle"),
        (lambda: activation_stats(lambda x: x.abs().sqrt()), "do not settle"),
        # dual
        (lambda: dual("relu", 1.5), "1.5 is outside [-1, 1]"),
        (lambda: dual("relu", "a"), "a correlation must be a tensor of numbers"),
        (lambda: dual("relu", 0.1, 0.0), "q1=0.0: use a finite number above 0"),
        (lambda: dual_slope(torch.sign, 0.1), "has a step"),
        # transition
        (lambda: Transition("layer_norm"), "'weight_mean'"),
        (lambda: Transition(sigma_w2="steady"), "'stable'"),
        (lambda: Transition(sigma_w2=-1.0), "above 0"),
        (lambda: Transition(sigma_b2=-0.1), "sigma_b2=-0.1: use a finite number of at least 0"),
        (lambda: Transition(sigma_b2=1.0), "below 1"),
        (lambda: Transition().variance_map(-1.0), "q=-1.0"),
        (lambda: Transition().iterate(0.1, 0), "depth=0"),
        (lambda: Transition(activation="identity").fixed_points, "linear"),
        (lambda: Transition("straight", "softplus", 8.0)(0.1), "without bound"),
        (lambda: Transition("weight_mean", torch.sign).chi1, "has a step"),
        # kernels
        (lambda: kernels(X, 2.0, T), "depth=2.0: use a whole number of at least 1"),
        (lambda: kernels(X[0], 2, T), "x must be a tensor of samples"),
        (lambda: kernels([[1.0]], 2, T), "not list"),
        (lambda: kernels(X, 2, T, X * math.nan), "non-finite entries in the input x2"),
        (lambda: kernels(1e200 * X, 2, T), "non-finite entries in the input kernel"),
        (lambda: kernels(X * torch.tensor([1, 0, 1, 1, 1, 1.0])[:, None], 2, T), "sample 1 of x"),
        (lambda: kernels(X, 2, T, X[:, :3]), "5 features and x2 has 3"),
        (lambda: kernels(X, 2, T, first_w2=-1.0), "first_w2=-1.0: use a finite number above 0"),
        (lambda: kernels(X, 3000, Transition(sigma_w2=1.0)), "dies out: below 1e-150 at layer"),
        (lambda: kernels(X, 2000, Transition(sigma_w2=9.0)), "explodes: above 1e150 at layer"),
        (lambda: kernels(X, 1900, T), "tangent kernel became non-finite at layer 18"),
        (lambda: kernels(X, 100, Transition("straight", "hardtanh", 1.3)), "2079 pairs, over all layers"),
        (lambda: kernels(X, 2, Transition(activation=torch.sign)), "has a step"),
        (lambda: layerwise(X, 0, T), "at least 1"),  # at once, not at the first next()
        (lambda: residual_kernels(X, 0, T), "blocks=0"),
        (lambda: residual_kernels(X, 2, T, scale="cube"), "'sqrt'"),
        (lambda: residual_kernels(X, 2, T, scale=[1.0]), "1 scales were given for 2"),
        # spectrum
        (lambda: condition_number(torch.ones(2, 3)), "square"),
        (lambda: condition_number(torch.tensor([[1.0, 0.5], [0.1, 1.0]])), "not symmetric"),
        (lambda: condition_number(torch.ones(1, 1), centered=True), "two points"),
        # networks
        (lambda: FiniteNetwork(3, 1, 3, Transition("weight_mean")), "width of a weight_mean network"),
        (lambda: FiniteNetwork(3, 8, 2, Transition())(torch.ones(2, 5)), "3 features each"),
        # empirical
        (lambda: empirical_ntk(nn.Sequential(LINEAR, nn.BatchNorm1d(2)), ONES), "1 is a BatchNorm in train mode"),
        (lambda: empirical_ntk(nn.Flatten(), ONES), "no trainable parameter"),
        (lambda: empirical_ntk(LINEAR, ONES, mode="rows"), "'per_sample' or 'batch'"),
        (lambda: empirical_ntk(LINEAR, ONES, outputs="sum"), "'mean'"),
        (lambda: empirical_ntk(LINEAR, ONES[:0]), "at least one sample"),
        (lambda: empirical_ntk(LINEAR, ONES * float("nan")), "not finite"),
        (lambda: empirical_ntk(LINEAR, ONES[:, :2]), "the model does not run on its input (torch.float32 (2, 2))"),
        (lambda: empirical_ntk(LINEAR, ONES.long()), "got Long and Float"),
        (lambda: empirical_ntk(Pair(3, 1), ONES), "returns tuple"),
        (lambda: empirical_ntk(Total(3, 1), ONES), "one number for the whole batch"),
        (lambda: empirical_ntk(torch.relu, ONES), "must be an nn.Module"),
        # montecarlo
        (lambda: montecarlo.dual_activation(count=1), "count=1: use a whole number of at least 2"),
        (lambda: montecarlo.lemma1(seed="a"), "seed='a'"),
        (lambda: montecarlo.lemma1(1), "n=1: use a whole number of at least 2"),
        (lambda: montecarlo.theorem1(points=1), "points=1"),
        (lambda: montecarlo.theorem3(rho=1.5), "outside [-1, 1]"),
        (lambda: montecarlo.gradient_growth(depth=2), "at least 3"),
        (lambda: montecarlo.correlation_band(0), "width=0"),
        # confidence
        (lambda: last_norm_floor([1.0]), "frequencies=[1.0]: give a positive number"),
        (lambda: last_norm_floor([1.0, 0.0]), "frequencies=[1.0, 0.0]"),
        (lambda: last_norm_floor([]), "frequencies must have 1 dimension(s) and at least one number"),
        (lambda: last_norm_floor([1, 1], 0.0), "scale=0.0: use a finite number above 0"),
        # doctor
        (lambda: propagate(torch.relu, ONES), "must be an nn.Module"),
        (lambda: propagate(nn.LazyLinear(3), ONES), "lazy layers"),
        (lambda: propagate(LINEAR, ONES[:0]), "empty"),
        (lambda: propagate(LINEAR, ONES * math.nan), "the batch has non-finite"),
        (lambda: propagate(LINEAR, ONES.double()), "got Double and Float"),
        (lambda: propagate(LINEAR, ONES, loss="a"), "returns a scalar tensor, not 'a'"),
        (lambda: propagate(LINEAR, ONES, loss=lambda out: out), "returns a scalar tensor"),
        (lambda: propagate(LINEAR, ONES, loss=lambda out: out["logits"]), "the loss does not run"),
        (lambda: propagate(Text(), ONES), "pass loss="),
        (lambda: propagate(Reentrant(LINEAR, nn.ReLU()), ONES), "use_reentrant=False"),
    ],
)
def test_a_mistake_is_named(call, says):
    with pytest.raises(TheoryError) as caught:
        call()
    assert says in str(caught.value)
    assert not LINEAR._forward_hooks
