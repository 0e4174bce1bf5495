from __future__ import annotations

import pytest
import torch
from torch import nn

from mimicnorm.layers import Standardisation, fan_in
from mimicnorm.layers.linear import Convolution, Matrix


@pytest.mark.parametrize("cls", [Convolution, Matrix, Standardisation])
def test_hashes_by_identity(cls):
    """Dynamo of torch 2.6 and 2.8 hashes an instance before its fields exist."""
    assert isinstance(hash(cls.__new__(cls)), int)
    assert cls.__eq__ is object.__eq__


def test_fan_in_counts_what_reaches_one_output():
    assert fan_in(torch.empty(64, 16, 3, 3), 4, False, (1, 1)) == 144
    assert fan_in(torch.empty(8, 4, 4, 4), 2, True, (2, 2)) == 4 * 4
    assert fan_in(torch.empty(8, 4, 3, 3), 1, True, (2, 2)) == 8 * 4
    x, layer = torch.ones(1, 8, 9, 9), nn.ConvTranspose2d(8, 1, 3, stride=2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        assert layer(x).max() == 8 * 4
