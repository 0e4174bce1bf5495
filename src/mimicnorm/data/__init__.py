"""Data sets by name, in memory or from folders, with augmentation that depends on (seed, epoch, sample) alone."""

from mimicnorm.data.catalogue import load, names
from mimicnorm.data.folder import Folder
from mimicnorm.data.memory import Memory
from mimicnorm.data.source import Source

__all__ = ["Folder", "Memory", "Source", "load", "names"]
