"""Trained values: an integer master, its momentum, and one update in integers.

A weight's master is int16 with an exponent of its own, which follows its largest value; the network applies an int8
copy. Biases and scalars are int32, counted in 2^-24.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mimicnorm.integer.counter import stochastic_shift
from mimicnorm.integer.formats import CODE, Block, chunks, divided, fitting, peak, rate, shifted

SCALARS = -24
"""The exponent of biases and scalars."""
_VELOCITY = 28  # bits


class Parameter:
    """A trained value.

    Args:
        name: As in the model's state dict.
        values: What it starts from, in floating point; rows are outputs.
        bits: Of the master: 16, or fewer; 32 for biases and scalars.
        centred: Whether each row's mean is taken out, at the start and after each update.
        decayed: Whether weight decay applies.
        speed: Multiplies its learning rate.
    """

    def __init__(
        self,
        name: str,
        values: Tensor,
        *,
        bits: int = 32,
        centred: bool = False,
        decayed: bool = True,
        speed: float = 1,
    ):
        self.name, self.bits, self.centred, self.decayed, self.speed = name, bits, centred, decayed, speed
        largest = float(values.abs().max())
        self.exponent = SCALARS if bits == 32 else math.frexp(largest)[1] - 14
        self._drop = 0 if bits == 32 else 16 - bits
        master = (values.double() * 2.0**-self.exponent).round().long()
        self._set(self._without_means(shifted(master, self._drop) << self._drop))
        self.velocity, self.velocity_exponent = torch.zeros_like(self.master, dtype=torch.int32), 0

    def _set(self, wide: Tensor) -> None:
        """Store new values, which are centred, with the exponent that suits them."""
        if self.bits != 32:
            largest = peak(wide)
            if largest and not 2**12 <= largest <= 2**15 - 2**10:
                by = fitting(largest, 0, 14)
                wide = shifted(wide, by + self._drop) << self._drop if by > 0 else wide << -by
                wide = self._without_means(wide)  # rounding has moved them
                self.exponent += by
        limit = 2**31 - 1 if self.bits == 32 else 2**15 - 1
        self.master = wide.clamp(-limit, limit).to(torch.int32 if self.bits == 32 else torch.int16)

    def _without_means(self, wide: Tensor) -> Tensor:
        """Take the mean out of each row, as an integer: at most half a unit of it stays."""
        if not self.centred:
            return wide
        rows = wide.flatten(1)
        mean = divided(rows.sum(1), rows.shape[1] << self._drop) << self._drop
        return wide - mean.view(-1, *[1] * (wide.dim() - 1))

    def codes(self, multiplier: int | None = None) -> Block:
        """Return the int8 copy, by shift; ``multiplier`` (Q12, 15 bits) is a residual scalar."""
        wide, exponent = self.master.to(torch.int32), self.exponent
        if multiplier is not None:
            wide, exponent = wide * multiplier, exponent - 12
        by = fitting(peak(wide), 0)
        return Block(shifted(wide, by).clamp_(-CODE, CODE).to(torch.int8), exponent + by)

    def update(self, grad: Block, *, lr: float, decay: float, momentum: int, key: int | None) -> None:
        """Take one step of SGD with momentum and weight decay, as ``torch.optim.SGD`` does.

        Velocity has 28 bits, so only the step on the master loses bits, and only it is rounded at random.

        Args:
            grad: The gradient.
            lr: Learning rate, over the number of samples: gradients are sums over the batch.
            decay: Weight decay, times the number of samples; ignored where ``decayed`` is not.
            momentum: In eighths.
            key: Of the random bits; None rounds to nearest.
        """
        (m, k), (decay, decay_shift) = rate(lr), rate(decay if self.decayed else 0.0)
        largest = [
            (peak(self.velocity) * momentum + 4 >> 3, self.velocity_exponent),
            (peak(grad.data), grad.exponent),
            (peak(self.master) * decay, self.exponent - decay_shift),
        ]
        tops = [fitting(most, exponent, _VELOCITY) for most, exponent in largest if most]
        if not tops:
            return
        exponent = max(tops)
        if self.bits != 32 and m and not peak(self.master):  # all zero: the first step decides what it is counted in
            self.exponent = exponent - k + m.bit_length() + _VELOCITY - 14
        by, drop = self.exponent + self._drop - (exponent - k), self._drop
        limit = 2**31 - 1 if self.bits == 32 else 2**29
        wide = torch.empty(self.master.shape, dtype=torch.int64 if self.bits == 32 else torch.int32)
        for rows in chunks(len(wide), wide[0].numel()):  # int64 copies of a large weight would not fit a cache
            own, first = self.master[rows].long(), rows.start * wide[0].numel()
            velocity = shifted(self.velocity[rows].long() * momentum, 3)
            velocity = shifted(velocity, exponent - self.velocity_exponent)
            velocity += shifted(grad.data[rows], exponent - grad.exponent)
            if decay:
                velocity += shifted(own * decay, exponent - (self.exponent - decay_shift))
            self.velocity[rows] = velocity
            own -= stochastic_shift(velocity * m, by, key, first) << drop
            wide[rows] = self._without_means(own.clamp_(-limit, limit))
        self.velocity_exponent = exponent
        self._set(wide)

    def value(self) -> Tensor:
        """Return the values in floating point, for a model outside."""
        return self.master.float() * 2.0**self.exponent

    def state(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on."""
        exponents = torch.tensor([self.exponent, self.velocity_exponent], dtype=torch.int32)
        return {"master": self.master.clone(), "velocity": self.velocity.clone(), "exponents": exponents}

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` returned."""
        self.master, self.velocity = state["master"].clone(), state["velocity"].clone()
        self.exponent, self.velocity_exponent = state["exponents"].tolist()
