"""Helpers that turn plain dictionaries into checked value objects, with errors that help.

Recipes arrive as plain containers (from YAML or from a checkpoint). Each is turned into a frozen
dataclass once, at the edge; a wrong key or value is answered with what was got, what is expected
and the nearest valid name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, TypeVar

T = TypeVar("T")


def nearest(word: str, choices: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the choice nearest to ``word``, or an empty string."""
    match = get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


def build_dataclass(kind: type[T], options: Mapping[str, Any], *, where: str) -> T:
    """``kind(**options)``, with lists frozen to tuples.

    Raises:
        ValueError: for a key that ``kind`` does not have, naming the nearest one it has.
    """
    names = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    check_names(options, names, where=where)
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def check_range(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = float("inf"),
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a ``value`` that is no number between ``low`` and ``high``.

    Raises:
        ValueError: with the interval that was expected.
    """
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if (
        not is_number
        or not (low < value if open_low else low <= value)
        or not (value < high if open_high else value <= high)
    ):
        raise ValueError(f"{name}={value!r}: expected a number in {interval}")


def check_whole(name: str, value: Any) -> None:
    """Refuse a ``value`` that is no whole number from 1 on.

    Raises:
        ValueError: with what was expected.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a whole number from 1 on")


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's keyword-only parameters."""
    return [p.name for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]


def check_names(options: Iterable[str], names: Sequence[str], *, where: str) -> None:
    """Refuse an option that is not among ``names``.

    Raises:
        ValueError: naming the nearest one, and all.
    """
    for key in options:
        if key not in names:
            hint = nearest(str(key), names)
            listed = "" if hint and len(names) > 12 else f" (there is {', '.join(names) or 'none'})"
            raise ValueError(f"{where}.{key}: no such option{listed}{hint}")
