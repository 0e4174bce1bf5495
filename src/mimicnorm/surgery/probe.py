"""Compare numerically, at plan time, what a foreign class does with what would replace it.

A list of known classes cannot tell whether a BatchNorm subclass also applies dropout or an activation, or
whether a convolution with another ``forward`` uses its weight once. A probe can.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.layers import (
    Remains,
    Shift,
    TrainedAffine,
    TrainedNorm,
    centre,
    centre_,
    has_own_forward,
    keep_,
    plain_kind,
    scale_weight_,
)
from mimicnorm.surgery.recorder import is_batch_norm

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class NormProbe:
    """What a BatchNorm does besides normalising.

    Attributes:
        children: The children it runs afterwards, by name.
        channel_dim: The dimension of its input that beta lies along.
    """

    children: tuple[str, ...] = ()
    channel_dim: int = 1


def norm(module: nn.Module, shape: torch.Size | None) -> NormProbe | None:
    """Probe a BatchNorm of any class; None if it does something that nothing can stand for.

    Args:
        module: The BatchNorm.
        shape: What it was called with, if it was seen to run.
    """
    if any(type(module) is known for known in _PLAIN_NORMS):
        return NormProbe()
    twin = _on_cpu(module)
    width = channels(twin)
    beta = torch.randn(width, generator=_generator(), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, value in (("running_mean", 0.0), ("running_var", 1.0), ("weight", 1.0), ("bias", beta)):
            t = getattr(twin, name, None)
            if isinstance(t, Tensor):
                t.copy_(value) if isinstance(value, Tensor) else t.fill_(value)
    twin.eval()
    if isinstance(twin, _BatchNorm) and twin.running_mean is None:  # keeps no statistics: give it some
        twin.running_mean, twin.running_var = beta * 0, beta * 0 + 1
        twin.track_running_stats = True
    has_beta = isinstance(getattr(twin, "bias", None), Tensor)
    if shape is None:
        return _explain(twin, (2, width, 3, 3), beta if has_beta else None)
    small = (2, *(n if n == width else min(n, 4) for n in shape[1:]))  # fewer positions tell as much
    return _explain(twin, small, beta if has_beta else None) or _explain(twin, shape, beta if has_beta else None)


def _explain(twin: nn.Module, shape: tuple[int, ...], beta: Tensor | None) -> NormProbe | None:
    """Which children, after a shift along which dimension, give the same output."""
    x = torch.randn(shape, generator=_generator(), device="cpu", dtype=torch.float32)
    children = dict(twin.named_children())
    try:
        with torch.no_grad():
            expected = twin(x * math.sqrt(1 + float(getattr(twin, "eps", 1e-5))))
            # All children first: in eval mode a dropout looks like nothing.
            for names, dim in itertools.product((tuple(children), ()), (1, -1)):
                if beta is not None and beta.numel() != x.shape[dim]:
                    continue
                shift = Shift(Parameter(beta, requires_grad=False) if beta is not None else None, dim)
                if _same(Remains(shift, {n: children[n] for n in names}).eval()(x.clone()), expected):
                    return NormProbe(names, dim)
    except Exception:  # whatever a foreign module raises on plain data, it is not understood
        return None
    return None


def evaluates_as_affine(module: nn.Module, shape: torch.Size | None, probed: NormProbe) -> bool:
    """Tell whether a BatchNorm, in evaluation mode, is the affine map of its parameters and running statistics.

    Args:
        module: The BatchNorm, with running statistics.
        shape: What it was called with, if it was seen to run.
        probed: What else it does.
    """
    if any(type(module) is known for known in _PLAIN_NORMS):
        return True
    twin: Any = _on_cpu(module).eval()
    width = channels(twin)
    gamma, beta = (None if t is None else Parameter(t.detach()) for t in (twin.weight, twin.bias))
    norm = TrainedNorm(gamma, beta, twin.running_mean, twin.running_var, float(getattr(twin, "eps", 1e-5)))
    small = (2, width, 3, 3) if shape is None else (2, *(n if n == width else min(n, 4) for n in shape[1:]))
    x = torch.randn(small, generator=_generator(), device="cpu", dtype=torch.float32)
    affine = Remains(TrainedAffine(norm, probed.channel_dim), {n: getattr(twin, n) for n in probed.children}).eval()
    try:
        with torch.no_grad():
            return _same(affine(x.clone()), twin(x))
    except Exception:  # whatever a foreign module raises on plain data, it is not understood
        return False


@dataclass(frozen=True)
class LayerProbe:
    """What can be done to a layer with another ``forward`` than PyTorch's.

    Attributes:
        centres: Its weight-mean version equals itself with centred weights.
        scales: ... and a scalar in it multiplies its output.
        scales_uncentred: Uncentred, a scalar on its weight multiplies its output without the bias.
        takes_bias: A bias given to it is added to its output.
        keeps: It can take up the trained BatchNorm after it.
        follows: Twice the weight gives twice the output; not so if the weight is standardised on the way.
    """

    centres: bool
    scales: bool
    takes_bias: bool
    scales_uncentred: bool
    keeps: bool = False
    follows: bool = True


def layer(module: nn.Module, input_shape: torch.Size) -> LayerProbe:
    """Probe a weight layer; PyTorch's own forwards are known to comply, unless a hook writes into the weight."""
    plain = not has_own_forward(type(module))
    if module._forward_pre_hooks and _is_written(module, input_shape):
        return LayerProbe(False, False, False, plain)
    if plain:
        return LayerProbe(True, True, True, True, True)
    x = torch.randn((1, *input_shape[1:]), generator=_generator(), device="cpu", dtype=torch.float32)
    try:
        twin = _on_cpu(module).eval()
        for child in twin.children():
            if is_batch_norm(child):  # it has a plan of its own: trained or not, this is about the layer
                child.forward = torch.clone
        with torch.no_grad():
            return _layer(twin, x)
    except Exception:  # a foreign forward that does not run alone is not understood
        return LayerProbe(False, False, False, False)


def _is_written(module: nn.Module, input_shape: torch.Size) -> bool:
    """Whether a call, with the module's hooks, changes its weight."""
    try:
        twin: Any = _on_cpu(module)
        with torch.no_grad():
            before = twin.weight.normal_(generator=_generator()).clone()
            twin(torch.randn(input_shape, generator=_generator(), device="cpu", dtype=torch.float32))
            return not torch.equal(before, twin.weight)
    except Exception:  # a hook that does not run alone is not understood
        return False


def _layer(twin: Any, x: Tensor) -> LayerProbe:
    if not isinstance(getattr(twin, "weight", None), Parameter):
        return LayerProbe(False, False, False, False)
    twin.weight.normal_(generator=_generator())
    if twin.bias is not None:
        twin.bias.zero_()
    transposed = bool(getattr(twin, "transposed", False))
    centred: Any = copy.deepcopy(twin)
    centred.weight.copy_(centre(twin.weight, groups=getattr(twin, "groups", 1), transposed=transposed))
    expected = centred(x)
    candidate = centre_(copy.deepcopy(twin))
    centres = _same(candidate(x), expected)
    half = Parameter(torch.full_like(expected[:1].flatten()[:1], 0.5), requires_grad=False)
    candidate.register_parameter("residual_scale", half)
    scales = centres and _same(candidate(x), 0.5 * expected)
    with_bias = copy.deepcopy(twin)
    dim = 1 if plain_kind(type(twin)) is not nn.Linear else -1
    bias = torch.randn(expected.shape[dim], generator=_generator(), device="cpu", dtype=torch.float32)
    with_bias.register_parameter("bias", Parameter(bias, requires_grad=False))
    shape = [1] * expected.dim()
    shape[dim] = -1
    takes_bias = _same(with_bias(x), twin(x) + bias.reshape(shape))
    added = with_bias(x) - twin(x)
    scales_uncentred = _same(scale_weight_(copy.deepcopy(with_bias), half)(x), 0.5 * twin(x) + added)
    doubled = copy.deepcopy(twin)
    doubled.weight.mul_(2)
    keeps = dim == 1 and _keeps(with_bias if twin.bias is not None else twin, x, bias)
    return LayerProbe(centres, scales, takes_bias, scales_uncentred, keeps, _same(doubled(x), 2 * twin(x)))


def _keeps(twin: nn.Module, x: Tensor, values: Tensor) -> bool:
    """Whether a layer, given a trained BatchNorm, does what both do."""
    gamma, beta = Parameter(values + 1, requires_grad=False), Parameter(1 - values, requires_grad=False)
    mean, var = values.flip(0), values.square() + 1
    expected = F.batch_norm(twin(x), mean, var, gamma, beta, False, 0.0, 1e-5)
    return _same(keep_(copy.deepcopy(twin), TrainedNorm(gamma, beta, mean, var, 1e-5))(x), expected)


def _on_cpu(module: nn.Module) -> nn.Module:
    """A float copy on the CPU; what was on the meta device is filled with ones."""
    twin = copy.deepcopy(module)
    meta = any(t.is_meta for t in (*twin.parameters(), *twin.buffers()))
    twin = twin.to_empty(device="cpu") if meta else twin.to("cpu")
    if meta:
        for t in (*twin.parameters(), *twin.buffers()):
            t.data.fill_(1)
    return twin.float()


def channels(module: nn.Module) -> int:
    """The channels of a BatchNorm of any class."""
    tensors = [getattr(module, n, None) for n in ("running_mean", "weight")]
    sizes = [t.numel() for t in tensors if isinstance(t, Tensor)]
    return sizes[0] if sizes else int(getattr(module, "num_features", 1))


def _generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(1)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * (1 + float(b.abs().max())))
