import re
from dataclasses import dataclass

import numpy as np
import pytest

from revzoo._checks import (
    build_dataclass,
    check_choice,
    check_count,
    check_names,
    check_number,
    check_probability,
    did_you_mean,
    is_count,
    keyword_names,
    number_of,
)


@dataclass(frozen=True)
class Point:
    height: float = 0.0
    weights: tuple[float, ...] = ()


def test_nearest_names_the_nearest_or_nothing() -> None:
    assert did_you_mean("revnet39", ["resnet32", "revnet38"]) == "; did you mean 'revnet38'?"
    assert did_you_mean("zzz", ["resnet32", "revnet38"]) == ""
    assert did_you_mean("revnet39", ["resnet32", "revnet38"], cutoff=0.9) == ""


def test_three_suggestions_are_a_list() -> None:
    hint = did_you_mean("revnet3", ["revnet38", "revnet30", "revnet3x"], n=3)
    assert re.fullmatch(r"; did you mean '\w+', '\w+' or '\w+'\?", hint)


def test_lists_are_frozen() -> None:
    assert build_dataclass(Point, {"weights": [1, 2]}, where="p") == Point(0.0, (1, 2))


def test_an_unknown_key_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"p\.hieght: no such option .*did you mean 'height'"):
        build_dataclass(Point, {"hieght": 1.0}, where="p")


def test_a_long_list_of_names_is_not_recited_when_the_nearest_says_it_all() -> None:
    names = [f"option{i}" for i in range(20)] + ["learning"]
    with pytest.raises(ValueError, match=r"^x\.lerning: no such option; did you mean 'learning'\?"):
        check_names(["lerning"], names, where="x")
    with pytest.raises(ValueError, match="option19"):
        check_names(["zzzzzz"], names, where="x")


def test_keyword_names_are_the_keyword_only_ones() -> None:
    def function(a: int, *, b: int, c: int = 0) -> None: ...

    assert keyword_names(function) == ["b", "c"]


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_closed_ranges_hold_their_ends(value: float) -> None:
    check_number("x", value, low=0, high=1)


@pytest.mark.parametrize(
    ("value", "open_low", "open_high"),
    [(0, True, False), (1, False, True), (-1, False, False), (2, False, False)]
    + [(value, False, False) for value in (float("nan"), "0.5", None, True)],
)
def test_out_of_range_is_refused(value: object, open_low: bool, open_high: bool) -> None:
    with pytest.raises(ValueError, match=r"x=.*expected a number in"):
        check_number("x", value, low=0, high=1, open_low=open_low, open_high=open_high)


@pytest.mark.parametrize("value", [1, 10, np.int64(3)])
def test_counts_are_positive_whole_numbers(value):
    assert is_count(value)
    check_count("n", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", None])
def test_anything_else_is_not_a_count(value):
    assert not is_count(value)
    with pytest.raises(ValueError, match=r"n=.*expected a whole number >= 1"):
        check_count("n", value)


@pytest.mark.parametrize("value", [0.0, 0.5, 0])
def test_probabilities_include_zero(value):
    check_probability("p", value)


@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_probabilities_exclude_one(value):
    with pytest.raises(ValueError, match=r"p=.*\[0, 1\)"):
        check_probability("p", value)


def test_a_misspelt_choice_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="of store, exact; did you mean 'store'"):
        check_choice("mode", "Stoer", ("store", "exact"))


def test_the_case_of_a_word_does_not_hide_what_was_meant() -> None:
    assert did_you_mean("REVNET38", ["RevNet38"]) == "; did you mean 'RevNet38'?"


def test_one_of_a_thing_is_singular() -> None:
    """A run ended "after 1 epochs"."""
    assert [number_of(n, "epoch") for n in (0, 1, 2)] == ["0 epochs", "1 epoch", "2 epochs"]
