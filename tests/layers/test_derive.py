from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from mimicnorm.layers import (
    LastNorm,
    WeightMeanConv2d,
    WeightMeanLinear,
    centre_,
    fixup_,
    last_norm_,
    scale_output_,
    scale_weight_,
)

REGISTRY: list[str] = []


class Keyed(nn.Conv2d):
    def __init_subclass__(cls, *, key: str):
        cls.key = key
        REGISTRY.append(cls.__name__)


class Stem(Keyed, key="stem"):
    pass


@pytest.mark.parametrize("derive", [centre_, lambda m: fixup_(m, None), lambda m: scale_weight_(m, None)])
def test_a_hook_for_subclasses_is_not_run(derive):
    """It may demand keywords, or register the class."""
    layer = derive(Stem(3, 4, 1))
    assert isinstance(layer, Stem)
    assert layer.key == "stem"
    assert REGISTRY == ["Stem"]


def test_a_users_subclass_of_a_derived_class():
    class Counted:
        def __init_subclass__(cls, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.counted = True

    class Centred(WeightMeanConv2d, Counted):
        pass

    assert Centred.counted
    assert type(copy.deepcopy(Centred(3, 4, 1))) is Centred


def test_a_layer_that_was_derived_twice_is_pickled():
    head = last_norm_(centre_(nn.Linear(3, 4)), LastNorm(4))
    twin = pickle.loads(pickle.dumps(head))
    assert type(twin) is type(head)
    assert isinstance(twin, WeightMeanLinear)
    x = torch.randn(5, 3)
    torch.testing.assert_close(twin(x), head(x))


def test_a_layer_between_fixups_scalars():
    plain = nn.Conv2d(3, 4, 3, padding=1)
    layer = fixup_(copy.deepcopy(plain), Parameter(torch.tensor([0.5])), Parameter(torch.tensor([2.0])))
    x = torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(layer(x), 2 * plain(x + 0.5))
    assert isinstance(layer, nn.Conv2d)
    torch.testing.assert_close(pickle.loads(pickle.dumps(layer))(x), layer(x))
    assert list(layer.state_dict()) == ["weight", "bias", "input_bias", "residual_scale"]


def test_a_scaled_output():
    plain = nn.Conv2d(2, 2, 1)
    layer = copy.deepcopy(plain)
    assert scale_output_(layer, nn.Parameter(torch.tensor([0.5]))) is layer
    x = torch.randn(1, 2, 3, 3)
    torch.testing.assert_close(layer(x), 0.5 * plain(x))
    assert isinstance(copy.deepcopy(layer), nn.Conv2d)
