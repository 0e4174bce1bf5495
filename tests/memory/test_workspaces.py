"""The workspaces of convolutions against the profiler's memory events, one operation at a time."""

import pytest
import torch
from profiled_step import profiled_workspace

from mimicnorm.memory.workspaces import workspace_bytes

AVX512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
# (batch, channels in, out, kernel, pixels), and what differs from a plain dense convolution
CASES = {
    "weights outweigh": ((8, 512, 512, 3, 4), {}),
    "activations outweigh": ((8, 64, 64, 3, 28), {}),
    "strided": ((8, 64, 128, 3, 28), {"stride": 2}),
    "pointwise, few samples": ((8, 64, 64, 1, 28), {}),
    "pointwise, many samples": ((16, 64, 64, 1, 28), {}),
    "odd channels": ((8, 30, 24, 3, 28), {}),
    "depthwise": ((8, 96, 96, 3, 28), {"groups": 96}),
    "depthwise, strided": ((8, 96, 96, 3, 28), {"groups": 96, "stride": 2}),
    "grouped": ((8, 104, 104, 3, 28), {"groups": 13, "stride": 2}),
    "image": ((8, 3, 64, 7, 56), {"stride": 2, "wanted": (False, True, False)}),
    "frozen weight": ((8, 64, 128, 3, 28), {"stride": 2, "wanted": (True, False, False)}),
    "bias": ((8, 64, 64, 3, 28), {"bias": True, "wanted": (True, True, True)}),
    "transposed": ((8, 64, 64, 3, 14), {"transposed": True}),
    "transposed, strided": ((8, 64, 32, 3, 14), {"transposed": True, "stride": 2}),
    "channels last": ((8, 128, 128, 3, 14), {"layout": torch.channels_last}),
    "one dimension": ((8, 64, 64, 3, 512), {"dims": 1, "stride": 2}),
    "three dimensions": ((8, 16, 32, 3, 12), {"dims": 3}),
    "double precision": ((8, 16, 16, 3, 28), {"dtype": torch.float64}),
    "one small sample": ((1, 8, 8, 3, 28), {}),
}


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each further one has buffers of its own
    yield
    torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="without oneDNN")
@pytest.mark.parametrize("case", CASES)
def test_what_a_convolution_holds_inside_is_known(case):
    if case == "three dimensions" and not AVX512:
        pytest.skip("without AVX-512, oneDNN computes this weight's gradient by another kernel (docs/memory.md)")
    (batch, inputs, outputs, kernel, pixels), other = CASES[case]
    dims, groups, transposed = other.get("dims", 2), other.get("groups", 1), other.get("transposed", False)
    stride, dtype, layout = (other.get(key) for key in ("stride", "dtype", "layout"))
    channels = (inputs, outputs // groups) if transposed else (outputs, inputs // groups)
    x = torch.randn(batch, inputs, *[pixels] * dims, dtype=dtype)
    weight = torch.randn(*channels, *[kernel] * dims, dtype=dtype)
    if layout is not None:
        x, weight = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    bias = torch.randn(outputs) if other.get("bias") else None
    stride = stride or 1
    added = [stride - 1 if transposed else 0] * dims
    settings = ([stride] * dims, [kernel // 2] * dims, [1] * dims, transposed, added, groups)

    args = (x, weight, bias, *settings)
    y, real = profiled_workspace(lambda: FORWARD(*args))
    assert workspace_bytes(FORWARD, args, y) == pytest.approx(real, rel=0.01, abs=20_000)

    wanted = list(other.get("wanted", (True, True, False)))
    args = (torch.randn_like(y), x, weight, [outputs] if bias is not None else None, *settings, wanted)
    result, real = profiled_workspace(lambda: BACKWARD(*args))
    assert workspace_bytes(BACKWARD, args, result) == pytest.approx(real, rel=0.01, abs=20_000)


def test_nothing_else_has_one():
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    assert workspace_bytes(torch.ops.aten.mm.default, (x, weight), x @ weight) == 0
    fake = torch.empty(4, 8, 9, 9, device="meta")
    args = (fake, torch.empty(8, 8, 3, 3, device="meta"), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert workspace_bytes(FORWARD, args, fake) == 0
