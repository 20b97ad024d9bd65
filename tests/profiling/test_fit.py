"""The search for the largest number that fits."""

import pytest

from revzoo.profiling.fit import largest


@pytest.mark.parametrize("start", [1, 10, 500])
@pytest.mark.parametrize(("power", "budget"), [(1, 7777), (2, 7777), (1, 45), (2, 2000)])
def test_the_largest_is_found_in_few_calls(start, power, budget):
    calls = []

    def need(n):
        calls.append(n)
        return 40 + 3 * n**power

    found = largest(need, budget, start=start, power=power)
    assert need(found) <= budget < need(found + 1)
    assert len(calls) < 20


def test_impossible_numbers_are_passed_over():
    """Images must be multiples of 4."""
    found = largest(lambda n: n * n if n % 4 == 0 else None, 1700, start=32, power=2)
    assert found == 40


def test_nothing_may_fit():
    assert largest(lambda n: 100 + n, 50, start=8) is None
    assert largest(lambda n: None, 50, start=8, most=16) is None
