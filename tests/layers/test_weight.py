from __future__ import annotations

import pytest
import torch

from mimicnorm.layers import centre


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_centring_leaves_each_output_channel_with_mean_zero(dtype):
    weight = torch.randn(4, 6, 3, dtype=dtype) + 5
    assert centre(weight).dtype == dtype
    for row, before in zip(centre(weight).float(), weight.float(), strict=True):
        torch.testing.assert_close(row, before - before.mean(), atol=0.02, rtol=0.01)
    halves = centre(weight, groups=2, transposed=True).float().chunk(2)
    for half, before in zip(halves, weight.float().chunk(2), strict=True):
        torch.testing.assert_close(half, before - before.mean((0, 2), keepdim=True), atol=0.02, rtol=0.01)
