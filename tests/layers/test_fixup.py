from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.nn import Parameter

from mimicnorm.layers import FixupScalars, fixup_


def test_a_layer_between_its_scalars():
    plain = nn.Conv2d(3, 4, 3, padding=1)
    layer = fixup_(copy.deepcopy(plain), Parameter(torch.tensor([0.5])), Parameter(torch.tensor([2.0])))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(layer(x), 2 * plain(x + 0.5))
    assert isinstance(layer, nn.Conv2d)
    twin = pickle.loads(pickle.dumps(layer))
    torch.testing.assert_close(twin(x), layer(x))
    assert list(layer.state_dict()) == ["weight", "bias", "input_bias", "residual_scale"]


def test_scalars_in_the_place_of_a_norm_make_a_fresh_tensor_of_the_same_type():
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    bias = FixupScalars(Parameter(torch.zeros(1)))
    assert bias(x).data_ptr() != x.data_ptr()
    assert bias(x).dtype == x.dtype
    both = FixupScalars(Parameter(torch.ones(1)), Parameter(torch.full((1,), 3.0)))
    torch.testing.assert_close(both(x.float()), 3 * x.float() + 1)
