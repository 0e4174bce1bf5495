from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from mimicnorm.layers import (
    LastNorm,
    WeightMeanConv2d,
    WeightMeanLinear,
    centre_,
    fixup_,
    last_norm_,
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
