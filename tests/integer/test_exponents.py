import torch

from mimicnorm.integer import formats
from mimicnorm.integer.exponents import Watch
from mimicnorm.integer.formats import Block
from mimicnorm.integer.narrow import narrow


def values(*numbers):
    return torch.tensor([numbers], dtype=torch.int32)


def test_the_exponent_follows_the_largest_value_of_any_part():
    watch = Watch()
    for part in (values(3, -1000), values(5, 6)):
        watch.see(formats.peak(part), 2, [Block(part, 2)])
    watch.advance()
    assert watch.exponent == 2 + 3
    watch.forget()
    watch.advance()  # nothing but zeros: as before
    assert watch.exponent == 5


def test_a_sum_that_its_exponent_rounds_to_zero_is_taken_anew():
    small = [Block(values(3, 0), -40), Block(values(0, 5), -40)]
    negative = [Block(values(-32, 0), 0), Block(values(0, 0), 0)]  # -1 in units of 2^5
    positive = [Block(values(32, 0), 0), Block(values(0, 0), 0)]
    for sums, expected in (((small, small), None), ((small, negative), 5), ((positive, small), -6 + 5 - 12 + 12)):
        for order in (sums, sums[::-1]):  # micro-batches come in any order
            watch = Watch()
            watch.exponent = 5
            for terms in order:
                watch.see(narrow(terms, 5, 0, 0, None, None)[1], 5, terms)
            watch.advance()
            assert watch.exponent == expected
    assert Watch().exponent_for(small) == -40


def test_values_that_do_not_fit_are_counted():
    watch = Watch()
    wide = values(127, 128, -128, 1016, 1017)
    for by, low, count in ((0, -127, 5), (0, 0, 4), (3, -127, 2), (4, -127, 0)):
        watch.forget()
        watch.see(formats.peak(wide), 0, [Block(wide, 0)])
        watch.count_saturated(formats.shifted(wide, by).clamp(low, 127).to(torch.int8), by)
        assert (watch.saturated, watch.count) == (count, 5)
