"""Does a sample of a converted network see the others? What no class or tensor gives away, numbers do.

A norm written by hand keeps a network batch-dependent without anything that looks like a BatchNorm. One pass on fake
tensors with a prime as batch size finds the suspects: what comes from data and has no factor of the prime has lost the
batch, and samples may meet where it meets data again. Where there are suspects, real batches that share some of their
samples decide, module by module.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mimicnorm.surgery.aliases import storage_of
from mimicnorm.surgery.example import call_arguments, tensors_in
from mimicnorm.surgery.graph import Graph
from mimicnorm.surgery.isolate import instead_of_forward, run
from mimicnorm.surgery.ops import FACTORIES
from mimicnorm.surgery.record import repeat
from mimicnorm.surgery.recorder import Recorder

# Operations that keep the shape, or choose from it, along a dimension that is an argument.
_ALONG = {
    "_softmax", "_log_softmax", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "sort", "topk", "roll", "flip",
    "gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add", "index_copy", "index_reduce",
    "_fft_r2c", "_fft_c2c", "_fft_c2r",
}  # fmt: skip
_VIEWS = ("view", "_unsafe_view", "_reshape_alias")
_SAMPLES = 11  # enough that a shuffled batch is not by chance as it was, and the size of no other dimension
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}


def watch(model: nn.Module, example: Any, like: Graph) -> tuple[Graph, dict[str, str]] | None:
    """Record a network on fake tensors with a prime as batch size, and see where samples may meet.

    Args:
        model: A network; left as it was. BatchNorms pass their input on, as in every recording.
        example: As for ``record``; the first dimension of its first tensor is taken as the batch.
        like: The graph that was recorded with the example's own batch size.

    Returns:
        The graph; and by the module's name, in order, its first operation across the batch. None where the example
        has no batch dimension that is known (a list of images), or values steer the model.

    Raises:
        Exception: Whatever the network raises on a batch of another size.

    Example:
        >>> class Centred(nn.Module):
        ...     def forward(self, x):
        ...         return x - x.mean(0)
        >>> watch(nn.Sequential(nn.Linear(4, 4), Centred()), (2, 4), Graph())[1]
        {'1': 'sub'}
    """
    call = call_arguments(model, example)
    batch = batch_size(call)
    if batch is None or not like.fake:
        return None
    tensors = (*model.parameters(), *model.buffers(), *tensors_in(call))
    sizes = {size for t in tensors for size in t.shape if size}
    prime = next(p for p in _primes() if all(size % p for size in sizes))
    suspects: dict[str, str] = {}

    def many(t: Tensor) -> Tensor:
        return t.new_empty((prime, *t.shape[1:])) if t.dim() and t.shape[0] == batch else t

    graph = repeat(model, example, like, resize=many, watch=lambda recorder: _Watch(recorder, prime, suspects))
    return graph, suspects


class _Watch(TorchDispatchMode):
    """Follows the batch through a pass by the factor of a prime in the number of elements."""

    def __init__(self, recorder: Recorder, prime: int, suspects: dict[str, str]):
        super().__init__()
        self.recorder, self.prime, self.suspects = recorder, prime, suspects
        self.from_data: dict[int, Tensor] = {}  # memory with what comes from data, and a tensor that keeps it alive
        self.runs: dict[int, set[int]] = {}  # of a dimension that samples share with others, by size: see ``tears``

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__.rstrip("_")
        if name in FACTORIES:
            return result
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        factors = [self.factors(t) for t in inputs]
        lost = any(f > 1 or (f == 0 and storage_of(t) in self.from_data) for t, f in zip(inputs, factors, strict=True))
        batched = [self.factors(t) == 1 for t in outputs if t.numel()]
        if name in _VIEWS and any(batched):
            lost |= self.tears(inputs[0].shape, outputs[0].shape)
        if any(batched) and (lost or self.along_batch(func, name, args, kwargs, all(batched))):
            self.suspects.setdefault(self.recorder.where, name)
        if lost or any(factors):
            self.from_data.update((storage_of(t), t) for t in outputs if self.factors(t) == 0)
        return result

    def factors(self, t: Tensor) -> int:
        """How often the prime is in the number of elements: 1 for samples, 2 for pairs of them."""
        n, factors = t.numel(), 0
        while n and n % self.prime == 0:
            n, factors = n // self.prime, factors + 1
        return factors

    def along_batch(self, func: Any, name: str, args: tuple, kwargs: dict, all_batched: bool) -> bool:
        """Whether an operation that keeps the samples works along them, or may."""
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if func.namespace not in ("aten", "prim", "prims"):
            return True  # a custom kernel
        if x is None or not x.dim():
            return False
        if "batch_norm" in name:
            return any(a is True for a in args) and (x.numel() // x.shape[1]) % self.prime == 0
        if not all_batched:  # what a fused norm returns beside its output: the statistics
            return True
        if name in ("index", "index_put"):
            return any(i is not None and size % self.prime == 0 for i, size in zip(args[1], x.shape, strict=False))
        if name == "masked_scatter":
            return True
        if name == "convolution" or any(kind in name for kind in ("pool", "upsample", "grid_sampler")):
            return any(size % self.prime == 0 for size in x.shape[2:])
        if name == "renorm":  # by norms over all dimensions but one
            return any(size % self.prime == 0 for d, size in enumerate(x.shape) if d != args[2] % x.dim())
        if "scaled_dot_product" in name:
            return args[1].shape[-2] % self.prime == 0
        if name not in _ALONG:
            return False
        dims = given.get("dim", given.get("dims", [] if name == "roll" else -1))  # roll: without any, over all
        dims = dims if isinstance(dims, (list, tuple)) else [dims]
        return any(x.shape[d] % self.prime == 0 for d in dims or range(x.dim()))

    def tears(self, before: Sequence[int], after: Sequence[int]) -> bool:
        """Whether a view puts parts of several samples into one, as ``x.T.view(len(x), -1)`` does.

        A view keeps the order of elements, so as many of a sample follow each other as before. Where samples share a
        dimension with others, as in (samples * time, channels), it is noted how many of its places in a row are of one
        sample. Of a dimension that no view made (a concat of batches), that is not known: both usual ways pass.
        """
        (size, rest), (new_size, new_rest) = self.place(before), self.place(after)
        rows = {run * rest for run in self.runs.get(size, {1, size // self.prime})}
        runs = {row // new_rest for row in rows if row % new_rest == 0}
        if new_size == self.prime:
            return 1 not in runs
        self.runs.setdefault(new_size, set()).update(runs)
        return not runs

    def place(self, shape: Sequence[int]) -> tuple[int, int]:
        """The size of the dimension that samples lie along, and how many elements each of its places has."""
        d = next(d for d, size in enumerate(shape) if size % self.prime == 0)
        return shape[d], math.prod(shape[d + 1 :])


def changes(
    model: nn.Module,
    example: Any,
    names: Iterable[str],
    *,
    ignored: Iterable[str] = (),
    starts: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """How much the output of some samples changes with the others, by module: two real passes, or three.

    Args:
        model: A network; left as it was.
        example: As for ``watch``.
        names: The modules in question, "" for the network itself.
        ignored: Names of modules that are known to mix; they run in evaluation mode.
        starts: By name, the standard deviation of weights that are drawn for these passes: without its BatchNorms, the
            signal of a network that has other weights may be lost among its biases.

    Returns:
        Relative to the output's size, and 0 within rounding. NaN where it cannot be decided: no real tensors, values
        that are not finite, no output with a batch dimension, inputs that differ already, randomness without a seed.

    Example:
        >>> changes(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (2, 4), ["1"])
        {'1': 0.0}
    """
    names = list(dict.fromkeys(names))
    arguments = call_arguments(model, example)
    batch = batch_size(arguments)
    if batch is None or any(t.is_meta for t in (*tensors_in(arguments), *model.parameters(), *model.buffers())):
        return dict.fromkeys(names, math.nan)

    def one_pass(args: tuple, kwargs: dict, shared: Tensor) -> _Calls:
        for name in ignored:
            model.get_submodule(name).eval()
        _draw_weights(model, starts or {})
        calls: _Calls = {name: [] for name in names}
        noted = functools.partial(_noted, calls, {model.get_submodule(name): name for name in names}, shared)
        with instead_of_forward(map(model.get_submodule, names), noted):
            model(*args, **kwargs)
        return calls

    def trial(samples: int) -> dict[str, float]:
        shared = _shared(samples)

        def calls(replace: bool) -> _Calls:
            inputs = pytree.tree_map_only(Tensor, lambda t: _rows(t, batch or 1, shared, replace), arguments)
            return run(model, one_pass, (*inputs, shared), training=True, seed=0, modes=(torch.no_grad(),))

        first, second = calls(replace=False), calls(replace=True)
        relative = {name: _worst(first[name], second[name]) for name in names}
        if changed := [name for name in names if relative[name] > 0]:
            again = calls(replace=False)  # perhaps it does not do the same twice
            relative |= {name: math.nan for name in changed if _worst(first[name], again[name]) != 0}
        return relative

    try:
        return trial(_SAMPLES)
    except Exception:
        if batch < 2:
            raise
        return trial(batch)  # a batch size that is written into the model


_Calls = dict[str, list[tuple[list[Tensor], list[Tensor]]]]  # by module, the shared samples in and out of every call


def _noted(
    calls: _Calls, names: dict[nn.Module, str], shared: Tensor, module: nn.Module, forward: Callable
) -> Callable:
    """A forward that notes the shared samples in its arguments and in its output."""

    def of_shared(values: Any) -> list[Tensor]:
        batched = [t for t in tensors_in(values) if t.is_floating_point() and len(shared) in t.shape]
        return [t.detach().cpu().movedim(t.shape.index(len(shared)), 0)[shared] for t in batched]

    def call(*args: Any, **kwargs: Any) -> Any:
        given = of_shared((args, kwargs))
        output = forward(*args, **kwargs)
        calls[names[module]].append((given, of_shared(output)))
        return output

    return call


def _draw_weights(model: nn.Module, starts: Mapping[str, float]) -> None:
    """Let no parameter be zero, so that branches and heads hide nothing before them."""
    generator = torch.Generator("cpu").manual_seed(0)
    for name, p in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        if kind == "bias" and f"{layer}.weight" in starts:
            p.zero_()
        elif starts.get(name) or not p.any():
            drawn = torch.randn(p.shape, generator=generator, device="cpu", dtype=torch.float32)
            p.copy_((starts.get(name) or 0.1) * drawn)


def _rows(t: Tensor, batch: int, shared: Tensor, replace: bool) -> Tensor:
    """As many samples as are needed of an input, all but the shared ones replaced if so wanted."""
    if not t.dim() or t.shape[0] != batch:
        return t
    t = t[torch.arange(len(shared), device=t.device) % batch]
    if replace and t.is_floating_point():
        t[~shared] = 0.5 - 3 * t[~shared]
    elif replace:
        order = torch.randperm(t.numel(), generator=torch.Generator("cpu").manual_seed(0), device="cpu")
        t[~shared] = t.flatten()[order.to(t.device)].view_as(t)[~shared]
    return t


def _shared(samples: int) -> Tensor:
    """Which samples stay: neither the first nor the last, which others may look at, and no two that a flip swaps."""
    numbers = torch.arange(samples, device="cpu")
    shared = (numbers % 3 == (samples % 3 > 0)) & (numbers > 0) & (numbers < samples - 1)
    shared[samples // 2] |= ~shared.any()
    return shared


def _worst(a: list, b: list) -> float:
    """The largest change of an output over the calls whose inputs agree; NaN if there is none to judge by."""
    pairs = zip(a, b, strict=False)
    judged = [_apart(one[1], other[1]) for one, other in pairs if one[1] and not _apart(one[0], other[0])]
    finite = [change for change in judged if not math.isnan(change)]
    return max(finite) if finite and (max(finite) > 0 or len(finite) == len(judged)) else math.nan


def _apart(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest relative difference of two lists of tensors; NaN if that is not a number."""
    worst, defined = 0.0, True
    for one, other in zip(a, b, strict=True):
        difference = torch.where(one == other, 0.0, one.double() - other.double()).norm()
        relative = float(difference / one.double().norm().clamp_min(1e-30)) if difference else 0.0
        defined &= math.isfinite(relative)
        if _TOLERANCE.get(one.dtype, 1e-4) < relative < math.inf:
            worst = max(worst, relative)
    return worst if defined or worst else math.nan


def batch_size(call: tuple[tuple, dict]) -> int | None:
    """The batch size: of the first argument that is a tensor. In a list of tensors there is no batch dimension."""
    tensors = [t for t in (*call[0], *call[1].values()) if isinstance(t, Tensor) and t.dim()]
    return next((t.shape[0] for t in sorted(tensors, key=lambda t: t.dim() < 2)), None)


def _primes() -> Iterator[int]:
    return (n for n in range(211, 10**6) if all(n % d for d in range(2, math.isqrt(n) + 1)))
