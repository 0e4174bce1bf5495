"""The head in integers: the last BN over the whole batch, softmax by a table, cross entropy and their gradients.

It works on (samples, positions, classes) in int64: a few thousand numbers. Qn is a count of 2^-n.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mimicnorm.errors import IntegerError
from mimicnorm.integer.formats import Block, divided, fitting, peak, raised, shifted
from mimicnorm.integer.parameters import Parameter
from mimicnorm.layers import LastNorm

Q = 16
"""Fraction bits of normalised logits."""
GRAD = 24
"""Fraction bits of probabilities and their gradients."""
_TABLE_BITS = 10
_POWERS = [round(2**30 * 2 ** (-i / 2**_TABLE_BITS)) for i in range(2**_TABLE_BITS)]  # 2^-x for x in [0, 1), Q30
_LOG2_E = round(math.log2(math.e) * 2**Q)
_LOGITS, _MORE = 20, 4  # bits of a logit, and fraction bits for mean and deviation
_MEAN, _VAR = -16, -24  # the exponents of running statistics
_VAR_BITS = 50  # beyond them the running variance is counted in a larger unit
_WIDE, _STATISTICS = 44, 57  # bits at which logits and running statistics saturate


class Head:
    """From logits to a loss.

    Args:
        norm: The last BN, if there is one; its momentum is one over a whole number.
        scale: Its logit scale, if it has one.
        relu: Whether a ReLU follows it (some SqueezeNets).
        pooled: Whether the mean over positions is taken; else there must be one position.
        name: Of the layer that makes the logits.
    """

    def __init__(
        self,
        norm: LastNorm | None,
        scale: Parameter | None = None,
        *,
        relu: bool = False,
        pooled: bool = True,
        name: str = "",
    ):
        self.normalised, self.scale, self.relu, self.pooled, self.name = norm is not None, scale, relu, pooled, name
        norm = norm or LastNorm(1)  # whose statistics nobody reads
        self.eps, self.average = norm.eps, round(1 / (norm.momentum or 1))
        mean, var = norm.get_buffer("running_mean").double(), norm.get_buffer("running_var").double()
        self.var_unit = _widened(_VAR, math.frexp(float(var.max()))[1] - _VAR_BITS)
        self.mean, self.var = (mean * 2.0**-_MEAN).round().long(), (var * 2.0**-self.var_unit).round().long()
        self.scale_grad: Block | None = None

    def loss(self, logits: Block, labels: Tensor) -> tuple[float, int, Block]:
        """Normalise, compare with the labels, and go all the way back to the logits.

        Returns:
            The mean cross entropy (a Python number, for people to read), how many of the largest logits were right, and
            the gradient of the summed loss by the logits that came in.
        """
        z, unit = _counted(logits)
        z = self._by_position(z)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < z.shape[-1]:
            raise IntegerError(f"labels {int(labels.min())} to {int(labels.max())}: there are {z.shape[-1]} classes")
        (samples, positions, _), count = z.shape, z.shape[0] * z.shape[1]
        if self.normalised:
            total = z.sum((0, 1))
            centred = (z << _MORE) - divided(total << _MORE, count)
            unit -= _MORE
            drop = max(0, count.bit_length() - 12)  # a square has 50 bits, and their sum is to fit 63
            square = divided(shifted(centred.square(), drop).sum((0, 1)), count) << drop
            deviation = _root(square + self._eps_in(2 * unit))
            x = divided(centred << Q, deviation)
            self._average(divided(total << _MORE, count), square, unit, count)
        else:
            x, deviation = _moved(z, unit, -Q, _WIDE), None
        scale, slope = self._factor()
        y, open_ = self._through(x, scale, positions)
        probabilities, loss = _softmax(y, labels)
        correct = int((y.argmax(1) == labels).sum())
        grad = probabilities
        grad[torch.arange(samples), labels] -= 1 << GRAD
        dy = divided(grad, positions)[:, None].expand(x.shape)
        dy = dy * open_ if open_ is not None else dy
        if self.scale is not None:  # Q24 times Q16, times the slope in Q16
            self.scale_grad = Block((shifted((dy * x).sum().view(1), Q) * slope), -GRAD - Q)
        dx = shifted(dy * scale, Q) if scale is not None else dy
        if deviation is None:
            return loss, correct, Block(dx.reshape(logits.data.shape), -GRAD)
        along = divided(shifted(dx * x, Q).sum((0, 1)), count)
        d = dx - divided(dx.sum((0, 1)), count) - shifted(x * along, Q)
        return loss, correct, Block(divided(d << Q, deviation).reshape(logits.data.shape), -GRAD - Q - unit)

    def logits(self, logits: Block) -> Tensor:
        """Return (samples, classes) in Q16, normalised by the running statistics."""
        z = self._by_position(logits.data.long())
        if self.normalised:  # units depend on the running statistics, never on the batch
            more = min(-_VAR, 60 - peak(self.var).bit_length()) // 2 * 2  # even: the root halves it
            deviation = _root((self.var << more) + self._eps_in(self.var_unit - more))
            unit = (self.var_unit - more) // 2
            centred = _moved(z, logits.exponent, unit, _WIDE) - _moved(self.mean, _MEAN, unit, _WIDE)
            x = divided(centred << Q, deviation).clamp_(-(2**38), 2**38)
        else:
            x = _moved(z, logits.exponent, -Q, _WIDE)
        return self._through(x, self._factor()[0], z.shape[1])[0]

    def _by_position(self, data: Tensor) -> Tensor:
        """Return (samples, positions, classes)."""
        z = data.reshape(len(data), -1, data.shape[-1])
        if z.shape[1] > 1 and not self.pooled:
            raise IntegerError(f"{self.name}: logits at {z.shape[1]} positions: take their mean before the output")
        return z

    def _through(self, x: Tensor, scale: int | None, positions: int) -> tuple[Tensor, Tensor | None]:
        """Return logits after the scalar, the ReLU and the mean over positions, and where the ReLU was open."""
        y = x if scale is None else shifted(x * scale, Q)
        open_ = (y > 0).long() if self.relu else None
        return divided((y if open_ is None else y * open_).sum(1), positions), open_

    def _factor(self) -> tuple[int | None, int]:
        """Return what multiplies the logits and its slope, both Q16: s, or exp(s - 1) below 1."""
        if self.scale is None:
            return None, 0
        s = int(shifted(self.scale.master, -Q - self.scale.exponent))
        if s >= 1 << Q:
            return s, 1 << Q
        below = int(_exp(torch.tensor([s - (1 << Q)]))) >> 30 - Q
        return below, below

    def _eps_in(self, unit: int) -> int:
        return min(max(1, int(math.ldexp(self.eps, min(-unit, 80)))), 1 << 60) if unit < 0 else 1

    def _average(self, mean: Tensor, square: Tensor, unit: int, count: int) -> None:
        """Move the running statistics; the variance is the unbiased one, as in BatchNorm."""
        var_unit = _widened(self.var_unit, fitting(peak(square), 2 * unit, _VAR_BITS))
        self.var, self.var_unit = shifted(self.var, var_unit - self.var_unit), var_unit
        biased = _moved(square, 2 * unit, var_unit, _STATISTICS)
        unbiased = biased + divided(biased, max(count - 1, 1))
        self.mean = self.mean + divided(_moved(mean, unit, _MEAN, _STATISTICS) - self.mean, self.average)
        self.var = self.var + divided(unbiased - self.var, self.average)

    def state(self) -> dict[str, Tensor]:
        """Return the running statistics."""
        return {"mean": self.mean.clone(), "var": self.var.clone(), "var_unit": torch.tensor([self.var_unit])}

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` returned."""
        self.mean, self.var, self.var_unit = state["mean"].clone(), state["var"].clone(), int(state["var_unit"])

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return running mean and variance in floating point, for a model outside."""
        return self.mean.float() * 2.0**_MEAN, self.var.float() * 2.0**self.var_unit


def _counted(logits: Block) -> tuple[Tensor, int]:
    """Return logits of 20 bits, and their unit. The whole batch is here."""
    data = logits.data.long()
    by = max(fitting(peak(data), 0, _LOGITS), 0)
    return shifted(data, by), logits.exponent + by


def _widened(unit: int, least: int) -> int:
    """Return a unit of at least ``2^least``, an even power larger: evaluation takes the variance's root."""
    by = max(least - unit, 0)
    return unit + by + by % 2


def _moved(data: Tensor, unit: int, to: int, bits: int) -> Tensor:
    """Return the same values counted in ``2^to``; what would take more than ``bits`` bits saturates."""
    return raised(data, unit - to, bits) if unit >= to else shifted(data, to - unit).clamp_(-(2**bits), 2**bits)


def _root(square: Tensor) -> Tensor:
    """Return the integer square root, digit by digit.

    Example:
        >>> _root(torch.tensor([15, 16, 10**12])).tolist()
        [3, 4, 1000000]
    """
    rest, root = square.clone(), torch.zeros_like(square)
    bit = 1 << 62
    while bit:
        fits = (rest >= root + bit).long()
        rest -= fits * (root + bit)
        root = (root >> 1) + fits * bit
        bit >>= 2
    return root.clamp_(min=1)


def _exp(x: Tensor) -> Tensor:
    """Return exp(x) in Q30 for x of at most 0 in Q16: a shift and a table of 2^-f."""
    power = shifted(-x.clamp(min=-(40 << Q)) * _LOG2_E, Q)
    fraction = (power & 2**Q - 1) >> Q - _TABLE_BITS
    return torch.tensor(_POWERS)[fraction] >> (power >> Q).clamp(max=62)


def _softmax(y: Tensor, labels: Tensor) -> tuple[Tensor, float]:
    """Return probabilities in Q24, and the mean cross entropy."""
    below = y - y.amax(1, keepdim=True)
    parts = _exp(below)
    total = parts.sum(1, keepdim=True)
    right = below.gather(1, labels[:, None])
    lost = [math.log(t / 2**30) - r / 2**Q for t, r in zip(total[:, 0].tolist(), right[:, 0].tolist(), strict=True)]
    return divided(parts << GRAD, total), math.fsum(lost) / len(lost)
