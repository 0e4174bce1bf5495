"""How many inputs reach an output of a layer: on small maps fewer than its kernel has taps.

The theory draws weights for the fan-in that ``layers.fan_in`` counts. A 5x5 kernel on a 2x2 map has 25 taps, and 21 of
them fall on padding; of a transposed convolution whose stride exceeds its kernel, some outputs get no input at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from mimicnorm.layers import Convolution, fan_in
from mimicnorm.surgery.graph import Node
from mimicnorm.surgery.ops import Kind


@dataclass(frozen=True)
class Taps:
    """The taps of one call of a layer, per output.

    Attributes:
        kernel: All that there are: what centring takes the mean over.
        counted: What the initial weights are drawn for.
        acting: Those that meet an input, averaged over the positions of the output.
        geometry: In words, such as "5x5 on 2x2".
    """

    kernel: int
    counted: int
    acting: float
    geometry: str = ""

    def variance(self, mean: float, second_moment: float, centred: bool) -> float:
        """The variance that the acting taps make where the counted ones would make 1.

        What centring takes out of all taps it leaves in those that act: their weights do not add up to zero.

        Args:
            mean: Of the inputs.
            second_moment: Of the inputs.
            centred: Whether the weights are centred.
        """
        share = self.acting / self.counted
        if not centred:
            return share
        return share * (1 + mean**2 / (second_moment - mean**2) * (1 - self.acting / self.kernel))


def taps(call: Node, module: nn.Module) -> Taps:
    """Count the taps of a layer's call, exactly, from its geometry and the shapes that were recorded."""
    weight: torch.Tensor = module.weight  # pyrefly: ignore
    transposed, groups = bool(getattr(module, "transposed", False)), getattr(module, "groups", 1)
    counted = fan_in(weight, groups, transposed, getattr(module, "stride", ()))
    channels = weight.shape[0] // groups if transposed else weight.shape[1]
    kernel = tuple(weight.shape[2:])
    every = channels * math.prod(kernel)
    if not kernel or "op" not in call.settings:
        return Taps(every, counted, every)
    data, outputs = _data(call.inputs[0], len(kernel)), call.shape[-len(kernel) :]
    op: Convolution = call.settings["op"]
    acting = float(channels)
    for d, (k, out) in enumerate(zip(kernel, outputs, strict=True)):
        stride, padding, dilation = op.stride[d], op.padding[d], op.dilation[d]
        steps, positions = (data[d], (0, out)) if transposed else ((0, out), data[d])
        acting *= sum(_meeting(steps, positions, stride, dilation * tap - padding) for tap in range(k)) / out
    sizes = ("x".join(map(str, sides)) for sides in (kernel, (high - low for low, high in data)))
    return Taps(every, counted, acting, " on ".join(sizes))


def _meeting(steps: tuple[int, int], positions: tuple[int, int], stride: int, offset: int) -> int:
    """How many i in the range of steps have i * stride + offset in the range of positions."""
    first, last = (-(-(edge - offset) // stride) for edge in positions)
    return max(0, min(last, steps[1]) - max(first, steps[0]))


def _data(node: Node, dims: int) -> list[tuple[int, int]]:
    """Where data lies along each of the last dimensions of a tensor: not where zeros were put around it before."""
    whole = [(0, size) for size in node.shape[-dims:]]
    if node.kind is not Kind.PAD:
        return whole
    given = dict(node.settings)
    sides, mode, *_ = (*given.get("positional", ()), *[None] * 2)
    sides, mode = given.get("pad", sides), given.get("mode", mode)
    if not isinstance(sides, (list, tuple)) or mode in ("reflect", "replicate", "circular"):
        return whole
    pairs = [*zip(sides[::2], sides[1::2], strict=True), *[(0, 0)] * dims][:dims]  # the last dimension comes first
    bounds = zip(whole, reversed(pairs), strict=True)
    return [(max(0, before), size - max(0, after)) for (_, size), (before, after) in bounds]
