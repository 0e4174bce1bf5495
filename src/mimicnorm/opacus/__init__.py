"""Differentially private training with Opacus."""

from mimicnorm.opacus.samplers import prepare_

__all__ = ["prepare_"]
