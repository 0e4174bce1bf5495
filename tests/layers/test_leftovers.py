from __future__ import annotations

import torch
from torch import nn
from torch.nn import Parameter

from mimicnorm.layers import FixupScalars, GroupNorm, Remains, Scale, Shift, group_count


def test_shift_is_a_fresh_tensor_even_without_beta():
    x = torch.randn(2, 3, 4)
    for shift in (Shift(None), Shift(Parameter(torch.zeros(3)))):
        y = shift(x)
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


def test_shift_saves_nothing_for_the_backward_pass():
    saved = []
    shift = Shift(Parameter(torch.zeros(3)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        shift(torch.randn(2, 3, 4, 4, requires_grad=True))
    assert not saved


def test_scale_multiplies_and_adds_per_channel():
    scale = Scale(torch.tensor(0.5), Parameter(torch.tensor([1.0, 2.0])))
    x = torch.ones(1, 2, 2)
    assert torch.equal(scale(x), torch.tensor([[[1.5, 1.5], [2.5, 2.5]]]))
    assert scale.residual_scale.shape == (1,)


def test_fixups_scalars_make_a_fresh_tensor_of_the_same_type():
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    bias = FixupScalars(Parameter(torch.zeros(1)))
    assert bias(x).data_ptr() != x.data_ptr()
    assert bias(x).dtype == x.dtype
    both = FixupScalars(Parameter(torch.ones(1)), Parameter(torch.full((1,), 3.0)))
    torch.testing.assert_close(both(x.float()), 3 * x.float() + 1)


def test_groups_divide_and_hold_enough_values():
    for channels in (1, 2, 3, 8, 24, 48, 64, 100, 2048):
        for positions in (1, 4, 49):
            groups = group_count(channels, positions, 32)
            assert channels % groups == 0
            assert groups <= 32
            assert channels // groups * positions >= min(16, channels * positions)
    assert group_count(64, 196, 32) == 32
    assert group_count(100, 196, 32) == 25


def test_group_norm_equals_pytorchs_along_any_dimension():
    gamma, beta = Parameter(torch.randn(8)), Parameter(torch.randn(8))
    x = torch.randn(2, 8, 5, 5)
    first, last = GroupNorm(4, 8, gamma, beta), GroupNorm(4, 8, gamma, beta, channel_dim=-1)
    expected = nn.functional.group_norm(x, 4, gamma, beta)
    torch.testing.assert_close(first(x), expected)
    torch.testing.assert_close(last(x.movedim(1, -1)).movedim(-1, 1), expected)
    torch.testing.assert_close(last(x[..., 0, 0]), nn.functional.group_norm(x[..., 0, 0], 4, gamma, beta))
    assert first.weight is gamma
    assert not list(GroupNorm(4, 8, None, None).parameters())


def test_remains_runs_children_in_order_under_their_names():
    rest = Remains(Shift(None), {"drop": nn.Dropout(0.0), "act": nn.PReLU(4)})
    assert list(rest.state_dict()) == ["act.weight"]
    assert torch.equal(rest(-torch.ones(1, 4, 2)), torch.full((1, 4, 2), -0.25))
