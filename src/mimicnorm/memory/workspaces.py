"""What a convolution on the CPU allocates and frees again before it returns.

oneDNN computes on copies in a layout of its own, with the channels in blocks as wide as a register. They are gone when
the operation returns, so no count of tensors sees them; where one layer's weights are large beside the activations,
they are the peak. The rules are read off the profiler's events on processors with AVX-512, and the tests compare them;
without it, some weight gradients are computed by other kernels (docs/memory.md). Scratchpads and the buffers of each
thread are small and left out.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def workspace_bytes(func: Any, args: tuple, result: Any) -> int:
    """Return how much more than its results is alive inside an operation: 0 except for convolutions on the CPU."""
    if func is torch.ops.aten.convolution.default:
        x, weight, _, stride, _, _, transposed, _, groups = args
        y, settings, wanted = result, args[2:], None
    elif func is torch.ops.aten.convolution_backward.default:
        y, x, weight, bias_sizes, stride, _, _, transposed, _, groups, wanted = args
        settings = (None, *args[4:10], bias_sizes)
    else:
        return 0
    kernel = _kernel(x, weight, settings)
    if kernel == "Slow2d" and math.prod(weight.shape[2:]) > 1:  # all patches of the batch, side by side
        return len(x) * math.prod(weight.shape[1:]) * math.prod(y.shape[2:]) * x.element_size()
    if kernel != "oneDNN":
        return 0
    copy_x, copy_weight, copy_y = _copies(x, weight, y, groups)
    copies = copy_x + copy_weight + copy_y
    in_place = not copy_y  # channels_last: activations serve as they are
    # What a dense convolution with a stride gives back to its input's side is turned round in two steps.
    two_steps = groups == 1 and max(stride) > 1
    if wanted is None:
        y_bytes = _bytes(y)
        turning = y_bytes * (2 if two_steps and transposed else 1) + copy_y
        return copy_weight if in_place else max(copies, turning) - y_bytes
    x_bytes, weight_bytes, bias_bytes = (_bytes(t) if want else 0 for t, want in zip(result, wanted, strict=True))
    turning = x_bytes * (2 if two_steps and not transposed else 1) + copy_x
    of_x = max(copies, turning) if wanted[0] and not in_place else x_bytes
    of_weight = max(copies, weight_bytes + copy_weight * (2 if in_place else 1)) if wanted[1] else 0
    return max(of_x, x_bytes + of_weight) - x_bytes - weight_bytes - bias_bytes


def _kernel(x: Tensor, weight: Tensor, settings: tuple) -> str | None:
    """Return the kernel that torch chooses for a convolution, by shapes, types and the number of threads."""
    if x.device.type != "cpu" or not x.numel():
        return None
    if x.dim() == 3:  # made two-dimensional, as torch does before it chooses
        bias, stride, padding, dilation, transposed, added, groups, *sizes = settings
        settings = (bias, [1, *stride], [0, *padding], [1, *dilation], transposed, [0, *added], groups, *sizes)
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    name = torch._C._select_conv_backend(x, weight, *settings).name
    return "oneDNN" if name in ("Mkldnn", "???") else name  # the transposed one has no name in Python


def _copies(x: Tensor, weight: Tensor, y: Tensor, groups: int) -> tuple[int, int, int]:
    """Return the bytes of the copies of input, weight and output, their channels filled up to whole blocks."""
    block = 16 if "AVX512" in torch.backends.cpu.get_cpu_capability() else 8
    depthwise = groups > 1 and weight.shape[1] == 1
    colours = x.shape[1] < 4 and max(weight.shape[2:]) > 1  # an image is read as it is

    def copied(tensor: Tensor, *dims: int) -> int:
        filled = dims if groups == 1 or depthwise else ()
        sizes = [-(-n // block) * block if d in filled else n for d, n in enumerate(tensor.shape)]
        return math.prod(sizes) * tensor.element_size()

    of_weight = copied(weight, 0) if depthwise or colours else copied(weight, 0, 1)
    if not x.is_contiguous():
        return 0, of_weight, 0
    return 0 if colours else copied(x, 1), of_weight, copied(y, 1)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
