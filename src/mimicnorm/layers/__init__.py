"""The operations of the methods: weight mean, scalars, shifts, last BN; standardisation, GroupNorm, Fixup's scalars."""

from mimicnorm.layers.affine import Remains, Scale, ScaledOutput, Shift, scale_output_
from mimicnorm.layers.centring import autocast_dtype, centre, fan_in
from mimicnorm.layers.derive import Derived
from mimicnorm.layers.fixup import FixupLayer, FixupScalars, fixup_
from mimicnorm.layers.group_norm import GroupNorm, group_count
from mimicnorm.layers.last_norm import LastNorm, LastNormed, last_norm_
from mimicnorm.layers.reweight import LINEAR_CALLS, WEIGHT_LAYERS, Reweighted, has_own_forward, plain_kind
from mimicnorm.layers.standardise import Standardisation, Standardised, standardise_, standardised_class
from mimicnorm.layers.weight_mean import (
    WeightMean,
    WeightMeanConv1d,
    WeightMeanConv2d,
    WeightMeanConv3d,
    WeightMeanConvTranspose1d,
    WeightMeanConvTranspose2d,
    WeightMeanConvTranspose3d,
    WeightMeanLinear,
    centre_,
    weight_mean_class,
)

__all__ = [
    "LINEAR_CALLS",
    "WEIGHT_LAYERS",
    "Derived",
    "FixupLayer",
    "FixupScalars",
    "GroupNorm",
    "LastNorm",
    "LastNormed",
    "Remains",
    "Reweighted",
    "Scale",
    "ScaledOutput",
    "Shift",
    "Standardisation",
    "Standardised",
    "WeightMean",
    "WeightMeanConv1d",
    "WeightMeanConv2d",
    "WeightMeanConv3d",
    "WeightMeanConvTranspose1d",
    "WeightMeanConvTranspose2d",
    "WeightMeanConvTranspose3d",
    "WeightMeanLinear",
    "autocast_dtype",
    "centre",
    "centre_",
    "fan_in",
    "fixup_",
    "group_count",
    "has_own_forward",
    "last_norm_",
    "plain_kind",
    "scale_output_",
    "standardise_",
    "standardised_class",
    "weight_mean_class",
]
