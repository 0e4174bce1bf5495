"""The paper's theory in float64; imports nothing of the package."""

from __future__ import annotations

from .activations import Activation, ActivationStats, activation_stats, find_kinks, gain, resolve
from .errors import TheoryError

__all__ = [
    "Activation",
    "ActivationStats",
    "TheoryError",
    "activation_stats",
    "find_kinks",
    "gain",
    "resolve",
]
