"""The paper's theory in float64: gains, kernels, phases, and the signal in real networks."""

from __future__ import annotations

from mimicnorm.errors import TheoryError

from . import doctor, figures, montecarlo
from .activations import Activation, ActivationStats, activation_stats, gain, resolve
from .confidence import last_norm_floor
from .doctor import LayerSignal, Signal, propagate
from .dual import dual, dual_slope
from .empirical import empirical_ntk
from .kernels import Kernels, kernels, layerwise, residual_kernels
from .montecarlo import Estimate
from .networks import FiniteNetwork
from .spectrum import condition_number
from .transition import DepthScales, FixedPoint, Transition

__all__ = [
    "Activation",
    "ActivationStats",
    "DepthScales",
    "Estimate",
    "FiniteNetwork",
    "FixedPoint",
    "Kernels",
    "LayerSignal",
    "Signal",
    "TheoryError",
    "Transition",
    "activation_stats",
    "condition_number",
    "doctor",
    "dual",
    "dual_slope",
    "empirical_ntk",
    "figures",
    "gain",
    "kernels",
    "last_norm_floor",
    "layerwise",
    "montecarlo",
    "propagate",
    "residual_kernels",
    "resolve",
]


def __dir__() -> list[str]:
    return sorted(__all__)
