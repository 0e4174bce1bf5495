"""Compiled modules: compiled again up to the partitioner of ``torch.compile``, which decides what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

# The decompositions and the partitioner of torch.compile's default backend, with its graphs run op by op.
_PARTITION_ONLY = "aot_eager_decomp_partition"


def partition_compiled(model: nn.Module) -> tuple[nn.Module, set[nn.Module]]:
    """Compile what is compiled in a model, up to the partitioner and no further.

    Returns:
        The model without the wrappers that ``torch.compile(module)`` makes, and the modules that are compiled.
    """
    marked = [m for m in model.modules() if isinstance(m, OptimizedModule) or m._compiled_call_impl is not None]
    compiled = {m._orig_mod if isinstance(m, OptimizedModule) else m for m in marked}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, OptimizedModule) and not isinstance(parent, OptimizedModule):
                parent._modules[name] = child._orig_mod
    for module in compiled:
        module._compiled_call_impl = _partitioned_call(module)
    return model._orig_mod if isinstance(model, OptimizedModule) else model, compiled


def _partitioned_call(module: nn.Module) -> Callable[..., Any]:
    def call(*args, **kwargs):
        return module._call_impl(*args, **kwargs)

    # The compiler hangs its cache on the code object and gives up after eight entries. A new code object keeps
    # predictions apart from each other and from what the user compiles.
    call.__code__ = call.__code__.replace()
    return torch.compile(call, backend=_PARTITION_ONLY, dynamic=False)
