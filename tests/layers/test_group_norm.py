from __future__ import annotations

import torch
from torch import nn

from mimicnorm.layers import GroupNorm, group_count


def test_groups_divide_and_hold_enough_values():
    for channels in (1, 2, 3, 8, 24, 48, 64, 100, 2048):
        for positions in (1, 4, 49):
            groups = group_count(channels, positions, 32)
            assert channels % groups == 0
            assert groups <= 32
            assert channels // groups * positions >= min(16, channels * positions)
    assert group_count(64, 196, 32) == 32
    assert group_count(100, 196, 32) == 25


def test_equals_pytorchs_with_the_parameters_it_is_given_along_any_dimension():
    gamma, beta = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))
    x = torch.randn(2, 8, 5, 5)
    first, last = GroupNorm(4, 8, gamma, beta), GroupNorm(4, 8, gamma, beta, channel_dim=-1)
    expected = nn.functional.group_norm(x, 4, gamma, beta)
    torch.testing.assert_close(first(x), expected)
    torch.testing.assert_close(last(x.movedim(1, -1)).movedim(-1, 1), expected)
    torch.testing.assert_close(last(x[..., 0, 0]), nn.functional.group_norm(x[..., 0, 0], 4, gamma, beta))
    assert first.weight is gamma
    assert not list(GroupNorm(4, 8, None, None).parameters())
