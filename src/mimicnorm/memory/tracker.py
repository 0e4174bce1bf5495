"""Every storage that lives during a training step, from its first tensor to its last."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimicnorm.memory.workspaces import workspace_bytes

# Kernels that return a workspace for the backward pass to which fake tensors give no size.
_UNSIZED = {
    torch.ops.aten.mkldnn_rnn_layer.default,
    torch.ops.aten._cudnn_rnn.default,
    torch.ops.aten.miopen_rnn.default,
}
CATEGORIES = ("parameters", "inputs", "optimizer_state", "gradients", "activations", "temporary")


class UnsizedWorkspaceError(Exception):
    """A fused kernel saves a workspace whose size only a real run shows."""


@dataclass
class _Storage:
    size_bytes: int
    category: str
    saved_by: str | None
    # A weak reference: the count must not keep alive what it counts.
    death: weakref.ref


@dataclass(frozen=True)
class Moment:
    """The bytes alive at one point of the step, by what they are for."""

    phase: str
    """``"forward"``, ``"backward"`` or ``"optimizer"``."""
    parameters: int
    """Parameters and buffers."""
    inputs: int
    """The call arguments, which the caller holds whether or not autograd saves them."""
    optimizer_state: int
    gradients: int
    """What stands in ``.grad`` of a parameter."""
    activations: int
    """What autograd saves for backward."""
    temporary: int
    """The rest: results on their way to the next layer, gradients of activations, copies inside CPU convolutions."""

    @property
    def total(self) -> int:
        """Bytes alive in all."""
        return sum(getattr(self, category) for category in CATEGORIES)


@dataclass(eq=False)
class StorageTracker(TorchDispatchMode):
    """Follow storages below autograd, where forward, backward and optimizer all pass through the dispatcher.

    The same code sees fake and real tensors: a fake tensor has a storage without memory but with a size and a
    life of its own. Tensors on another kind of device than the model's (an optimizer's step counters, offloaded
    activations) are not counted.
    """

    device_type: str
    workspaces: bool = True
    """Whether to count the copies inside convolutions of the CPU."""
    phase: str = "setup"
    timeline: list[Moment] = field(default_factory=list)
    alive_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    """What is alive now, by category."""
    saved_by_module: dict[str, int] = field(default_factory=dict)
    """What was saved for backward when a forward pass ended, of the pass that saved most."""

    def __post_init__(self) -> None:
        """Start with nothing alive."""
        super().__init__()
        self._alive: dict[int, _Storage] = {}

    def add(self, tensor: torch.Tensor, category: str | None = None, saved_by: str | None = None) -> None:
        """Count the storage of a tensor; without a category, as temporary unless it is known as something else."""
        if tensor.device.type != self.device_type or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._alive.get(key)
        if known is None:
            known = _Storage(0, category or "temporary", None, weakref.ref(storage, lambda _: self._drop(key)))
            self._alive[key] = known
        self.alive_bytes[known.category] -= known.size_bytes
        known.size_bytes = storage.nbytes()  # resize_ may have changed it
        known.category = category or known.category
        known.saved_by = known.saved_by or saved_by
        self.alive_bytes[known.category] += known.size_bytes

    def save(self, tensor: torch.Tensor, saver: str) -> None:
        """Count a tensor that autograd packs in the forward pass, unless it belongs to parameters or inputs."""
        self.add(tensor)
        known = self._alive.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if known is not None and known.category == "temporary":
            self.add(tensor, "activations", saver)

    def saved_bytes_by_module(self) -> dict[str, int]:
        """Sum the saved storages that are alive now over the module that saved them first."""
        sums: Counter[str] = Counter()
        for storage in self._alive.values():
            if storage.category == "activations":
                sums[storage.saved_by or ""] += storage.size_bytes
        return dict(sums)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the moments of one phase of the step, and after a forward pass what it saved."""
        before, self.phase = self.phase, phase
        yield
        self._record()
        self.phase = before
        if phase == "forward" and self.alive_bytes["activations"] > sum(self.saved_by_module.values()):
            self.saved_by_module = self.saved_bytes_by_module()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code stay compiled under this mode; torch would run it eagerly otherwise."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run one operation and count the storages it made."""
        self._record()  # what died since the last operation is gone, what it left is alive
        fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args))
        if fake and func in _UNSIZED:
            raise UnsizedWorkspaceError(
                f"the workspace of the fused kernel {func.name()} has no size; within "
                "torch.backends.mkldnn.flags(enabled=False), the plain kernel of the CPU is predicted"
            )
        result = func(*args, **(kwargs or {}))
        if fake and func is torch.ops.aten.native_batch_norm.default:
            result = _with_real_statistics(result, args[1:5])
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor)
        if not _sums_gradients_in_engine(func):
            self._record(workspace_bytes(func, args, result) if self.workspaces else 0)
        return result

    def _drop(self, key: int) -> None:
        storage = self._alive.pop(key)
        self.alive_bytes[storage.category] -= storage.size_bytes

    def _record(self, workspace: int = 0) -> None:
        if self.phase != "setup":
            temporary = self.alive_bytes["temporary"] + workspace
            self.timeline.append(Moment(self.phase, **self.alive_bytes | {"temporary": temporary}))


def _with_real_statistics(result: tuple, parameters: tuple) -> tuple:
    """Give what a BatchNorm saves the type of its weight or running statistics: fake kernels take the input's."""
    dtype = next((tensor.dtype for tensor in parameters if tensor is not None), result[0].dtype)
    return result[0], *(statistic.to(dtype) for statistic in result[1:])


def _sums_gradients_in_engine(func) -> bool:
    """Tell whether autograd's engine itself adds two gradients of one tensor.

    Without a dispatch mode it adds in place whenever nobody else holds one of the two; under one it never does.
    The sum is therefore recorded only when its operands are gone, as they would be.
    """
    if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled():
        return False
    frame = sys._getframe(2)
    # A dispatch mode is called through wrappers of torch.compile; on a GPU the engine has a thread of its own.
    while frame is not None and Path(frame.f_code.co_filename).name in ("eval_frame.py", "_compile.py"):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"
