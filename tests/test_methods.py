from __future__ import annotations

import dataclasses

import pytest

from mimicnorm.errors import MimicNormError, NameNotFoundError
from mimicnorm.methods import METHODS, Fixup, GroupNormWS, MimicNorm, ScaledWS, SkipInit, method


def test_methods_by_name_and_frozen():
    assert method("MimicNorm") == MimicNorm()
    assert method("weight_mean").name == "weight-mean"
    with pytest.raises(dataclasses.FrozenInstanceError):
        MimicNorm().residual = None
    assert set(METHODS) == {
        *("mimicnorm", "weight-mean", "last-bn", "nonorm", "batchnorm"),
        *("fixup", "skipinit", "groupnorm-ws", "scaled-ws"),
    }
    assert all(type(method(m.__name__)) is m for m in METHODS.values())


def test_wrong_names_and_fields_say_what_to_use():
    with pytest.raises(NameNotFoundError, match="mimicnorm"):
        method("mimik")
    with pytest.raises(MimicNormError, match='"sqrt"'):
        MimicNorm(residual="cube")
    with pytest.raises(MimicNormError, match="min_fan_in=0"):
        MimicNorm(min_fan_in=0)
    for wrong in (lambda: SkipInit(alpha=float("nan")), lambda: ScaledWS(alpha=0), lambda: ScaledWS(skip_gain="no")):
        with pytest.raises(MimicNormError, match="use a "):
            wrong()
    with pytest.raises(MimicNormError, match="groups=0"):
        GroupNormWS(groups=0)


def test_branch_scale():
    assert MimicNorm().branch_scale(4.0) == 0.5
    assert MimicNorm(residual="linear").branch_scale(4.0) == 0.25
    assert MimicNorm(residual=None).branch_scale(4.0) is None
    assert (Fixup().branch_scale(4.0), SkipInit(alpha=0.5).branch_scale(4.0)) == (1.0, 0.5)
    assert GroupNormWS().branch_scale(4.0) is None
