"""``saved_activations`` and ``enable_``: saved-tensor hooks that hand the graph payloads in place of activations."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.autograd.graph import saved_tensors_hooks

from mimicnorm.compress.codec import BITS
from mimicnorm.compress.roles import Roles
from mimicnorm.compress.store import Hooks, Store
from mimicnorm.errors import CompressionError

_passes = itertools.count()  # of this process: each has random numbers of its own


def require_bits(bits: Any) -> int:
    """Return a width that activations can be saved in, or raise."""
    if bits not in (*BITS, 32) or isinstance(bits, bool):
        raise CompressionError(f"bits={bits!r}: use 8, 4 or 2, or 32 for what costs no precision at all")
    return int(bits)


class saved_activations:
    """Save activations in few bits during the forward pass inside; the backward pass may run anywhere.

    In a network of ReLUs, convolutions and linear layers the gradient that flows back stays exact: rounding enters only
    each layer's own weight gradient. Behind SiLU, GELU, norms and gates it enters what flows back, too.

    Args:
        bits: 8, 4 or 2 per number, and a scale per 256 numbers. Inputs of SiLU, GELU and their like take 8 at least.
            With 32 no number is rounded: pooling saves places in windows, and activations their outputs alone.
        seed: Decides stochastic rounding, below 8 bits. By default it follows from ``torch.manual_seed`` and the number
            of forward passes before; give one per step to resume a run bit for bit.

    Raises:
        CompressionError: On leaving, if a compiled model ran inside: its saved tensors have no roles, so nothing of it
            is compressed. In the backward pass, if it is itself to be differentiated.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        >>> with saved_activations(bits=8):
        ...     loss = net(torch.randn(4, 3, 32, 32)).sum()
        >>> loss.backward()
    """

    def __init__(self, bits: int = 8, *, seed: int | None = None):
        self.bits, self.seed = require_bits(bits), seed

    def __enter__(self) -> saved_activations:
        outer = _top_hooks()
        if outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint":
            self._mode = None  # this forward pass will run again: there is nothing to save
            return self
        seed = torch.initial_seed() + (next(_passes) << 20) if self.seed is None else self.seed
        self._store = Store(seed, outer)
        pack = _outside_modes(self._store.pack)
        self._hooks = saved_tensors_hooks(pack, lambda saved: saved.tensor())
        self._mode = Roles(self._store, self.bits, lambda: (_top_hooks() or (None,))[0] is pack)
        self._store.saves_in_role = self._mode.saves_in_role
        self._hooks.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self._mode is None:
            return
        self._mode.__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)
        self._store.clear()
        if self._mode.ran_compiled and kind is None:
            raise CompressionError(
                "a compiled model ran inside of saved_activations. What it saves has lost its role, so none of it is "
                "compressed: run the model itself, not torch.compile of it (the codec's own kernels are compiled)"
            )


def _top_hooks() -> Hooks | None:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _outside_modes(pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Keep what a hook does with tensors from the modes of the forward pass, ours among them."""

    def packed(tensor: Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return pack(tensor)

    return packed


def enable_(model: nn.Module, bits: int = 8, *, seed: int | None = None) -> Enabled:
    """Run every forward pass of a model in ``saved_activations``; returns a handle whose ``remove()`` ends that.

    Args:
        model: Not compiled; to be wrapped in DistributedDataParallel afterwards, if at all.
        bits: As for ``saved_activations``.
        seed: Of the first forward pass; those after it count on.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> handle = enable_(net, bits=4)
        >>> net(torch.randn(4, 3, 32, 32)).sum().backward()
        >>> handle.remove()
    """
    require_bits(bits)
    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule) or module._compiled_call_impl is not None:
            raise CompressionError(
                f"{name or type(module).__name__!r} is compiled, and what compiled code saves has lost its role: "
                "enable the model without torch.compile"
            )
    return Enabled(model, bits, seed)


class Enabled:
    """What ``enable_`` did to a model: each forward pass runs in ``saved_activations``; one may run inside another."""

    def __init__(self, model: nn.Module, bits: int, seed: int | None):
        self.bits, self.seed = bits, seed
        self._open: list[saved_activations] = []
        self.before = model.register_forward_pre_hook(self._enter)
        self.after = model.register_forward_hook(self._exit, always_call=True)

    def remove(self) -> None:
        """Save activations as PyTorch does again."""
        self.before.remove()
        self.after.remove()

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        context = saved_activations(self.bits, seed=self.seed)
        if self.seed is not None:
            self.seed += 2**20
        self._open.append(context.__enter__())

    def _exit(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self._open.pop().__exit__(*sys.exc_info())
