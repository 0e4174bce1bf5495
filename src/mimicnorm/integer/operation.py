"""What every operation of a network has: a forward and a backward pass on blocks of integers.

A value is a list of blocks that are to be summed: one block of int8 codes after `Requantise`, pooling and views; int32
blocks after products and sums. Samples come first, channels last. An error is a list of blocks, too, and reaches a
product as one block of codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mimicnorm.integer.formats import Block

Value = list[Block]


@dataclass
class Pass:
    """One way through the network with some samples of a batch.

    Attributes:
        first: The index of the first sample in its batch.
        key: Gives the key of random bits for a place.
        training: Whether there is dropout, and exponents are watched.
        calibrating: Whether exponents are taken from this very pass, for want of an earlier one.
        stochastic: Whether errors are rounded at random, or to nearest.
        compiled: Whether codes are made by a compiled kernel; they are the same.
    """

    first: int
    key: Callable[[str], int]
    training: bool = True
    calibrating: bool = False
    stochastic: bool = True
    compiled: bool = False


class Operation:
    """What the network does at one place.

    Attributes:
        makes: "codes", a "product" (one block of int32), a "sum" (several blocks), or a "view" of what it reads.
        reads_sums: Whether it reads products and sums; what others read is made codes first.
        name: The qualified name of the module, or of the one whose forward it is in.
        inputs: The numbers of the operations it reads; -1 is the network's input.
        place: Its own number: a module may be called twice.
    """

    makes = "codes"
    reads_sums = False
    inputs: tuple[int, ...] = ()
    place = ""

    def __init__(self, name: str):
        self.name = name

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        """Return the output, and what the backward pass needs."""
        raise NotImplementedError

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        """Return the error of each input."""
        raise NotImplementedError
