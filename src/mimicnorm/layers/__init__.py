"""The paper's operations and nothing else: weight mean, residual scalar, shift, last BN."""

from mimicnorm.layers.affine import Remains, Scale, ScaledOutput, Shift, scale_output_
from mimicnorm.layers.centring import autocast_dtype, centre, fan_in
from mimicnorm.layers.last_norm import LastNorm, LastNormed, last_norm_
from mimicnorm.layers.reweight import LINEAR_CALLS, WEIGHT_LAYERS, Reweighted, has_own_forward, plain_kind
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
    "LastNorm",
    "LastNormed",
    "Remains",
    "Reweighted",
    "Scale",
    "ScaledOutput",
    "Shift",
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
    "has_own_forward",
    "last_norm_",
    "plain_kind",
    "scale_output_",
    "weight_mean_class",
]
