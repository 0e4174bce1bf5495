"""A network of integer operations: forward and backward through all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mimicnorm.errors import IntegerError
from mimicnorm.integer.exponents import Watch
from mimicnorm.integer.formats import Block
from mimicnorm.integer.head import Head
from mimicnorm.integer.layers import Product
from mimicnorm.integer.operation import Operation, Pass, Value
from mimicnorm.integer.parameters import Parameter
from mimicnorm.integer.requantise import Requantise


@dataclass
class Network:
    """Operations in the order of execution, and the head."""

    operations: list[Operation]
    head: Head
    parameters: list[Parameter]

    @property
    def products(self) -> list[Product]:
        """The layers with weights."""
        return [o for o in self.operations if isinstance(o, Product)]

    @property
    def requantised(self) -> list[Requantise]:
        """Where int8 codes are made."""
        return [o for o in self.operations if isinstance(o, Requantise)]

    @property
    def watches(self) -> list[Watch]:
        """The exponents that follow from step to step."""
        return [watch for operation in self.requantised for watch in (operation.output, operation.error)]

    def forward(self, at: Pass, codes: Block, save: bool = True) -> tuple[Block, list[Any]]:
        """Return the logits, one block, and what `backward` needs; without ``save``, values are freed on the way."""
        values: dict[int, Value] = {-1: [codes]}
        saved: list[Any] = []
        last_reader = {i: number for number, operation in enumerate(self.operations) for i in operation.inputs}
        for number, operation in enumerate(self.operations):
            with _named(operation):
                value, for_backward = operation.forward(at, *(values[i] for i in operation.inputs))
            values[number] = value
            saved.append(for_backward if save else None)
            for i in operation.inputs:
                if last_reader[i] == number:
                    values.pop(i, None)
        (logits,) = values[len(self.operations) - 1]
        return logits, saved

    def backward(self, at: Pass, saved: list[Any], error: Block) -> None:
        """Add the gradients of these samples to those of the layers; what was saved is freed on the way."""
        errors: dict[int, Value] = defaultdict(list, {len(self.operations) - 1: [error]})
        for number in reversed(range(len(self.operations))):
            operation = self.operations[number]
            with _named(operation):
                given = operation.backward(at, saved.pop(), errors.pop(number))
            for i, terms in zip(operation.inputs, given, strict=True):
                errors[i] += terms


@contextmanager
def _named(operation: Operation) -> Iterator[None]:
    """Give every error the name of the layer it is from: shapes are known only once there is a batch."""
    try:
        yield
    except IntegerError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = type(operation).__name__
        raise IntegerError(f"{operation.name}: {kind} in integers failed: {lines[0]}") from error
