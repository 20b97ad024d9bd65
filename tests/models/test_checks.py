import numpy as np
import pytest

from revzoo.models.checks import check_count, check_probability, is_count


@pytest.mark.parametrize("value", [1, 10, np.int64(3)])
def test_counts_are_positive_whole_numbers(value):
    assert is_count(value)
    check_count("n", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_anything_else_is_no_count(value):
    assert not is_count(value)
    with pytest.raises(ValueError, match=r"n=.*positive whole number"):
        check_count("n", value)


@pytest.mark.parametrize("value", [0.0, 0.5, 0])
def test_probabilities_include_zero(value):
    check_probability("p", value)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_probabilities_exclude_one(value):
    with pytest.raises(ValueError, match=r"p=.*\[0, 1\)"):
        check_probability("p", value)
