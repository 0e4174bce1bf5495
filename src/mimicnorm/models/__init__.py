"""The paper's networks, one definition each, always with BatchNorm: a method is applied by ``convert_``."""

from mimicnorm.models.catalogue import build, names
from mimicnorm.models.lookup import find

__all__ = ["build", "find", "names"]
