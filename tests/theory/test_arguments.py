"""Tensors and callables that a caller passes: the error is one line that says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mimicnorm import theory
from mimicnorm.theory import TheoryError, Transition, condition_number, dual, gain, kernels
from mimicnorm.theory.arguments import reals, running

X = torch.eye(4, 5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("a", "x must be a tensor of numbers, not 'a'"),
        (kernels(X, 2, Transition()), "not Kernels"),
        (X + 1j, "x is a complex tensor"),
        (X.to_sparse(), "x is a sparse tensor"),
        (X.to("meta"), "x is a meta tensor"),
        (X[:0], r"at least one number, not shape \(0, 5\)"),
        (X[0], r"2 dimension\(s\)"),
        (X * torch.inf, "non-finite entries in x"),
    ],
)
def test_what_is_not_a_matrix_of_numbers_is_refused(value, says):
    with pytest.raises(TheoryError, match=says):
        reals("x", value, 2)


def test_errors_of_a_callers_function_become_one_line():
    with pytest.raises(TheoryError) as caught, running("the model", X, "text"):
        raise RuntimeError("sizes differ.\nand a trace")
    assert str(caught.value) == "the model does not run on its input (torch.float64 (4, 5), str): sizes differ."
    with pytest.raises(TheoryError, match="as it is"), running("the model"):
        raise TheoryError("as it is")


def test_what_can_be_read_as_numbers_is():
    ints, t = torch.tensor([[1, 2], [3, 4]]), Transition()
    assert torch.equal(kernels(ints, 3, t).ntk, kernels(ints.double(), 3, t).ntk)
    assert float(dual("relu", 0.1)) == float(dual("relu", torch.tensor(0.1, dtype=torch.float64)))
    assert condition_number([[2, 1], [1, 2]]) == pytest.approx(3.0)
    assert gain("relu", fan_in=np.int64(16)) == gain("relu", fan_in=16)
    assert Transition(sigma_w2=torch.tensor(2.0)) == Transition(sigma_w2=2.0)


def test_dir_shows_public_names_only():
    assert {"kernels", "propagate", "figures"} <= set(dir(theory))
    assert not {"annotations", "quadrature", "arguments", "interpolant"} & set(dir(theory))
    assert all(hasattr(theory, name) for name in dir(theory))
