"""Compare numerically, at plan time, what a foreign class does with what would replace it.

A list of known classes cannot tell whether a BatchNorm subclass also applies dropout or an activation, or
whether a convolution with a ``forward`` of its own uses its weight once. A probe can.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm

from mimicnorm.layers import Remains, centre, centre_, has_own_forward, plain_kind

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def remains(norm: nn.Module, shape: torch.Size | None) -> list[str] | None:
    """The children a BatchNorm runs besides normalising: none, all in order, or None if it does something else.

    Args:
        norm: A BatchNorm of any class.
        shape: The shape of its input, if it was seen to run.
    """
    if any(type(norm) is known for known in _PLAIN_NORMS):
        return []
    twin = _on_cpu(norm)
    width = _tensor(twin, "running_mean", "weight").numel()
    with torch.no_grad():
        for name, value in (("running_mean", 0.0), ("running_var", 1.0), ("weight", 1.0), ("bias", 0.0)):
            t = getattr(twin, name, None)
            if isinstance(t, Tensor):
                t.fill_(value)
    twin.eval()
    if isinstance(twin, _BatchNorm) and twin.running_mean is None:  # keeps no statistics: compare normalised data
        twin.running_mean, twin.running_var = torch.zeros(width), torch.ones(width)
        twin.track_running_stats = True
    small = (2, width, 3, 3) if shape is None else (2, shape[1], *(min(n, 4) for n in shape[2:]))
    x = torch.randn(small, generator=_generator())
    try:
        with torch.no_grad():
            expected = twin(x * math.sqrt(1 + float(getattr(twin, "eps", 1e-5))))
            children = dict(twin.named_children())
            for names in (list(children), []):  # children first: in eval mode a dropout looks like nothing
                rest = Remains(None, {n: children[n] for n in names}).eval()
                if _same(rest(x.clone()), expected):
                    return names
    except Exception:  # whatever a foreign module raises on plain data, it is not understood
        return None
    return None


@dataclass(frozen=True)
class LayerProbe:
    """What a layer with a ``forward`` of its own lets be done to it.

    Attributes:
        centres: Its weight-mean version equals itself with centred weights.
        scales: ... and a scalar in it multiplies its output.
        takes_bias: A bias given to it is added to its output.
    """

    centres: bool
    scales: bool
    takes_bias: bool


def layer(module: nn.Module, input_shape: torch.Size) -> LayerProbe:
    """Probe a weight layer; PyTorch's own forwards are known to comply."""
    if not has_own_forward(type(module)):
        return LayerProbe(True, True, True)
    twin = _on_cpu(module).eval()
    x = torch.randn((1, *input_shape[1:]), generator=_generator())
    try:
        with torch.no_grad():
            return _layer(twin, x)
    except Exception:  # a foreign forward that does not run alone is not understood
        return LayerProbe(False, False, False)


def _layer(twin: Any, x: Tensor) -> LayerProbe:
    if not isinstance(getattr(twin, "weight", None), Parameter):
        return LayerProbe(False, False, False)
    twin.weight.normal_(generator=_generator())
    if twin.bias is not None:
        twin.bias.zero_()
    transposed = bool(getattr(twin, "transposed", False))
    centred: Any = copy.deepcopy(twin)
    centred.weight.copy_(centre(twin.weight, groups=getattr(twin, "groups", 1), transposed=transposed))
    expected = centred(x)
    candidate = centre_(copy.deepcopy(twin))
    centres = _same(candidate(x), expected)
    candidate.register_parameter("residual_scale", Parameter(torch.tensor([0.5]), requires_grad=False))
    scales = centres and _same(candidate(x), 0.5 * expected)
    with_bias = copy.deepcopy(twin)
    bias = torch.randn(expected.shape[1 if plain_kind(type(twin)) is not nn.Linear else -1], generator=_generator())
    with_bias.register_parameter("bias", Parameter(bias, requires_grad=False))
    shape = [1] * expected.dim()
    shape[1 if plain_kind(type(twin)) is not nn.Linear else -1] = -1
    return LayerProbe(centres, scales, _same(with_bias(x), twin(x) + bias.reshape(shape)))


def _on_cpu(module: nn.Module) -> nn.Module:
    """A float copy on the CPU; what was on the meta device is filled with ones."""
    twin = copy.deepcopy(module)
    meta = any(t.is_meta for t in (*twin.parameters(), *twin.buffers()))
    twin = twin.to_empty(device="cpu") if meta else twin.to("cpu")
    if meta:
        for t in (*twin.parameters(), *twin.buffers()):
            t.data.fill_(1)
    return twin.float()


def _tensor(module: nn.Module, *names: str) -> Tensor:
    found = [getattr(module, n, None) for n in names]
    return next((t for t in found if isinstance(t, Tensor)), torch.ones(getattr(module, "num_features", 1)))


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-4 * (1 + float(b.abs().max())))
