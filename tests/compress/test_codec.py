from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mimicnorm.compress import codec, kernels
from mimicnorm.compress.codec import Code, Kind, encode

KINDS = {
    Kind.ABOVE: (Code(Kind.ABOVE, 8), torch.relu),
    Kind.BETWEEN: (Code(Kind.BETWEEN, 8, 0.0, 6.0), torch.nn.functional.relu6),
    Kind.SIGNED: (Code(Kind.SIGNED, 8), lambda x: x),
}


def numbers(kind: Kind, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return KINDS[kind][1]((torch.randn(count) * 3).to(dtype))


def code_of(kind: Kind, bits: int) -> Code:
    code = KINDS[kind][0]
    return Code(kind, bits, code.low, code.high)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("count", [1, 255, 256, 257, 100_000])
def test_bounds_are_exact_and_the_rest_is_near(kind, bits, count):
    x = numbers(kind, count)
    code = code_of(kind, bits)
    payload = encode(x, code, seed=3)
    y = payload.decode()
    assert torch.equal(y > 0, x > 0)
    if kind is Kind.BETWEEN:
        assert torch.equal(y >= 6, x >= 6)
        assert torch.equal(y[x >= 6], x[x >= 6])
    steps = {Kind.ABOVE: 2**bits - 2, Kind.BETWEEN: 2**bits - 3, Kind.SIGNED: 2 ** (bits - 1) - 1}[kind]
    groups = torch.nn.functional.pad(x.abs(), (0, -count % 256)).view(-1, 256)
    step = (groups.amax(1, keepdim=True) * 1.01 / steps).expand_as(groups).reshape(-1)[:count]
    assert ((y - x).abs() <= step * (0.51 if bits == 8 else 1.01)).all()
    assert payload.codes.nbytes + payload.scales.nbytes == code.payload_bytes(count)


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("bits", [4, 2])
def test_rounding_below_8_bits_is_unbiased(kind, bits):
    x = numbers(kind, 4096)
    draws = torch.stack([encode(x, code_of(kind, bits), seed=s).decode() for s in range(400)]).double()
    single, mean = (draws[0] - x), (draws.mean(0) - x)
    assert mean.norm() < 1.2 * single.norm() / 20  # as that of 400 independent draws without bias
    assert abs(mean.mean()) < 4 * mean.std() / 64


@pytest.mark.parametrize("bits", [4, 2])
def test_equal_numbers_are_rounded_independently(bits):
    """A hash of the value alone would round all of them alike."""
    x = torch.full((256 * 64,), 0.3)
    x[::256] = 1.0
    error = encode(x, Code(Kind.ABOVE, bits), seed=1).decode() - x
    inner = error.view(-1, 256)[:, 1:]
    assert abs(inner.mean()) < 4 * inner.std() / inner.numel() ** 0.5
    assert abs((inner[:, 1:] * inner[:, :-1]).mean()) < 0.03 * inner.var()


def test_a_seed_decides_the_rounding():
    x, code = numbers(Kind.ABOVE, 1000), Code(Kind.ABOVE, 4)
    first, again, other = (encode(x, code, seed=s).codes for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", Kind)
def test_other_types_come_back_as_they_were(kind, dtype):
    x = numbers(kind, 777, dtype)
    y = encode(x, code_of(kind, 8), seed=0).decode()
    assert y.dtype == dtype
    assert torch.equal(y > 0, x > 0)
    assert (y - x).norm() < 0.01 * x.norm()


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kind", Kind)
def test_a_gate_reads_the_codes(kind, bits):
    x, grad = numbers(kind, 1000), torch.randn(1000)
    code = code_of(kind, bits)
    passed = code.gate(grad, encode(x, code, seed=0).codes, 1.0, 0.5)
    inside = (x > 0) & (x < 6) if kind is Kind.BETWEEN else x > 0
    assert torch.equal(passed, torch.where(inside, grad, grad * 0.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", Kind)
def test_what_is_not_finite_is_not_hidden(kind, bad):
    x = numbers(kind, 512)
    x[3] = bad
    y = encode(x, code_of(kind, 8), seed=0).decode()
    if not (kind is Kind.BETWEEN and bad == float("inf")):  # an infinite number is beyond its bound
        assert not y[:256].isfinite().all()
    assert y[256:].isfinite().all()


def test_zeros_and_tiny_numbers():
    x = torch.tensor([0.0, 1e-38, 1e-42, 0.0]).repeat(64)
    y = encode(x, Code(Kind.ABOVE, 8), seed=0).decode()
    assert torch.equal(y > 0, x > 0)
    assert y.max() < 1e-29


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_fake_tensors_have_the_sizes_of_real_ones(bits):
    code, real = Code(Kind.SIGNED, bits), torch.randn(1000)
    with FakeTensorMode():
        fake = encode(torch.empty(1000), code, seed=0)
        flat = fake.decode()
        gated = code.gate(flat, fake.codes, 1.0, 0.0)
    payload = encode(real, code, seed=0)
    assert (fake.codes.shape, fake.scales.shape) == (payload.codes.shape, payload.scales.shape)
    assert flat.shape == gated.shape == real.shape
    assert flat.dtype == real.dtype


@pytest.mark.slow
@pytest.mark.parametrize("kind", Kind)
def test_compiled_kernels_do_the_same(kind, monkeypatch):
    count = kernels.COMPILED_FROM + 100
    x, grad, code = numbers(kind, count), torch.randn(count), code_of(kind, 4)
    compiled = codec.encode(x, code, seed=9)
    decoded, gated = compiled.decode(), code.gate(grad, compiled.codes, 1.0, 0.0)
    assert not kernels._broken
    monkeypatch.setattr(kernels, "COMPILED_FROM", 2**40)
    eager = codec.encode(x, code, seed=9)
    differs = (compiled.codes != eager.codes).float().mean()
    assert differs < 1e-4  # a product and a sum in one instruction are rounded once
    payload = codec.Payload(code, compiled.codes, compiled.scales, count, x.dtype)
    assert torch.allclose(decoded, payload.decode(), rtol=1e-6)
    assert torch.equal(gated, code.gate(grad, compiled.codes, 1.0, 0.0))
