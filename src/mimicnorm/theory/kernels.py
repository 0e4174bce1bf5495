"""NNGP and neural tangent kernels of infinitely wide networks, for any inputs.

Convention (NTK parametrisation): h^1 = sqrt(first_w2 / n_0) W x + sqrt(first_b2) b, then each further layer is a
`Transition`, with W and b standard normal and all of them trained. depth counts weight layers, so depth = L has L - 1
activations. With K^0 = x x'^T / n_0:

    K^1 = first_w2 K^0 + first_b2,   Theta^1 = K^1,
    K^{l+1} = T(K^l),                Theta^{l+1} = K^{l+1} + T'(K^l) Theta^l,

T and T' being the transition and its derivative by the covariance (the paper's eq. 6 with its product over r = l ..
L-1, not l+1 .. L). Weights of variance sigma_w2 / n trained directly (PyTorch's parametrisation) have the same NNGP
kernel and another NTK.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from mimicnorm.errors import TheoryError

from .arguments import number, reals
from .dual import (
    Moments,
    has_closed_form,
    leaky_slope,
    mirror,
    moments,
    near_one,
    pair_moments,
    require_continuous,
    require_few_pairs,
)
from .series import hermite
from .surface import surface
from .transition import Transition, check_depth

MANY = 1000  # pairs times layers from which an interpolant pays
BLOCK = 2**17  # pairs that a thread takes at once: with fewer, threads mostly wait for the interpreter
NEAR = 1e-4  # of 1 - rho: below it, pairs under leaky ReLUs have their 1 - rho carried along
COLLINEAR = 1e-29  # of 1 - rho: vectors that differ by rounding
Scales = str | float | Sequence[float]
Ends = tuple[Tensor | float, Tensor | float]


@dataclass(frozen=True)
class Gram:
    """Input covariances K^0, for callers who have no vectors.

    Attributes:
        cross: x x2^T / n_0, shape (m, m2).
        rows: |x|^2 / n_0 per row; None: `cross` is square and symmetric, its diagonal is meant.
        columns: |x2|^2 / n_0 per column; None as for rows.
    """

    cross: Tensor
    rows: Tensor | None = None
    columns: Tensor | None = None


@dataclass(frozen=True)
class Kernels:
    """The two kernels after a layer, and the variances (NNGP diagonal) of the points of each side."""

    nngp: Tensor
    ntk: Tensor
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class _State:
    """The kernels between two sides; when `same`, only the upper triangle is kept up to date."""

    k: Tensor
    theta: Tensor
    q1: Tensor
    q2: Tensor
    same: bool
    identical: Tensor  # 1: one and the same input; -1: an input and its negative; else 0
    collinear: Tensor  # likewise for inputs of any norms: where the correlation is exactly 1 or -1
    near: tuple[Tensor, Tensor]  # rows and columns of pairs that are close to begin with, under leaky ReLUs
    gap: Tensor  # their 1 - rho, which a correlation holds to 1e-16 only
    layers: int  # transitions to come in all
    layer: int = 1  # weight layers so far

    @property
    def pairs(self) -> int:
        """The pairs to compute."""
        m, m2 = self.k.shape
        return m * (m + 1) // 2 if self.same else m * m2

    def blocks(self, pairs: int = 2**15) -> Iterator[tuple[slice, slice]]:
        """Yield row and column ranges of about so many pairs; by default they fit the processor's cache."""
        height = max(1, pairs // len(self.q2))
        for row in range(0, len(self.q1), height):
            yield slice(row, row + height), slice(row if self.same else 0, None)

    def scale(self, rows: slice, columns: slice) -> Tensor:
        """Return the covariance of a block at correlation 1."""
        return torch.sqrt(self.q1[rows, None]) * torch.sqrt(self.q2[columns])

    def correlation(self, rows: slice, columns: slice) -> Tensor:
        """Return the correlations of a block, exactly 1 or -1 where the inputs are collinear."""
        rho = (self.k[rows, columns] / self.scale(rows, columns)).clamp_(-1.0, 1.0)
        sign = self.collinear[rows, columns]
        rho.masked_fill_(sign > 0, 1.0).masked_fill_(sign < 0, -1.0)
        return torch.where(rho.abs() > 1 - 1e-15, rho.sign(), rho)  # rounding, which arccos would make 1e-8

    def angles(self) -> tuple[float, float]:
        """Return the least and the largest arccos(rho) of inputs that are not the same."""
        ends = []
        for rows, columns in self.blocks():
            rho = self.correlation(rows, columns)
            ends.append((float(rho.min()), float(rho.masked_fill_(self.identical[rows, columns] > 0, -1.0).max())))
        low, high = min(e[0] for e in ends), max(e[1] for e in ends)
        return math.acos(max(low, high)), math.acos(low)


def kernels(
    x: Tensor | Gram,
    depth: int,
    transition: Transition,
    x2: Tensor | None = None,
    *,
    first_w2: float = 1.0,
    first_b2: float = 0.0,
) -> Kernels:
    """Return the NNGP kernel and the NTK of a plain network of `depth` weight layers (module docstring).

    Args:
        x: inputs (m, ...), flattened per sample, of any norms; or a `Gram`.
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
    states = _states(x, x2, transition, first_w2, first_b2, check_depth(depth) - 1)
    return _finish(deque(states, maxlen=1)[0])


def layerwise(
    x: Tensor | Gram,
    depth: int,
    transition: Transition,
    x2: Tensor | None = None,
    *,
    first_w2: float = 1.0,
    first_b2: float = 0.0,
) -> Iterator[Kernels]:
    """Return an iterator over the kernels after layer 1, 2, ..., depth; arguments as for `kernels`."""
    return map(_finish, _states(x, x2, transition, first_w2, first_b2, check_depth(depth) - 1))


def _states(
    x: Tensor | Gram, x2: Tensor | None, transition: Transition, first_w2: float, first_b2: float, layers: int
) -> Iterator[_State]:
    """Check the arguments now, and run the layers as they are asked for."""
    start = _start(x, x2, transition, first_w2, first_b2, layers)

    def step(state: _State, _: int) -> _State:
        i, j = state.near
        few = state.gap < NEAR  # the others have parted
        return _layer(replace(state, near=(i[few], j[few]), gap=state.gap[few]), transition)

    return accumulate(range(layers), step, initial=start)


def residual_kernels(
    x: Tensor | Gram,
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

    h_1 is the first layer, f_l is `layers_per_block` times (activation, transition layer), the scalars are held fixed:
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
    blocks, layers_per_block = check_depth(blocks), check_depth(layers_per_block)
    scales = block_scales(scale, blocks)
    state = _start(x, x2, transition, first_w2, first_b2, blocks * layers_per_block + bool(readout))
    for s in scales:
        branch = state
        for _ in range(layers_per_block):
            branch = _layer(branch, transition)
        total = {name: getattr(state, name) + s**2 * getattr(branch, name) for name in ("k", "theta", "q1", "q2")}
        # what the branch turned round is on one line no more
        total |= {m: getattr(state, m) * (getattr(state, m) == getattr(branch, m)) for m in ("identical", "collinear")}
        i, j = state.near
        ends = [(state.q1[i], state.q2[j]), (s**2 * branch.q1[i], s**2 * branch.q2[j])]
        state = _held(replace(branch, **total, gap=_gap_of_sum(ends[0], ends[1], state.gap, branch.gap)))
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
        raise TheoryError(f"{name} must be a tensor of samples (m, ...), not {shape}; a Gram matrix goes in Gram(...).")
    return reals(f"the input {name}", x).flatten(1)


def _start(
    x: Tensor | Gram, x2: Tensor | None, transition: Transition, first_w2: float, first_b2: float, layers: int
) -> _State:
    if not isinstance(transition, Transition):
        raise TheoryError(f"transition must be a Transition, such as Transition('weight_mean'), not {transition!r}.")
    require_continuous(transition.activation)
    first_w2, first_b2 = number("first_w2", first_w2, above=0), number("first_b2", first_b2, least=0)
    if isinstance(x, Gram):
        if x2 is not None:
            raise TheoryError("a Gram holds both sides already: leave x2 out and give Gram its rows and columns.")
        if (x.rows is None) != (x.columns is None):
            raise TheoryError("a Gram takes both rows and columns, or neither when it is square and symmetric.")
        cross, same = reals("the input kernel", x.cross, 2), x.rows is None
        if same and (cross.shape[0] != cross.shape[1] or not torch.allclose(cross, cross.T)):
            raise TheoryError(f"Gram of shape {tuple(cross.shape)} is not symmetric: give its rows and columns.")
        q1 = cross.diagonal() if x.rows is None else reals("rows of a Gram", x.rows, 1)
        q2 = q1 if x.columns is None else reals("columns of a Gram", x.columns, 1)
        vectors = None
        if cross.shape != (len(q1), len(q2)):
            raise TheoryError(f"Gram of shape {tuple(cross.shape)} with {len(q1)} rows and {len(q2)} columns.")
    else:
        a = _inputs(x, "x")
        b = a if x2 is None else _inputs(x2, "x2")
        if a.shape[1] != b.shape[1]:
            raise TheoryError(f"x has {a.shape[1]} features and x2 has {b.shape[1]}; they must match.")
        n0, same = a.shape[1], x2 is None
        cross, q1, q2 = a @ b.T / n0, (a**2).sum(1) / n0, (b**2).sum(1) / n0
        vectors = a, b
    q1, q2, cross = (reals("the input kernel", first_w2 * t) for t in (q1, q2, cross))
    for side, q in (("x", q1), ("x2", q2)):
        if not bool((q + first_b2 > 0).all()):
            where = int((q + first_b2 <= 0).nonzero()[0])
            raise TheoryError(f"sample {where} of {side} is a zero vector: it has no correlation. Leave it out.")
    scale = torch.sqrt(q1[:, None]) * torch.sqrt(q2)
    rho = torch.where(scale > 0, cross / scale, (q1[:, None] == q2).to(cross))  # two zero vectors are equal, too
    excess = rho.abs().max()
    if excess > 1 + 1e-10:
        raise TheoryError(f"the Gram matrix implies a correlation of {float(excess):.6g}: it is not positive definite.")
    # rho = 1 is unstable under weight mean: a rounding error at equal inputs would grow by chi1 per layer
    close = rho.abs() >= 1 - 1e-14
    near, gap = close.nonzero().T[:, :0], cross.new_empty(0)
    if vectors is not None:
        leaky = leaky_slope(transition.activation) is not None
        near, gap = _close_pairs(*vectors, rho, NEAR if leaky else 0.0, same)
        i, j = near
        cross[i, j] = rho[i, j].sign() * scale[i, j] * (1 - gap)
        close = torch.zeros_like(close).index_put_((i, j), gap < COLLINEAR)
        carried = (rho[i, j] > 0) & leaky
        near, gap = near[:, carried], gap[carried]
    collinear = rho.sign().to(torch.int8) * close
    if same:
        collinear = collinear.triu(1) + collinear.triu(1).T
        collinear.diagonal().fill_(1)
    identical = collinear * ((q1[:, None] - q2).abs() <= 1e-14 * q2)
    if first_b2 > 0:
        gap = _gap_of_sum((q1[near[0]], q2[near[1]]), (first_b2, first_b2), gap, torch.zeros_like(gap))
        q1, q2, cross = q1 + first_b2, q2 + first_b2, cross + first_b2
        identical = collinear = identical.clamp(min=0)
    return _held(_State(cross, cross, q1, q2, same, identical, collinear, (near[0], near[1]), gap, layers))


def _close_pairs(a: Tensor, b: Tensor, rho: Tensor, reach: float, same: bool) -> tuple[Tensor, Tensor]:
    """Return the pairs (2, pairs) with |rho| > 1 - reach, and 1 - |rho| as half the squared distance of unit vectors.

    A dot product knows it to its length times the rounding only; pairs within that are always among them.
    """
    reach = max(reach, 1e-14, 4 * a.shape[1] * torch.finfo(a.dtype).eps)
    found = rho.abs() >= 1 - reach
    pairs = (found.triu(1) if same else found).nonzero().T
    unit = [torch.nn.functional.normalize(side, eps=1e-300) for side in (a, b)]
    parts = [
        (unit[0][i] - rho[i, j].sign()[:, None] * unit[1][j]).square().sum(1) / 2
        for i, j in pairs.split(max(1, 2**22 // a.shape[1]), 1)
    ]
    return pairs, torch.cat(parts)


def _gap_of_sum(q: Ends, p: Ends, gap: Tensor, other: Tensor) -> Tensor:
    """Return 1 - rho of a sum of two independent parts, of variances q and p, from theirs: all terms are positive."""
    s, t = (q[0] * q[1]) ** 0.5, (p[0] * p[1]) ** 0.5
    both = ((q[0] + p[0]) * (q[1] + p[1])) ** 0.5
    apart = ((q[0] * p[1]) ** 0.5 - (q[1] * p[0]) ** 0.5) ** 2 + 2 * s * t * (gap + other - gap * other)
    lost = s**2 * gap * (2 - gap) + t**2 * other * (2 - other) + apart
    return lost / (both * (both + s * (1 - gap) + t * (1 - other)))


def _held(state: _State) -> _State:
    """Put the covariances of the near pairs where their gaps say, as long as these say more."""
    if not len(state.gap):
        return state
    i, j = state.near
    gap = state.gap.masked_fill(state.collinear[i, j] > 0, 0.0)
    k = torch.sqrt(state.q1[i]) * torch.sqrt(state.q2[j]) * (1 - gap)
    return replace(state, k=state.k.index_put((i, j), torch.where(gap < NEAR, k, state.k[i, j])), gap=gap)


def _layer(state: _State, t: Transition) -> _State:
    """Run one layer, in one thread or with each thread on blocks of its own: an operation is too short to be shared.

    PyTorch's number of threads is each Python thread's own: without the initializer each would start a team.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if threads == 1 or state.pairs < 2 * BLOCK:
            return _layer_by(map, state, t, 2**15)
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return _layer_by(pool.map, state, t, BLOCK)
    finally:
        torch.set_num_threads(threads)


def _layer_by(each: Callable, state: _State, t: Transition, block: int) -> _State:
    phi, w2, bias = t.activation, t.effective_w2, t.sigma_b2
    q = state.q1[0]
    equal = bool(((state.q1 - q).abs() <= 1e-14 * q).all() & ((state.q2 - q).abs() <= 1e-14 * q).all())
    one1 = Moments(*(m.expand_as(state.q1) for m in moments(phi, q))) if equal else moments(phi, state.q1)
    one2 = one1 if state.same else moments(phi, state.q2)
    power1, power2 = (m.variance if t.centred else m.second for m in (one1, one2))
    shift1, shift2 = torch.zeros_like(state.q1), torch.zeros_like(state.q2)
    if t.kind == "batch_norm":
        # E[(phi - c)(phi' - c)] with the channel mean c over x, whose pairs are taken as uncorrelated
        shift1, shift2 = one1.mean - one1.mean.mean(), one2.mean - one1.mean.mean()
        w2, bias = 1 / float((power1 + shift1**2).mean()), 0.0
    many = not has_closed_form(phi) and state.pairs * state.layers > MANY
    table = surface(phi, state.q1, state.q2, state.angles()) if many else None
    slow = table is None and not equal and not has_closed_form(phi)
    if slow and hermite(phi, torch.cat([state.q1, state.q2])) is None:
        require_few_pairs(phi, state.pairs, state.layers)
    k, theta = torch.empty_like(state.k), torch.empty_like(state.theta)

    def fill(block: tuple[slice, slice]) -> bool:
        rows, columns = block
        rho = state.correlation(rows, columns)
        if table is not None:
            value, slope = table(rows, columns, rho)
            value *= state.scale(rows, columns)
            if not t.centred:
                value += one1.mean[rows, None] * one2.mean[columns]
            same = state.identical[rows, columns] > 0  # outside the table's angles
            value = torch.where(same, power1[rows, None], value)
            slope = torch.where(same, one1.slope[rows, None], slope)
        else:
            value, slope = pair_moments(
                phi, *((q, q) if equal else (state.q1[rows, None], state.q2[columns])), rho, t.centred
            )
        if t.kind == "batch_norm":
            value = value + shift1[rows, None] * shift2[columns]
        k[rows, columns] = new = w2 * value + bias
        theta[rows, columns] = new = torch.addcmul(new, slope, state.theta[rows, columns], value=w2)
        return math.isfinite(float(new.sum()))

    finite = all(each(fill, state.blocks(1 if slow else block)))
    q1, q2 = w2 * (power1 + shift1**2) + bias, w2 * (power2 + shift2**2) + bias
    _require_range(torch.cat([q1, q2]), finite, state.layer + 1)
    # x and c x stay collinear where the layer is homogeneous; elsewhere only equal inputs stay equal
    leaky, turned = leaky_slope(phi), 0 if bias > 0 and mirror(phi) < 0 else mirror(phi)
    kept = state.collinear if leaky is not None and bias == 0 and t.kind != "batch_norm" else state.identical
    identical, collinear = (torch.where(m < 0, turned, m) if turned >= 0 else m for m in (state.identical, kept))
    new = replace(
        state, k=k, theta=theta, q1=q1, q2=q2, identical=identical, collinear=collinear, layer=state.layer + 1
    )
    if leaky is None or not len(state.gap):
        return new
    i, j = state.near
    gap, slope = near_one(leaky, state.gap, t.centred)
    if bias > 0 or t.kind == "batch_norm":
        ends = [(w2 * power1[i], w2 * power2[j]), (bias + w2 * shift1[i] ** 2, bias + w2 * shift2[j] ** 2)]
        gap = _gap_of_sum(ends[0], ends[1], gap, 1 - torch.sign(bias + shift1[i] * shift2[j]))
    new = _held(replace(new, gap=gap))
    theta[i, j] = torch.where(state.gap < NEAR, new.k[i, j] + w2 * slope * state.theta[i, j], theta[i, j])
    return new


def _require_range(q: Tensor, finite: bool, layer: int) -> None:
    """Refuse kernels that float64 cannot hold."""
    for bad, what, other in (
        (q < 1e-150, "dies out: below 1e-150", "larger"),
        (~(q < 1e150), "explodes: above 1e150", "smaller"),
    ):
        if bool(bad.any()):
            raise TheoryError(f"the variance {what} at layer {layer}. Use a {other} sigma_w2 or fewer layers.")
    if not finite:
        raise TheoryError(f"the tangent kernel became non-finite at layer {layer}: it grows by chi1 with each layer.")


def _finish(state: _State) -> Kernels:
    def mirrored(t: Tensor) -> Tensor:
        return torch.triu(t) + torch.triu(t, 1).T if state.same else t

    return Kernels(mirrored(state.k), mirrored(state.theta), state.q1, state.q2)
