from __future__ import annotations

import pytest
import torch

from mimicnorm.compress import kernels
from mimicnorm.compress.codec import Code, Kind, encode


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_fit_into_bytes_and_come_back(bits):
    codes = torch.randint(0, 2**bits, (3, 256), dtype=torch.uint8)
    packed = kernels.packed(codes, bits)
    assert packed.shape == (3, 256 * bits // 8)
    assert torch.equal(kernels.unpacked(packed, bits), codes)


def test_the_hash_is_uniform_and_goes_on_from_row_to_row():
    rows = torch.empty(400, 256)
    u = kernels._uniforms(rows, 0, seed=77)
    assert torch.equal(u[100:], kernels._uniforms(rows[100:], 100, seed=77))
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - 1600) ** 2 / 1600).sum() < 120  # chi squared of 63 degrees of freedom
    for other in (torch.roll(u, 1, 1), torch.roll(u, 1, 0), kernels._uniforms(rows, 0, seed=78)):
        assert abs(torch.corrcoef(torch.stack([u.flatten(), other.flatten()]))[0, 1]) < 0.015


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, -5])
def test_any_seed_folds_to_one_that_is_not_0(seed):
    assert -(2**31) <= kernels.fold_seed(seed) < 2**31
    assert kernels.fold_seed(seed)


def test_without_a_compiler_the_kernels_run_uncompiled_and_say_so(monkeypatch):
    def no_compiler(*_):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(kernels, "_compiled", no_compiler)
    monkeypatch.setattr(kernels, "_broken", [])
    x = torch.randn(kernels.COMPILED_FROM + 9).relu()
    with pytest.warns(UserWarning, match="run uncompiled.*no C"):
        payload = encode(x, Code(Kind.ABOVE, 8), seed=0)
    assert torch.allclose(payload.decode(), x, atol=0.02)  # and no second warning
