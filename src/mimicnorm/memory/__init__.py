"""Know what training a network costs in memory before running it, without a GPU and without data."""

from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.step import measure
from mimicnorm.memory.tracker import Moment
from mimicnorm.memory.units import format_bytes, parse_bytes

__all__ = ["Analysis", "Moment", "format_bytes", "measure", "parse_bytes"]
