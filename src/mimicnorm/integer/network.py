"""A network of integer operations: forward and backward through all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
class Node:
    """An operation and the numbers of the nodes it reads; -1 is the network's input."""

    operation: Operation
    inputs: tuple[int, ...]


@dataclass
class Network:
    """Operations in the order of execution, and the head."""

    nodes: list[Node]
    head: Head
    parameters: list[Parameter] = field(default_factory=list)

    @property
    def products(self) -> list[Product]:
        """The layers with weights."""
        return [n.operation for n in self.nodes if isinstance(n.operation, Product)]

    @property
    def requantised(self) -> list[Requantise]:
        """Where int8 codes are made."""
        return [n.operation for n in self.nodes if isinstance(n.operation, Requantise)]

    @property
    def watches(self) -> list[Watch]:
        """The exponents that follow from step to step."""
        return [watch for operation in self.requantised for watch in (operation.output, operation.error)]

    def forward(self, at: Pass, codes: Block, save: bool = True) -> tuple[Block, list[Any]]:
        """Return the logits, one block, and what `backward` needs; without ``save``, values are freed on the way."""
        values: list[Value | None] = []
        saved: list[Any] = []
        last = {i: number for number, node in enumerate(self.nodes) for i in node.inputs}
        for number, node in enumerate(self.nodes):
            inputs = [[codes] if i < 0 else values[i] for i in node.inputs]
            with _named(node):
                value, for_backward = node.operation.forward(at, *inputs)  # pyrefly: ignore
            values.append(value)
            saved.append(for_backward if save else None)
            for i in node.inputs:
                if i >= 0 and last[i] == number:
                    values[i] = None
        (logits,) = values[-1] or []
        return logits, saved

    def backward(self, at: Pass, saved: list[Any], error: Block) -> None:
        """Add the gradients of these samples to those of the layers."""
        errors: list[Value] = [[] for _ in self.nodes]
        errors[-1] = [error]
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            with _named(node):
                given = node.operation.backward(at, saved[number], errors[number])
            errors[number], saved[number] = [], None
            for i, terms in zip(node.inputs, given, strict=True):
                if i >= 0:
                    errors[i] += terms


@contextmanager
def _named(node: Node) -> Iterator[None]:
    """Give every error the name of the layer it is from: shapes are known only once there is a batch."""
    try:
        yield
    except IntegerError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        kind = type(node.operation).__name__
        raise IntegerError(f"{node.operation.name}: {kind} in integers failed: {lines[0]}") from error
