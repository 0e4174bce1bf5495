from __future__ import annotations

import random

import pytest
from scipy.stats import ttest_ind

from mimicnorm.compare.intervals import difference, median


@pytest.mark.parametrize(("n", "rank"), [(1, 1), (3, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_a_median_lies_between_the_order_statistics_of_the_binomial_table(n, rank):
    values = list(range(1, n + 1))
    random.Random(0).shuffle(values)
    assert median(values)[1:] == (rank, n + 1 - rank)


def test_a_difference_of_means_is_welchs():
    value, low, high = difference([4.0, 5.0, 6.0], [1.0, 2.0, 3.0])
    reach = 2.7764 * (2 / 3) ** 0.5  # Student's t of 4 degrees of freedom, from a table
    assert (value, low, high) == pytest.approx((3.0, 3.0 - reach, 3.0 + reach), abs=1e-4)
    a, b = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9], [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8]
    welch = ttest_ind(a, b, equal_var=False).confidence_interval()
    assert difference(a, b)[1:] == pytest.approx((welch.low, welch.high))


def test_one_seed_has_no_interval_and_equal_seeds_have_an_empty_one():
    assert difference([1.0], [1.0, 2.0]) is None
    assert difference([2.0, 2.0], [1.0, 1.0]) == (1.0, 1.0, 1.0)
