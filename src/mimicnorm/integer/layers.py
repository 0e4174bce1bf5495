"""Layers and what lies between them, each with its backward pass: products, sums, concats, views, pooling, dropout."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mimicnorm.errors import IntegerError
from mimicnorm.integer import convolve
from mimicnorm.integer.convolve import Geometry
from mimicnorm.integer.counter import random_bits
from mimicnorm.integer.formats import Block, peak, shifted
from mimicnorm.integer.matmul import column_sums
from mimicnorm.integer.operation import Operation, Pass, Value
from mimicnorm.integer.parameters import Parameter


class Product(Operation):
    """A convolution or linear layer: int8 times int8, summed in int32."""

    makes = "product"

    def __init__(
        self,
        name: str,
        weight: Parameter,
        bias: Parameter | None,
        scale: Parameter | None,
        geometry: Geometry,
        reads_input: bool,
    ):
        super().__init__(name)
        self.weight, self.bias, self.scale, self.geometry = weight, bias, scale, geometry
        self.reads_input = reads_input  # then nobody asks for the input's error

    def prepare(self) -> None:
        """Make the int8 copy for a step, the residual scalar included, and forget gradients."""
        limit = 2**15 - 1  # a scalar of 8
        self.multiplier = None if self.scale is None else int(shifted(self.scale.master, 12).clamp(-limit, limit))
        codes, exponent = self.weight.codes(self.multiplier)
        self.codes, self.exponent = codes.flatten(1), exponent
        self.grad = torch.zeros(self.codes.shape, dtype=torch.int64)
        self.bias_grad = torch.zeros(len(codes), dtype=torch.int64)

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        ((x, unit),) = values[0]
        rank = self.weight.master.dim()
        if x.dim() != rank:
            kind = "a convolution of vectors" if rank == 4 else "a linear layer on images or sequences"
            raise IntegerError(f"{self.name}: {kind} has no integer form: input {tuple(x.shape)}, channels last")
        out = convolve.forward(_as_images(x), self.codes, self.geometry)
        unit += self.exponent
        if self.bias is not None:
            limit = 2**30
            wide = shifted(self.bias.master.long(), unit - self.bias.exponent).clamp_(-limit, limit)
            out += wide.to(torch.int32)
        return [Block(out if rank == 4 else out.flatten(1), unit)], values[0][0]

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        ((codes, unit),), (x, own) = error, saved
        codes, images = _as_images(codes.contiguous()), _as_images(x)
        self.grad += convolve.weight_gradient(images, codes, self.geometry)
        self.grad_exponent, self.error_exponent = unit + own, unit
        if self.bias is not None:
            self.bias_grad += column_sums(codes.view(-1, codes.shape[-1]))
        if self.reads_input:
            return [[]]
        back = convolve.input_gradient(codes, self.codes, self.geometry, (images.shape[1], images.shape[2]))
        return [[Block(back.view(x.shape), unit + self.exponent)]]

    def gradients(self) -> list[tuple[Parameter, Block]]:
        """Return the gradient of each parameter, summed over the samples since `prepare`."""
        grad, exponent = self.grad, self.grad_exponent
        pairs = []
        if self.scale is not None and self.multiplier is not None:  # the weight applied is scale * weight
            drop = max(0, peak(grad).bit_length() + 15 + grad.numel().bit_length() - 62)  # the sum fits 64 bits
            inner = (shifted(grad, drop) * self.weight.master.flatten(1)).sum().view(1)
            pairs.append((self.scale, Block(inner, exponent + drop + self.weight.exponent)))
            grad, exponent = grad * self.multiplier, exponent - 12
        pairs.append((self.weight, Block(grad.view(self.weight.master.shape), exponent)))
        if self.bias is not None:
            pairs.append((self.bias, Block(self.bias_grad, self.error_exponent)))
        return pairs


def _as_images(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.view(len(x), 1, 1, -1)


class Add(Operation):
    """A residual sum: blocks side by side, summed where they are requantised."""

    makes, reads_sums = "sum", True

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        blocks = [block for value in values for block in value]
        if len({b.data.shape for b in blocks}) > 1:
            shapes = ", ".join(str(tuple(b.data.shape)) for b in blocks)
            raise IntegerError(f"{self.name}: a sum of different shapes has no integer form: {shapes}, channels last")
        return blocks, len(values)

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        return [error] * saved


class Concat(Operation):
    """Channels side by side, counted in the coarsest unit."""

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        blocks = [value[0] for value in values]
        unit = max(block.exponent for block in blocks)
        codes = [shifted(b.data.to(torch.int16), min(unit - b.exponent, 10)).to(torch.int8) for b in blocks]
        return [Block(torch.cat(codes, -1), unit)], [c.shape[-1] for c in codes]

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        parts = [data.split(saved, -1) for data, _ in error]
        return [[Block(p[i], e.exponent) for p, e in zip(parts, error, strict=True)] for i in range(len(saved))]


class Flatten(Operation):
    """Vectors from images, in PyTorch's order of channels, rows, columns."""

    makes, reads_sums = "view", True

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        shape = values[0][0].data.shape
        if len(shape) == 2:
            return values[0], shape
        return [Block(x.permute(0, 3, 1, 2).reshape(len(x), -1), unit) for x, unit in values[0]], shape

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        if len(saved) == 2:
            return [error]
        _, h, w, c = saved
        return [[Block(e.view(len(e), c, h, w).permute(0, 2, 3, 1), unit) for e, unit in error]]


class MeanPool(Operation):
    """The mean over all positions: their sum times a reciprocal counted in 2^-23, which 127 of fit 30 bits."""

    makes = "product"
    MOST = 2**16  # positions; a reciprocal of 7 bits or more is within 0.4 %

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        ((x, unit),) = values[0]
        positions = x.shape[1] * x.shape[2]
        if positions > self.MOST:
            raise IntegerError(
                f"{self.name}: a mean over {positions} positions has no integer form, over 65,536 it has"
            )
        reciprocal = round(2**23 / positions)
        total = x.sum((1, 2), keepdim=True, dtype=torch.int32) * reciprocal
        return [Block(total, unit - 23)], (x.shape, reciprocal)

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        shape, reciprocal = saved
        return [[Block((e.to(torch.int32) * reciprocal).expand(shape), unit - 23) for e, unit in error]]


class MaxPool(Operation):
    """The largest of each window; its error goes back to the first position that had it."""

    def __init__(self, name: str, geometry: Geometry, ceil: bool):
        super().__init__(name)
        self.geometry, self.ceil = geometry, ceil

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        ((x, unit),), g = values[0], self.geometry
        images = x.permute(0, 3, 1, 2).to(torch.int32)  # torch 2.13 pools at most 127 int8 numbers
        largest = F.max_pool2d(images, g.kernel, g.stride, g.padding, ceil_mode=self.ceil)
        largest = largest.permute(0, 2, 3, 1).to(torch.int8, memory_format=torch.contiguous_format)
        return [Block(largest, unit)], (x, largest)

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        (x, largest), g = saved, self.geometry
        (kh, kw), (sh, sw), (ph, pw), (h, w) = g.kernel, g.stride, g.padding, x.shape[1:3]
        rows, columns = largest.shape[1:3]
        below, right = (max((rows - 1) * sh + kh - ph - h, 0), max((columns - 1) * sw + kw - pw - w, 0))
        padded = F.pad(x, (0, 0, pw, right, ph, below), value=-128)  # below every code
        overlap = -(-kh // sh) * -(-kw // sw)  # windows that share a position
        blocks = []
        for data, unit in error:
            data = data.clamp(-(2**29) // overlap, 2**29 // overlap) if data.dtype == torch.int32 else data
            out, left = torch.zeros(padded.shape, dtype=torch.int32), torch.ones_like(largest)
            for i, j in itertools.product(range(kh), range(kw)):
                window = slice(None), slice(i, i + rows * sh, sh), slice(j, j + columns * sw, sw)
                first = left * (padded[window][:, :rows, :columns] == largest).view(torch.int8)
                out[window][:, :rows, :columns] += data * first
                left -= first
            blocks.append(Block(out[:, ph : ph + h, pw : pw + w], unit))
        return [blocks]


class Dropout(Operation):
    """Drop codes at random; the rest count double, or four times: an exponent of one or two more."""

    def __init__(self, name: str, more: int):
        super().__init__(name)
        self.more = more

    def forward(self, at: Pass, *values: Value) -> tuple[Value, Any]:
        ((x, unit),) = values[0]
        if not at.training:
            return values[0], None
        bits = random_bits(at.key(self.place), at.first * x[0].numel(), x.numel(), self.more).view(x.shape)
        mask = (bits == 0).view(torch.int8)
        return [Block(x * mask, unit + self.more)], mask

    def backward(self, at: Pass, saved: Any, error: Value) -> list[Value]:
        return [[Block(e * saved, unit + self.more) for e, unit in error]]
