"""Does a sample of a converted network see the others? What no class or tensor gives away, numbers do.

A norm written by hand keeps a network batch-dependent without anything that looks like a BatchNorm. One pass on fake
tensors with a large prime as batch size finds the suspects: a tensor that comes from data and has no factor of the
prime has lost the batch. Where there are suspects, two real batches that share half of their samples decide.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mimicnorm.example import call_arguments
from mimicnorm.isolate import following, silent, unsynchronised, untouched
from mimicnorm.ops import FACTORIES

_KEEPS_SHAPE = {"_softmax", "_log_softmax", "cumsum", "cumprod", "logcumsumexp", "sort", "roll", "flip", "index"}
_SAMPLES = 8  # few enough to run, and enough that a shuffled batch is not by chance as it was
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3}


def suspects(model: nn.Module, example: Any, ignored: set[str]) -> list[tuple[str, str]]:
    """Where samples may see each other in training mode: (module, operation), in order; a pass on fake tensors.

    Args:
        model: A network; left as it was.
        example: As for ``record``.
        ignored: Names of modules that are known to mix; they run in evaluation mode.

    Raises:
        Exception: Whatever the network raises on a batch of another size.

    Example:
        >>> class Centred(nn.Module):
        ...     def forward(self, x):
        ...         return x - x.mean(0)
        >>> suspects(nn.Sequential(nn.Linear(4, 4), Centred()), (2, 4), set())
        [('1', 'sub')]
    """
    args, kwargs = call_arguments(model, example)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    tensors = [*state.values(), *(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))]
    prime = next(p for p in _primes() if all(size % p for t in tensors for size in t.shape))
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    fake_state: dict[str, Tensor] = {name: fakes.from_tensor(t.detach()) for name, t in state.items()}
    batch = _batch(args, kwargs)
    if batch is None:
        return []

    def many(t: Tensor) -> Tensor:
        fake = fakes.from_tensor(t.detach())
        return fake.new_empty((prime, *t.shape[1:])) if t.dim() and t.shape[0] == batch else fake

    with untouched(model), unsynchronised(), silent(), torch.no_grad():
        _train_but(model, ignored)
        watch = _Watch(model, prime)
        with following(watch.enter, watch.leave), fakes:
            args, kwargs = pytree.tree_map_only(Tensor, many, (args, kwargs))
            with watch:
                torch.func.functional_call(model, fake_state, args, kwargs)
    return watch.suspects


class _Watch(TorchDispatchMode):
    """Follows the batch through a pass by the factor of a prime in the number of elements."""

    def __init__(self, model: nn.Module, prime: int):
        super().__init__()
        self.prime, self.suspects = prime, list[tuple[str, str]]()
        self.names = {id(m): name for name, m in model.named_modules()}
        self.stack: list[str] = []
        self.without: dict[int, Tensor] = {}  # made from data, but not one per sample; ids stay valid while kept
        self.pairs: dict[int, Tensor] = {}  # one element per pair of samples

    def enter(self, module: nn.Module, *_: Any) -> None:
        self.stack.append(self.names.get(id(module), self.stack[-1] if self.stack else ""))

    def leave(self, *_: Any) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in FACTORIES:
            return result
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        from_data = any(self.per_sample(t) or id(t) in self.without for t in tensors)
        lost = any(id(t) in self.without or id(t) in self.pairs for t in tensors)
        for t in outputs:
            if math.gcd(t.numel(), self.prime**2) > self.prime:
                self.pairs[id(t)] = t
            elif self.per_sample(t):
                if lost or self.over_batch(func, name, args, kwargs or {}):
                    self.suspects.append((self.stack[-1] if self.stack else "", name))
            elif from_data:
                self.without[id(t)] = t
        return result

    def per_sample(self, t: Tensor) -> bool:
        return t.numel() > 0 and t.numel() % self.prime == 0

    def over_batch(self, func: Any, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether an operation that keeps the shape works along the batch."""
        if "batch_norm" in name:
            x = args[0]
            return any(a is True for a in args) and (x.numel() // x.shape[1]) % self.prime == 0
        if name not in _KEEPS_SHAPE:
            return False
        x = args[0]
        if name == "index":
            return any(i is not None and size % self.prime == 0 for i, size in zip(args[1], x.shape, strict=False))
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        dims = given.get("dim", given.get("dims", -1))
        return any(x.shape[d] % self.prime == 0 for d in (dims if isinstance(dims, (list, tuple)) else [dims]))


def change(model: nn.Module, example: Any, ignored: set[str]) -> float:
    """How much the output of every other sample changes with the rest, relative to its size; a few real passes.

    Returns:
        0 within rounding; NaN where it cannot be told: no real tensors, values that are not finite, randomness that
        a seed does not fix.

    Example:
        >>> change(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (2, 4), set())
        0.0
    """
    args, kwargs = call_arguments(model, example)
    batch = _batch(args, kwargs)
    leaves = [*pytree.tree_leaves((args, kwargs)), *model.parameters(), *model.buffers()]
    if batch is None or any(isinstance(t, Tensor) and t.is_meta for t in leaves):
        return math.nan

    repeats = -(-_SAMPLES // batch)
    samples = batch * repeats

    def enough(t: Tensor) -> Tensor:
        return torch.cat([t] * repeats) if t.dim() and t.shape[0] == batch else t

    def every_other_changed(t: Tensor) -> Tensor:
        if not t.dim() or t.shape[0] != samples:
            return t
        other = t.clone()
        other[1::2] = 0.5 - 1.5 * t[1::2] if t.is_floating_point() else t[1::2].flip(-1)
        return other

    shared = pytree.tree_map_only(Tensor, enough, (args, kwargs))
    others = pytree.tree_map_only(Tensor, every_other_changed, shared)
    first = _every_other(model, shared, ignored, samples)
    found = _apart(first, _every_other(model, others, ignored, samples))
    if found and _apart(first, _every_other(model, shared, ignored, samples)):
        return math.nan
    return found


def _every_other(model: nn.Module, call: tuple[tuple, dict], ignored: set[str], samples: int) -> list[Tensor]:
    state = {**dict(model.named_parameters()), **{k: b.clone() for k, b in model.named_buffers()}}
    with untouched(model), unsynchronised(), silent(), torch.no_grad():
        _train_but(model, ignored)
        torch.manual_seed(0)
        random.seed(0)
        result = torch.func.functional_call(model, state, *call)
    outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and t.is_floating_point()]
    return [t[::2] for t in outputs if t.dim() and t.shape[0] == samples]


def _apart(a: list[Tensor], b: list[Tensor]) -> float:
    worst = 0.0
    for one, other in zip(a, b, strict=True):
        difference = (one.double() - other.double()).norm() / one.double().norm().clamp_min(1e-30)
        if not difference <= _TOLERANCE.get(one.dtype, 1e-4):
            worst = max(worst, difference.item()) if difference.isfinite() else math.nan
    return worst


def _train_but(model: nn.Module, ignored: set[str]) -> None:
    model.train()
    for name, module in model.named_modules():
        if name in ignored:
            module.eval()


def _batch(args: tuple, kwargs: dict) -> int | None:
    """The batch size: of the first argument that is a tensor. In a list of tensors there is no batch dimension."""
    return next((t.shape[0] for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dim()), None)


def _primes() -> Iterator[int]:
    return (n for n in range(1009, 10**6) if all(n % d for d in range(2, math.isqrt(n) + 1)))
