"""What must hold before a network can be planned: arguments that make sense, a plain module of plain parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DataParallel, DistributedDataParallel

from mimicnorm.errors import MimicNormError, RefusedError
from mimicnorm.layers import Derived, LastNorm
from mimicnorm.surgery.recorder import is_batch_norm

Where = Callable[[nn.Module, str], bool]
_FEW_BATCHES = 10  # that a constructor may run
_INITS = ("auto", "theory", "calibrate", "keep", None)


def accepts(where: Where, module: nn.Module, name: str) -> bool:
    """Ask a user's ``where`` about a BatchNorm; an exception of its own is reported with the BatchNorm's name."""
    try:
        inspect.signature(where).bind(module, name)
    except TypeError as error:
        raise MimicNormError(f"where must take (module, qualified_name): {error}") from error
    except ValueError:  # a builtin without a signature
        pass
    try:
        return bool(where(module, name))
    except Exception as error:
        raise MimicNormError(f"where= raised on {name!r}: {type(error).__name__}: {error}") from error


def check_arguments(model: Any, init: Any, where: Any, allow_mixing: Any) -> None:
    """Raise for arguments of ``plan`` that mean nothing, and for a model that must be unwrapped first."""
    if not isinstance(model, nn.Module):
        raise MimicNormError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if init not in _INITS:
        raise MimicNormError(f'init={init!r}; use "auto", "theory", "calibrate", "keep" or None')
    if where is not None and not callable(where):
        raise MimicNormError("where must be a function (module, qualified_name) -> bool")
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    if isinstance(allow_mixing, str) or not isinstance(allow_mixing, Collection) or set(allow_mixing) - names:
        raise MimicNormError(
            f"allow_mixing={allow_mixing!r}; use a tuple of qualified module names, such as ('encoder.norm',): see "
            "model.named_modules()"
        )
    if torch.is_inference_mode_enabled():
        raise MimicNormError("parameters made inside torch.inference_mode cannot be trained: call this outside of it")
    for name, m in model.named_modules():
        if isinstance(m, (DistributedDataParallel, DataParallel)):
            raise RefusedError(
                f"{name or 'the model'} is wrapped in {type(m).__name__}. Convert the .module inside, then wrap it."
            )
        if isinstance(m, torch._dynamo.OptimizedModule):
            raise RefusedError(f"{name or 'the model'} is compiled. Convert the plain module, then torch.compile it.")
        if isinstance(m, torch.jit.ScriptModule) and any(is_batch_norm(child) for child in m.modules()):
            raise RefusedError(f"{name or 'the model'} is a TorchScript module. Convert the Python module behind it.")
        if type(m).__module__.startswith("torch.ao.") and "FakeQuant" in type(m).__name__:
            raise RefusedError("the model is prepared for quantised training (QAT). Convert first, then prepare_qat.")
        if isinstance(m, LazyModuleMixin) and m.has_uninitialized_params():  # pyrefly: ignore
            raise RefusedError(f"{name or 'the model'} is lazy and has no shape yet. Run the model once, then convert.")
        if type(m).__name__.startswith("FSDP"):
            raise RefusedError(f"{name or 'the model'} is sharded ({type(m).__name__}). Convert first, then shard.")
        if isinstance(m, (Derived, LastNorm)) or "_mimicnorm" in m.__dict__:
            raise RefusedError(
                f"{name or 'the model'} was converted before. Convert a fresh model; "
                "to set its initial weights again use mimicnorm.init_."
            )
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if t.is_inference():
            raise RefusedError(
                f"{name} was made inside torch.inference_mode, so it cannot be trained. Build the model outside."
            )


def looks_trained(norm: nn.Module) -> bool:
    """Tell whether a BatchNorm has been trained.

    Its running statistics have moved, and more than a few batches were seen or its affine parameters differ between
    channels. A constructor that runs a forward pass, or a lazy network that ran once, is not training. Without
    statistics, betas that differ decide.
    """
    mean, var, gamma, beta = (getattr(norm, name, None) for name in ("running_mean", "running_var", "weight", "bias"))
    if not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return differs(beta)
    if mean.is_meta or var.is_meta or not bool((mean != 0).any() or (var != 1).any()):
        return False
    batches = getattr(norm, "num_batches_tracked", None)
    a_few = isinstance(batches, Tensor) and not batches.is_meta and 0 < int(batches) <= _FEW_BATCHES
    return not a_few or differs(gamma) or differs(beta)


def differs(values: Any) -> bool:
    """Tell whether values are known and not all the same."""
    return isinstance(values, Tensor) and not values.is_meta and bool((values != values.flatten()[0]).any())
