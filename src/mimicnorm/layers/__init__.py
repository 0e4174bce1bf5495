"""The operations of the methods: a layer's weight made anew, what stands in a BatchNorm's place, the last BN."""

from mimicnorm.layers.derive import Derived
from mimicnorm.layers.last_norm import LastNorm, LastNormed, last_norm_
from mimicnorm.layers.leftovers import FixupScalars, GroupNorm, Remains, Scale, Shift, group_count, laid_out
from mimicnorm.layers.linear import LINEAR_CALLS, WEIGHT_LAYERS, Convolution, fan_in, has_own_forward, plain_kind
from mimicnorm.layers.reweight import (
    FixupLayer,
    Reweighted,
    ScaledWeight,
    Standardisation,
    Standardised,
    fixup_,
    scale_weight_,
    standardise_,
    standardised_class,
)
from mimicnorm.layers.trained import OriginalKeys, TrainedAffine, TrainedLayer, TrainedNorm, keep_, recoverable
from mimicnorm.layers.weight import autocast_dtype, centre
from mimicnorm.layers.weight_mean import (
    OFF_CENTRE,
    WeightMean,
    WeightMeanConv1d,
    WeightMeanConv2d,
    WeightMeanConv3d,
    WeightMeanConvTranspose1d,
    WeightMeanConvTranspose2d,
    WeightMeanConvTranspose3d,
    WeightMeanLinear,
    centre_,
    project_,
    weight_mean_class,
)
