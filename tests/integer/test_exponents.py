import torch

from mimicnorm.integer.exponents import Watch
from mimicnorm.integer.formats import Block


def values(*numbers):
    return torch.tensor([numbers], dtype=torch.int32)


def test_the_exponent_follows_the_largest_value_of_any_part():
    watch = Watch()
    for part in (values(3, -1000), values(5, 6)):
        watch.see(part, [Block(part, 2)], 2)
    watch.advance()
    assert watch.exponent == 2 + 3
    watch.forget()
    watch.advance()  # nothing but zeros: as before
    assert watch.exponent == 5


def test_a_sum_that_its_exponent_rounds_to_zero_is_taken_anew():
    small = [Block(values(3, 0), -40), Block(values(0, 5), -40)]
    zero = values(0, 0)
    for sums, expected in (((zero, zero), None), ((zero, values(-1, 0)), 5), ((values(1, 0), zero), -6 + 5 - 12 + 12)):
        for order in (sums, sums[::-1]):  # micro-batches come in any order
            watch = Watch()
            watch.exponent = 5
            for wide in order:
                watch.see(wide, small, 5, max(int(wide.max()), 0))
            watch.advance()
            assert watch.exponent == expected
    assert Watch().exponent_for(small) == -40


def test_values_that_do_not_fit_are_counted():
    watch = Watch()
    wide = values(127, 128, -128, 1016, 1017)
    for by, negative, count in ((0, True, 4), (0, False, 3), (3, True, 1), (4, True, 0)):
        watch.forget()
        watch.see(wide, [Block(wide, 0)], 0)
        watch.count_saturated(wide, by, negative)
        assert (watch.saturated, watch.count) == (count, 5)
