"""NNGP and neural tangent kernels of infinitely wide networks, for any inputs.

Convention (NTK parametrisation): h^1 = sqrt(first_w2 / n_0) W x + sqrt(first_b2) b, then each further layer is a
`Transition`, with W and b standard normal and all of them trained. depth counts weight layers, so depth = L has L - 1
activations. With K^0 = x x'^T / n_0:

    K^1 = first_w2 K^0 + first_b2,   Theta^1 = K^1,
    K^{l+1} = T(K^l),                Theta^{l+1} = K^{l+1} + T'(K^l) Theta^l,

T and T' being the transition and its derivative by the covariance (the paper's eq. 6 with its product over r = l ..
L-1, not l+1 .. L). Weights of variance sigma_w2 / n trained directly (PyTorch's parametrisation) have the same NNGP
kernel and another NTK.

Every pair carries its correlation rho and gap = 1 - rho, because a correlation knows 1 - rho to 1e-16 only and a
chaotic layer multiplies that error by chi_1. The gap is exact above rho = 1/2, rho below.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mimicnorm.arguments import finite, positive_int
from mimicnorm.errors import TheoryError

from .arguments import reals
from .dual import Pairs, require_continuous
from .transition import Transition

BLOCK = 2**15  # pairs computed at once: they fit the processor's cache
THREAD_BLOCK = 2**17  # pairs that a thread takes at once: with fewer, threads mostly wait for the interpreter
CLOSE = 1e-4  # of 1 - |rho|: for closer inputs it is computed from the difference of the vectors
COLLINEAR = 1e-29  # of 1 - |rho|: vectors that differ by rounding
Scales = str | float | Sequence[float]
Two = tuple[Tensor | float, Tensor | float]


@dataclass(frozen=True)
class Kernels:
    """The two kernels after a layer, and the variances (NNGP diagonal) of the points of each side."""

    nngp: Tensor
    ntk: Tensor
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class _State:
    """The kernels between two sides; if `same`, only blocks of the upper triangle are up to date."""

    rho: Tensor
    gap: Tensor
    theta: Tensor
    q1: Tensor
    q2: Tensor
    same: bool
    layers: int  # transitions to come in all
    layer: int = 1  # weight layers so far

    @property
    def pairs(self) -> int:
        """The number of pairs to compute."""
        m, m2 = self.rho.shape
        return m * (m + 1) // 2 if self.same else m * m2

    @property
    def scale(self) -> Tensor:
        """The covariances at correlation 1."""
        return torch.sqrt(self.q1[:, None]) * torch.sqrt(self.q2)

    def blocks(self, pairs: int = BLOCK) -> Iterator[tuple[slice, slice]]:
        """Yield row and column ranges of about so many pairs."""
        height = max(1, pairs // len(self.q2))
        for row in range(0, len(self.q1), height):
            yield slice(row, row + height), slice(row if self.same else 0, None)

    def angles(self) -> tuple[float, float]:
        """Return the least and the largest arccos(rho) of pairs other than equal inputs."""
        least, most = 2.0, 0.0
        for rows, columns in self.blocks():
            gap = self.gap[rows, columns]
            others = gap.masked_fill((gap == 0) & (self.q1[rows, None] == self.q2[columns]), 2.0)
            least, most = min(least, float(others.min())), max(most, float(gap.max()))
        ends = [2 * math.asin(math.sqrt(gap / 2)) for gap in (least, most)]
        return min(ends), max(ends)


def kernels(
    x: Tensor,
    depth: int,
    transition: Transition,
    x2: Tensor | None = None,
    *,
    first_w2: float = 1.0,
    first_b2: float = 0.0,
) -> Kernels:
    """Return the NNGP kernel and the NTK of a plain network of `depth` weight layers (module docstring).

    Args:
        x: inputs (m, ...), flattened per sample, of any norms.
        depth: number of weight layers, at least 1.
        transition: the layers after the first.
        x2: a second set of inputs: kernels between x and x2. Under ``batch_norm`` the statistics are x's.
        first_w2: variance factor of the first layer's weights (1 keeps the variance of inputs with |x|^2 = n_0).
        first_b2: variance of the first layer's biases.

    Example:
        >>> x = torch.eye(4, dtype=torch.float64) * 2  # |x|^2 = n_0
        >>> kernels(x, 3, Transition("weight_mean")).ntk.diagonal().round(decimals=4)[0]
        tensor(4.6189, dtype=torch.float64)
    """
    states = _states(x, x2, transition, first_w2, first_b2, depth)
    return _finish(deque(states, maxlen=1)[0])


def layerwise(
    x: Tensor,
    depth: int,
    transition: Transition,
    x2: Tensor | None = None,
    *,
    first_w2: float = 1.0,
    first_b2: float = 0.0,
) -> Iterator[Kernels]:
    """Return an iterator over the kernels after layer 1, 2, ..., depth; arguments as for `kernels`."""
    return map(_finish, _states(x, x2, transition, first_w2, first_b2, depth))


def _states(
    x: Tensor, x2: Tensor | None, transition: Transition, first_w2: float, first_b2: float, depth: int
) -> Iterator[_State]:
    """Check the arguments now, and run the layers one by one as they are asked for."""
    layers = positive_int(depth, "depth", error=TheoryError) - 1
    start = _start(x, x2, transition, first_w2, first_b2, layers)
    return accumulate(range(layers), lambda state, _: _layer(state, transition), initial=start)


def residual_kernels(
    x: Tensor,
    blocks: int,
    transition: Transition,
    x2: Tensor | None = None,
    *,
    layers_per_block: int = 2,
    scale: Scales = "sqrt",
    readout: bool = False,
    first_w2: float = 1.0,
    first_b2: float = 0.0,
) -> Kernels:
    """Return the kernels of a residual network h_{l+1} = h_l + s_l f_l(h_l) (paper, "Implementation").

    h_1 is the first layer, f_l is `layers_per_block` times (activation, transition layer), the scalars are fixed:
    K <- K + s^2 K_f, Theta <- Theta + s^2 Theta_f.

    Args:
        x: as for `kernels`.
        blocks: number of residual blocks.
        transition: every layer inside the branches.
        x2: as for `kernels`.
        layers_per_block: k, weight layers in a branch.
        scale: s_l: ``"sqrt"``: 1/sqrt(l), the paper's; ``"linear"``: 1/l; a number; or one number per block.
        readout: end with one more (activation, transition layer).
        first_w2: as for `kernels`.
        first_b2: as for `kernels`.

    Example:
        >>> x = torch.eye(3, dtype=torch.float64) * 3**0.5
        >>> residual_kernels(x, 8, Transition("weight_mean")).rows.round(decimals=10)
        tensor([9., 9., 9.], dtype=torch.float64)
    """
    blocks = positive_int(blocks, "blocks", error=TheoryError)
    layers_per_block = positive_int(layers_per_block, "layers_per_block", error=TheoryError)
    scales = block_scales(scale, blocks)
    state = _start(x, x2, transition, first_w2, first_b2, blocks * layers_per_block + bool(readout))
    for s in scales:
        branch = state
        for _ in range(layers_per_block):
            branch = _layer(branch, transition)
        state = _sum(state, branch, s**2)
    return _finish(_layer(state, transition) if readout else state)


def block_scales(scale: Scales, blocks: int) -> list[float]:
    """Return the branch scalars s_1 .. s_blocks of a rule, a number or a list."""
    if isinstance(scale, str):
        rules = {"sqrt": -0.5, "linear": -1.0, "none": 0.0}
        if scale not in rules:
            raise TheoryError(f"unknown scale {scale!r}: use 'sqrt', 'linear', 'none', a number or a list.")
        return [(block + 1) ** rules[scale] for block in range(blocks)]
    scales = reals("branch scalars", scale)
    scales = scales.expand(blocks) if scales.dim() == 0 else scales
    if scales.shape != (blocks,):
        raise TheoryError(f"{len(scales)} scales were given for {blocks} blocks; pass one per block.")
    return scales.tolist()


def _inputs(x: Tensor, name: str) -> Tensor:
    if not isinstance(x, Tensor) or x.dim() < 2 or x.numel() == 0:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise TheoryError(f"{name} must be a tensor of samples (m, ...), not {shape}.")
    return reals(f"the input {name}", x).flatten(1)


def require_transition(transition: Any) -> None:
    """Refuse what is not a Transition, such as the name of one."""
    if not isinstance(transition, Transition):
        raise TheoryError(f"transition must be a Transition, such as Transition('weight_mean'), not {transition!r}.")


def _start(
    x: Tensor, x2: Tensor | None, transition: Transition, first_w2: float, first_b2: float, layers: int
) -> _State:
    require_transition(transition)
    require_continuous(transition.activation)
    first_w2 = finite(first_w2, "first_w2", above=0, error=TheoryError)
    first_b2 = finite(first_b2, "first_b2", least=0, error=TheoryError)
    a = _inputs(x, "x")
    b = a if x2 is None else _inputs(x2, "x2")
    if a.shape[1] != b.shape[1]:
        raise TheoryError(f"x has {a.shape[1]} features and x2 has {b.shape[1]}; they must match.")
    factor = first_w2 / a.shape[1]
    cross = reals("the input kernel", factor * (a @ b.T))
    squares = reals("the input kernel", factor * torch.cat([(a**2).sum(1), (b**2).sum(1)]))
    q1, q2 = _without_rounding(squares).split((len(a), len(b)))
    for side, q in (("x", q1), ("x2", q2)):
        if not bool((q + first_b2 > 0).all()):
            where = int((q + first_b2 <= 0).nonzero()[0])
            raise TheoryError(f"sample {where} of {side} is a zero vector: it has no correlation. Leave it out.")
    scale = torch.sqrt(q1[:, None]) * torch.sqrt(q2)
    rho = torch.where(scale > 0, cross / scale, (q1[:, None] == q2).to(cross))  # two zero vectors are equal, too
    rho, gap = _close_pairs(a, b, rho)
    inputs = _State(rho, gap, scale * rho, q1, q2, x2 is None, layers)
    if first_b2 == 0:
        return inputs
    ones = torch.ones_like(rho)
    bias = replace(inputs, rho=ones, gap=0 * ones, theta=ones, q1=torch.ones_like(q1), q2=torch.ones_like(q2))
    return _sum(inputs, bias, first_b2)


def _without_rounding(q: Tensor) -> Tensor:
    """Make variances equal that differ by rounding only, so that inputs of one norm are recognised by ==."""
    ordered, order = q.sort()
    new = torch.ones_like(ordered, dtype=torch.bool)
    new[1:] = ordered[1:] - ordered[:-1] > 1e-14 * ordered[1:]
    return q.index_put((order,), ordered[new][new.cumsum(0) - 1])


def _close_pairs(a: Tensor, b: Tensor, rho: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho and 1 - rho, of close and of opposite inputs as half the squared distance of unit vectors.

    A dot product knows it to its length times the rounding only.
    """
    gap, reach = 1 - rho, max(CLOSE, 4 * a.shape[1] * torch.finfo(a.dtype).eps)
    unit1, unit2 = (torch.nn.functional.normalize(side, eps=1e-300) for side in (a, b))
    for i, j in (rho.abs() >= 1 - reach).nonzero().T.split(max(1, 2**22 // a.shape[1]), 1):
        sign = rho[i, j].sign()
        distance = (unit1[i] - sign[:, None] * unit2[j]).square().sum(1) / 2
        distance = torch.where(distance < COLLINEAR, 0.0, distance)
        rho[i, j], gap[i, j] = sign * (1 - distance), torch.where(sign > 0, distance, 2 - distance)
    return rho, gap


def _sum(one: _State, other: _State, factor: float) -> _State:
    """Add `factor` times the kernels of an independent part."""
    q1, q2 = one.q1 + factor * other.q1, one.q2 + factor * other.q2
    covariance = one.scale * one.rho + factor * (other.scale * other.rho)
    gap = _gap_of_sum((one.q1[:, None], one.q2), (factor * other.q1[:, None], factor * other.q2), one.gap, other.gap)
    rho, gap = _consistent(covariance / (torch.sqrt(q1[:, None]) * torch.sqrt(q2)), gap)
    return replace(other, rho=rho, gap=gap, theta=one.theta + factor * other.theta, q1=q1, q2=q2)


def _gap_of_sum(q: Two, p: Two, gap: Tensor, other: Tensor | float) -> Tensor:
    """Return 1 - rho of a sum of two independent parts, of variances q and p, from theirs: all terms are positive."""
    s, t = (q[0] ** 0.5) * (q[1] ** 0.5), (p[0] ** 0.5) * (p[1] ** 0.5)
    both = ((q[0] + p[0]) ** 0.5) * ((q[1] + p[1]) ** 0.5)
    apart = ((q[0] * p[1]) ** 0.5 - (q[1] * p[0]) ** 0.5) ** 2 + 2 * s * t * (gap + other - gap * other)
    lost = s**2 * gap * (2 - gap) + t**2 * other * (2 - other) + apart
    return lost / (both * (both + s * (1 - gap) + t * (1 - other)))


def _consistent(rho: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho and 1 - rho, the gap deciding above 1/2 and rho below; exactly -1 within rounding."""
    rho = torch.where(rho < -1 + 1e-15, -1.0, rho)
    gap = torch.where(rho > 0.5, gap, 1 - rho)
    return torch.where(rho > 0.5, 1 - gap, rho), gap


def _layer(state: _State, t: Transition) -> _State:
    """Run one layer, in one thread or with blocks in several: torch's operations on a block are too short to share.

    PyTorch's number of threads belongs to each Python thread: without the initializer each would start a team.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if threads == 1 or state.pairs < 2 * THREAD_BLOCK:
            return _layer_by(map, state, t, BLOCK)
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return _layer_by(pool.map, state, t, THREAD_BLOCK)
    finally:
        torch.set_num_threads(threads)


def _layer_by(each: Callable, state: _State, t: Transition, block: int) -> _State:
    pairs = Pairs(
        t.activation,
        state.q1,
        state.q2,
        centred=t.centred,
        expected=state.pairs * state.layers,
        angles=state.angles,
    )
    w2, bias = t.effective_w2, t.sigma_b2
    shift1, shift2 = torch.zeros_like(state.q1), torch.zeros_like(state.q2)
    if t.kind == "batch_norm":
        # E[(phi - c)(phi' - c)] with the channel mean c over x, whose pairs are taken as uncorrelated
        centre = pairs.moments[0].mean.mean()
        shift1, shift2 = (side.mean - centre for side in pairs.moments)
        w2, bias = 1 / float((pairs.powers[0] + shift1**2).mean()), 0.0
    scaled1, scaled2 = (w2 * power for power in pairs.powers)
    added1, added2 = w2 * shift1**2 + bias, w2 * shift2**2 + bias
    q1, q2 = scaled1 + added1, scaled2 + added2
    _require_variance(torch.cat([q1, q2]), state.layer + 1)
    rho, gap, theta = (torch.zeros_like(state.theta) for _ in range(3))

    def fill(block: tuple[slice, slice]) -> bool:
        rows, columns = block
        value, slope, gap_after = pairs(rows, columns, state.rho[block], state.gap[block])
        added = w2 * shift1[rows, None] * shift2[columns] + bias
        k = w2 * value + added
        theta[block] = new = torch.addcmul(k, slope, state.theta[block], value=w2)
        if t.kind == "batch_norm" or bias > 0:
            ends = (scaled1[rows, None], scaled2[columns]), (added1[rows, None], added2[columns])
            gap_after = _gap_of_sum(*ends, gap_after, 1 - torch.sign(added))
        norms = torch.sqrt(q1[rows, None]) * torch.sqrt(q2[columns])
        rho[block], gap[block] = _consistent(k / norms, gap_after)
        return math.isfinite(float(new.sum()))

    if not all(each(fill, state.blocks(1 if pairs.one_by_one else block))):
        raise TheoryError(
            f"the tangent kernel became non-finite at layer {state.layer + 1}: it grows by chi1 with each layer."
        )
    return replace(state, rho=rho, gap=gap, theta=theta, q1=q1, q2=q2, layer=state.layer + 1)


def _require_variance(q: Tensor, layer: int) -> None:
    """Refuse variances that float64 cannot represent."""
    for bad, what, other in (
        (q < 1e-150, "dies out: below 1e-150", "larger"),
        (~(q < 1e150), "explodes: above 1e150", "smaller"),
    ):
        if bool(bad.any()):
            raise TheoryError(f"the variance {what} at layer {layer}. Use a {other} sigma_w2 or fewer layers.")


def _finish(state: _State) -> Kernels:
    def mirrored(t: Tensor) -> Tensor:
        return torch.triu(t) + torch.triu(t, 1).T if state.same else t

    return Kernels(mirrored(state.scale * state.rho), mirrored(state.theta), state.q1, state.q2)
