"""The paper's theory in float64; imports nothing of the package."""

from __future__ import annotations

from mimicnorm.errors import TheoryError

from .activations import Activation, ActivationStats, activation_stats, find_kinks, gain, resolve
from .doctor import LayerSignal, Signal, propagate
from .dual import dual, dual_slope
from .empirical import empirical_ntk
from .kernels import Gram, Kernels, kernels, layerwise, residual_kernels
from .montecarlo import Estimate
from .networks import FiniteNetwork
from .spectrum import LearningCurve, condition_number, learning_curve
from .transition import DepthScales, FixedPoint, Transition

__all__ = [
    "Activation",
    "ActivationStats",
    "DepthScales",
    "Estimate",
    "FiniteNetwork",
    "FixedPoint",
    "Gram",
    "Kernels",
    "LayerSignal",
    "LearningCurve",
    "Signal",
    "TheoryError",
    "Transition",
    "activation_stats",
    "condition_number",
    "dual",
    "dual_slope",
    "empirical_ntk",
    "find_kinks",
    "gain",
    "kernels",
    "layerwise",
    "learning_curve",
    "propagate",
    "residual_kernels",
    "resolve",
]
