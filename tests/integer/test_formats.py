import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mimicnorm.integer.formats import (
    CHUNK,
    Block,
    aligned,
    chunks,
    divided,
    encoded,
    fitting,
    peak,
    rate,
    shifted,
)


@given(st.integers(1, 2**40), st.integers(-30, 30))
def test_the_largest_value_fills_the_bits_of_its_exponent(largest, exponent):
    by = fitting(largest, exponent) - exponent
    scaled = largest >> by if by >= 0 else largest << -by
    assert 64 <= scaled <= 127


@given(st.lists(st.integers(-(2**20), 2**20), min_size=1), st.integers(0, 8))
def test_a_shift_rounds_to_nearest(values, by):
    exact = [value / 2**by for value in values]
    assert all(abs(a - b) <= 0.5 for a, b in zip(shifted(torch.tensor(values), by).tolist(), exact, strict=True))
    assert shifted(shifted(torch.tensor(values), -by), by).tolist() == values


def test_a_shift_beyond_the_width_is_zero():
    assert shifted(torch.tensor([2**30], dtype=torch.int32), 40).tolist() == [0]


@pytest.mark.parametrize(("own", "unit"), [(10, -20), (0, 0), (0, 3)])  # shifted to the left, as it is, to the right
@pytest.mark.parametrize("count", [2, 4])
def test_sums_saturate_where_they_would_overflow(own, unit, count):
    total = aligned([Block(torch.tensor([2**31 - 1, -(2**31) + 1], dtype=torch.int32), own)] * count, unit)
    assert total.dtype == torch.int32
    assert total[0] > 2**25
    assert total[1] < -(2**25)


@given(st.integers(-(10**6), 10**6), st.integers(1, 1000))
def test_a_quotient_is_the_nearest_integer(value, by):
    assert abs(divided(torch.tensor(value), by).item() - value / by) <= 0.5


@pytest.mark.parametrize("value", [0.1, 5e-4, 3.0, 0.9 / 128, 1.0, 128.5 / 256])
def test_a_rate_is_within_four_thousandths(value):
    m, k = rate(value)
    assert m * 2.0**-k == pytest.approx(value, rel=4e-3)
    assert m < 512


def test_codes_saturate_and_chunks_cover_a_batch():
    assert encoded(torch.tensor([0.5, 100.0, -100.0]), -5).tolist() == [16, 127, -127]
    parts = list(chunks(10, CHUNK // 4))
    assert [p.stop - p.start for p in parts] == [4, 4, 2]
    assert peak(torch.tensor([3, -7], dtype=torch.int8)) == 7
