from __future__ import annotations

import random
import statistics

import pytest

from mimicnorm.compare.intervals import difference, median, student


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (30, 10), (100, 40)])
def test_a_median_lies_between_the_order_statistics_of_the_binomial_table(n, rank):
    values = list(range(1, n + 1))
    random.Random(0).shuffle(values)
    assert median(values)[1:] == (rank, n + 1 - rank)


def test_few_values_give_their_whole_range():
    assert median([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert median([3.0]) == (3.0, 3.0, 3.0)


def test_the_interval_of_a_median_holds_it_as_often_as_promised():
    draw = random.Random(1)
    held = 0
    for _ in range(400):
        found = median([draw.expovariate(1.0) for _ in range(20)])
        held += found.low <= 0.6931 <= found.high
    assert held / 400 >= 0.93  # 95.9 % in truth


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (10, 2.2281), (100, 1.9840)])
def test_students_t_is_that_of_the_table(freedom, t):
    assert student(0.95, freedom) == pytest.approx(t, abs=1e-4)


def test_a_difference_of_means_is_welchs():
    a, b = [27.5, 21.0, 19.0, 23.6, 17.0, 17.9], [27.1, 22.0, 20.8, 23.4, 23.4, 23.5, 25.8]
    found = difference(a, b)
    va, vb = statistics.variance(a) / 6, statistics.variance(b) / 7
    freedom = (va + vb) ** 2 / (va**2 / 5 + vb**2 / 6)
    assert found.value == pytest.approx(statistics.mean(a) - statistics.mean(b))
    assert found.high - found.value == pytest.approx(student(0.95, freedom) * (va + vb) ** 0.5)


def test_one_seed_has_no_interval_and_equal_seeds_have_an_empty_one():
    assert difference([1.0], [1.0, 2.0]) is None
    assert difference([2.0, 2.0], [1.0, 1.0]) == (1.0, 1.0, 1.0)
