"""The data-flow graph of one forward pass, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mimicnorm.surgery.ops import Kind


@dataclass(eq=False)
class Node:
    """One tensor of the forward pass, and the operation that made it.

    Attributes:
        index: Position in execution order; an input comes before what reads it.
        op: Canonical function name, e.g. "conv2d", "add", "relu".
        inputs: The data-dependent operands, in argument order; constants and weights are left out.
        settings: Plain settings of an activation (slope, approximation), an addition or padding; of a layer, its linear
            map as ``op``, None for a convolution with ``padding="same"``.
        constants: What an activation, or an operation with a constant, was given beside data: numbers, names of the
            parameters and buffers that tensors are or are views of, None for any other tensor.
        arguments: What the function was given beside data, in words: numbers, slices, names of parameters.
        layer: Qualified name of the weight layer, if this is its output.
        inside_module: Whether that layer's own forward made the call (not ``F.conv2d(x, layer.weight)``).
        derived_weight: Whether the weight was computed from the layer's parameters first.
        norm: Qualified name of the BatchNorm, if this is its output.
        made_by: Modules that returned this very tensor, the innermost first.
        is_output: Whether the model returns it, which counts as a reader.
        in_place: Whether it was written into the memory of its operand.
        tapped: Whether somebody may look at it after the pass: a hook, or an attribute that keeps it.
        ancestors: Bit set over node indices, this one included.
    """

    index: int
    op: str
    kind: Kind
    inputs: tuple[Node, ...]
    shape: torch.Size
    dtype: torch.dtype
    where: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    constants: tuple[float | str | None, ...] = ()
    arguments: tuple[str, ...] = ()
    layer: str | None = None
    inside_module: bool = True
    derived_weight: bool = False
    norm: str | None = None
    made_by: list[str] = field(default_factory=list)
    is_output: bool = False
    in_place: bool = False
    tapped: bool = False
    users: list[Node] = field(default_factory=list)
    ancestors: int = 0

    def __repr__(self) -> str:
        name = self.layer or self.norm or ""
        return f"<{self.index} {self.op} {name} {tuple(self.shape)} <- {[i.index for i in self.inputs]}>"


@dataclass
class Graph:
    """What happened in one forward pass.

    Attributes:
        nodes: In execution order.
        outputs: The model's tensor outputs, depth first through tuples and dicts.
        constants: How many tensors it returned that do not depend on its input, such as a penalty on weights.
        functional_norms: Modules that called ``F.batch_norm`` on data without being a BatchNorm.
        used_elsewhere: Layers whose weight also meets data outside their own forward.
        norm_inputs: What each BatchNorm module was called with, by name; its shape is the module's own view.
        fake: Whether it was recorded on fake tensors; on real ones, values may have steered the model.
        training: Whether in training mode.
        other_mode: The recording in the other mode, if there was one.
    """

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    constants: int = 0
    functional_norms: list[str] = field(default_factory=list)
    used_elsewhere: set[str] = field(default_factory=set)
    norm_inputs: dict[str, torch.Size] = field(default_factory=dict)
    fake: bool = True
    training: bool = True
    other_mode: Graph | None = None

    def calls(self, name: str) -> list[Node]:
        """The outputs of a weight layer or BatchNorm, one per use."""
        return [n for n in self.nodes if name in (n.layer, n.norm)]

    def norms(self) -> set[str]:
        """The BatchNorms that ran."""
        return {n.norm for n in self.nodes if n.norm is not None}
