"""What a caller can get wrong ends in one sentence of the package's own error, through every public function."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from mimicnorm.theory import (
    FiniteNetwork,
    Gram,
    TheoryError,
    Transition,
    activation_stats,
    condition_number,
    dual,
    empirical_ntk,
    gain,
    kernels,
    learning_curve,
    montecarlo,
    propagate,
    residual_kernels,
)

T, X, EYE, ONES = Transition(), torch.eye(4, 5, dtype=torch.float64), torch.eye(4), torch.ones(4)
NAN = torch.full((4, 5), math.nan)
LINEAR = nn.Linear(5, 2)

WRONG = {
    "a correlation must be a tensor of numbers": lambda: dual("relu", "a"),
    "non-finite entries in a correlation": lambda: dual("relu", math.nan),
    "a correlation is a complex": lambda: dual("relu", torch.tensor(1j)),
    "a correlation must have at least one": lambda: dual("silu", torch.empty(0)),
    "a variance q must be a tensor": lambda: dual("relu", 0.1, "x"),
    "do not fit together": lambda: dual("silu", torch.zeros(3), torch.ones(2)),
    "'negative_slope' of 'leaky_relu' must be a finite": lambda: dual("leaky_relu", 0.1, negative_slope="x"),
    "must not be 0": lambda: activation_stats("celu", alpha=0.0),
    "activation 'tanh' does not run": lambda: activation_stats(math.tanh),
    "depends on others": lambda: activation_stats(nn.Softmax(-1)),
    "grows too fast": lambda: activation_stats(lambda x: torch.exp(x**2), kinks=()),
    "kinks must be a tensor": lambda: activation_stats(torch.relu, kinks="a"),
    "kinks must have 1 dimension": lambda: activation_stats(torch.relu, kinks=3.0),
    "fan_in must be an integer of at least 1, not True": lambda: gain("relu", fan_in=True),
    "unknown kind \\['x'\\]": lambda: Transition(["x"]),
    "sigma_w2, if not 'stable', must be a finite number above 0, not True": lambda: Transition(sigma_w2=True),
    "must be a finite number above 0, not tensor": lambda: Transition(sigma_w2=torch.ones(2)),
    "sigma_b2, a variance, must be a finite number of at least 0, not None": lambda: Transition(sigma_b2=None),
    "fan_in must be an integer of at least 2": lambda: Transition(fan_in=2.5),
    "a variance q must be a finite number": lambda: T.variance_map("a"),
    "not '3'": lambda: T.iterate(0.5, "3"),
    "not ndarray": lambda: kernels(np.ones((2, 3)), 2, T),
    "x must be a tensor of samples": lambda: kernels(X[0], 2, T),
    "x is a complex": lambda: kernels(X + 1j, 2, T),
    "x is a sparse": lambda: kernels(X.to_sparse(), 2, T),
    "x is a meta": lambda: kernels(X.to("meta"), 2, T),
    "in the input x2": lambda: kernels(X, 2, T, NAN),
    "depth counts weight layers: it must be an integer of at least 1, not 2.0": lambda: kernels(X, 2.0, T),
    "not True": lambda: kernels(X, True, T),
    "first_w2 must be a finite number above 0": lambda: kernels(X, 2, T, first_w2="a"),
    "first_b2 must be a finite number of at least 0": lambda: kernels(X, 2, T, first_b2=math.inf),
    "in the input kernel": lambda: kernels(1e200 * X, 2, T),
    "kernel must be a tensor of numbers, not 'a'": lambda: kernels(Gram("a"), 2, T),
    "kernel must have 2 dim": lambda: kernels(Gram(torch.empty(0, 0)), 2, T),
    "rows of a Gram must have 1": lambda: kernels(Gram(EYE, EYE, EYE), 2, T),
    "branch scalars must be": lambda: residual_kernels(X, 2, T, scale=["a", "b"]),
    "the kernel must be a tensor of numbers, not Kernels": lambda: condition_number(kernels(X, 2, T)),
    "the kernel is a complex": lambda: condition_number(EYE + 0j),
    "the targets must be": lambda: learning_curve(EYE, "a", ONES),
    "1 targets": lambda: learning_curve(EYE, 1.0, ONES),
    "in times": lambda: learning_curve(EYE, ONES, [math.inf]),
    "ntk_test must be a tensor": lambda: learning_curve(EYE, ONES, ONES, ntk_test="a"),
    "in start": lambda: learning_curve(EYE, ONES, ONES, start=NAN[:, 0]),
    "memory_bytes must be": lambda: empirical_ntk(LINEAR, X.float(), memory_bytes=0),
    "the model does not run on what it is given \\(torch.float32 \\(3, 4\\)\\)": lambda: empirical_ntk(
        LINEAR, torch.ones(3, 4)
    ),
    "got Long and Float": lambda: empirical_ntk(LINEAR, torch.ones(3, 5, dtype=torch.long)),
    "output is not finite": lambda: empirical_ntk(LINEAR, X.float(), NAN),
    "one number for the whole batch": lambda: empirical_ntk(nn.Sequential(LINEAR, nn.Flatten(0), Total()), X.float()),
    "the batch has non-finite": lambda: propagate(LINEAR, NAN),
    "got Double and Float": lambda: propagate(LINEAR, X),
    "given \\(str\\)": lambda: propagate(LINEAR, "a"),
    "pairs must be an integer": lambda: propagate(LINEAR, X.float(), pairs=0),
    "loss must map": lambda: propagate(LINEAR, X.float(), loss="a"),
    "width of a straight network": lambda: FiniteNetwork(3, "a", 2, T),
    "3 features each": lambda: FiniteNetwork(3, 4, 2, T)(X),
    "seed must be": lambda: montecarlo.lemma1(seed="a"),
}


class Total(nn.Module):
    def forward(self, x):
        return x.sum()


@pytest.mark.parametrize("says", WRONG)
def test_one_sentence_says_what_is_wrong(says):
    with pytest.raises(TheoryError, match=says) as caught:
        WRONG[says]()
    assert "\n" not in str(caught.value)


def test_what_can_be_read_as_numbers_is():
    ints = torch.tensor([[1, 2], [3, 4]])
    assert torch.equal(kernels(ints, 3, T).ntk, kernels(ints.double(), 3, T).ntk)
    assert float(dual("relu", 0.1)) == float(dual("relu", torch.tensor(0.1, dtype=torch.float64)))
    assert condition_number([[2, 1], [1, 2]]) == pytest.approx(3.0)
    assert gain("relu", fan_in=np.int64(16)) == gain("relu", fan_in=16)
    assert Transition(sigma_w2=torch.tensor(2.0)) == Transition(sigma_w2=2.0)
    curve = learning_curve([[1.0]], [1.0], [0.0], ntk_test=[[0.5]], start=[0.0])
    assert curve.test.shape == (1, 1, 1)
