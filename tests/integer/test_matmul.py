import pytest
import torch

from mimicnorm.integer import matmul as module
from mimicnorm.integer.matmul import ROWS, column_sums, fast, matmul


def codes(*shape, seed=0):
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("m", [1, 2, 33])
@pytest.mark.parametrize("k", [1, 27, 144])
@pytest.mark.parametrize("n", [1, 2, 100])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products_are_exact_for_every_shape_and_stride(m, k, n, transposed):
    a = codes(k, m).t() if transposed[0] else codes(m, k)
    b = codes(n, k, seed=1).t() if transposed[1] else codes(k, n, seed=1)
    out = torch.empty(m, n, dtype=torch.int32)
    assert torch.equal(matmul(a, b).long(), a.long() @ b.long())
    assert torch.equal(matmul(a, b, out=out).long(), a.long() @ b.long())


def test_the_longest_sum_fits():
    a, b = (torch.full((2, ROWS), 127, dtype=torch.int8) for _ in range(2))
    assert (matmul(a, b.t()) == 127 * 127 * ROWS).all()
    assert 127 * 127 * ROWS < 2**31


def test_a_product_that_saturates_is_noticed_and_replaced(monkeypatch):
    right = torch._int_mm

    def saturating(a, b, **options):  # what a CPU without VNNI does to the sum of two products
        del options
        return right(a, b).clamp(-(2**15), 2**15 - 1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    fast.cache_clear()
    try:
        assert not fast()
        a = torch.full((2, 200), 127, dtype=torch.int8)
        assert (matmul(a, a.t()) == 127 * 127 * 200).all()
    finally:
        monkeypatch.undo()
        fast.cache_clear()


def test_column_sums(monkeypatch):
    monkeypatch.setattr(module, "ROWS", 7)
    x = codes(20, 5)
    assert torch.equal(column_sums(x), x.long().sum(0))
