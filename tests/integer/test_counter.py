import pytest
import torch

from mimicnorm.integer.counter import key, random_bits, stochastic_shift
from mimicnorm.integer.formats import CHUNK


def test_bits_depend_on_the_index_alone():
    whole = random_bits(key(1, 2, "a"), 0, 3 * CHUNK, 12)
    for first, count in ((0, 5), (CHUNK - 3, 10), (2 * CHUNK, CHUNK)):
        assert torch.equal(whole[first : first + count], random_bits(key(1, 2, "a"), first, count, 12))


@pytest.mark.parametrize("bits", [1, 8, 24])
def test_bits_are_uniform_and_differ_between_keys(bits):
    values = random_bits(key(0), 0, 2**16, bits).double()
    half = (2.0**bits - 1) / 2
    assert values.min() >= 0
    assert values.max() < 2**bits
    assert abs(values.mean() / half - 1) < 0.02
    other = random_bits(key(1), 0, 2**16, bits).double()
    assert abs(torch.corrcoef(torch.stack([values, other]))[0, 1]) < 0.02


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_stochastic_rounding_is_right_on_average(dtype):
    data = torch.full((2**16,), -205, dtype=dtype)
    rounded = stochastic_shift(data, 8, key("x"))
    assert set(rounded.tolist()) == {-1, 0}
    assert rounded.double().mean().item() == pytest.approx(-205 / 256, abs=0.01)
    assert stochastic_shift(data[:2], 8, None).tolist() == [-1, -1]


def test_more_bits_than_the_hash_has_are_dropped_first():
    data = torch.full((2**16,), 3 << 38, dtype=torch.int64)
    assert stochastic_shift(data, 40, key("x")).double().mean().item() == pytest.approx(0.75, abs=0.01)
    assert stochastic_shift(torch.tensor([3]), -2, key("x")).tolist() == [12]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_shifted_beyond_the_width_saturates(dtype):
    data = torch.tensor([2**29, -(2**29), 0], dtype=dtype)
    most = 2 ** (torch.iinfo(dtype).bits - 2)
    assert stochastic_shift(data, -50, key("x")).tolist() == [most, -most, 0]
