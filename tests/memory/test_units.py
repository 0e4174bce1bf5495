import pytest

from mimicnorm.errors import MemoryPredictionError
from mimicnorm.memory import format_bytes, parse_bytes

AMOUNTS = {
    "16GiB": 2**34, " 16 gib ": 2**34, "16G": 2**34, "16 g": 2**34, "1.6E+1GiB": 2**34, ".5TiB": 2**39, "1.KiB": 1024,
    "1.5 KB": 1500, "1.5k": 1536, "2MB": 2_000_000, "12b": 12, "16.": 16, "0.6": 1, "1e9": 10**9,
    7: 7, 2**60 + 1: 2**60 + 1, 1e18: 10**18,
}  # fmt: skip
NOT_AMOUNTS = ["", "GiB", "16 gigs", "-3 MiB", "1e", "e9", "inf", ".", "1.2.3 MB", True, "0", 0, -1, "0.4", 0.4]
TOO_LARGE = ["1e30", "1e999", 2**63]


@pytest.mark.parametrize("text", AMOUNTS)
def test_amounts_are_read_with_their_unit(text):
    assert parse_bytes(text) == AMOUNTS[text]


@pytest.mark.parametrize("text", NOT_AMOUNTS + TOO_LARGE)
def test_what_is_not_an_amount_is_refused_with_an_example(text):
    with pytest.raises(MemoryPredictionError, match=r"not an amount of memory.*'16 GiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("count", [1, 1023, 1024, 5 * 2**20, 16 * 2**30, 3 * 2**40])
def test_what_is_written_reads_back_the_same(count):
    assert parse_bytes(format_bytes(count)) == count
