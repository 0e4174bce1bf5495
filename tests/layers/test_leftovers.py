from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter

from mimicnorm.layers import FixupScalars, GroupNorm, Remains, Scale, Shift, group_count, laid_out


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


FORMATS = {
    "contiguous": torch.randn(2, 3, 4, 5),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "channels last in 3-d": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
    "half the channels": torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last)[:, :3],
    "transposed vectors": torch.randn(3, 2).t(),
    "tokens": torch.randn(2, 4, 3).transpose(1, 2),
    "columns": torch.randn(2, 4, 5, 3).permute(0, 3, 2, 1),
    "columns in 3-d": torch.randn(2, 4, 5, 6, 3).permute(0, 4, 3, 2, 1),
    "expanded": torch.randn(1, 3, 4, 5).expand(2, 3, 4, 5),
}
IN_PLACE_OF_A_NORM = {
    "no beta": Shift(None),
    "shift": Shift(Parameter(torch.ones(3))),
    "scale": Scale(torch.tensor(0.5)),
    "scale and shift": Scale(torch.tensor(0.5), Parameter(torch.ones(3))),
    "fixup": FixupScalars(Parameter(torch.ones(1)), Parameter(torch.ones(1))),
    "group": GroupNorm(1, 3, None, None),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", IN_PLACE_OF_A_NORM)
def test_memory_format_is_that_of_a_batch_norm(kind, form):
    x, module = FORMATS[form], IN_PLACE_OF_A_NORM[kind]
    expected = F.batch_norm(x, None, None, training=True)
    y = module(x)
    assert y.stride() == expected.stride()
    if kind != "group":
        torch.testing.assert_close(torch.vmap(module)(torch.stack((x, x)))[1], y)


def test_nothing_is_copied_where_the_format_is_right():
    for x in (FORMATS["contiguous"], FORMATS["channels last"], FORMATS["channels last in 3-d"]):
        assert laid_out(x) is x


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
