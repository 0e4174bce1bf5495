"""Know what training a network costs in memory before running it, without a GPU and without data."""

from mimicnorm.memory.analysis import Analysis
from mimicnorm.memory.budget import largest_batch
from mimicnorm.memory.comparison import Comparison, compare
from mimicnorm.memory.figure import plot
from mimicnorm.memory.step import measure
from mimicnorm.memory.tracker import Moment
from mimicnorm.memory.units import format_bytes, parse_bytes

__all__ = [
    "Analysis",
    "Comparison",
    "Moment",
    "compare",
    "format_bytes",
    "largest_batch",
    "measure",
    "parse_bytes",
    "plot",
]
