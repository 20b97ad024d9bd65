"""Checks of arguments and options: counts, numbers, choices, names of options.

Every message has the form ``name=got: expected ...``, and suggests the nearest valid name for a
misspelt word. All floors share these checks.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from math import inf
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Size: TypeAlias = int | Sequence[int]
"""Of images, in pixels: the side of a square, or ``[height, width]``; of volumes three sides."""
# in Lightning's order; SLURM's comes last because batch scripts set it too
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
log = logging.getLogger(__name__)


class UserError(Exception):
    """Base of errors whose message tells the user enough: programs print it without a traceback.

    Args:
        args: the message.
        in_programs: what programs print instead, where the message names Python's arguments.
    """

    def __init__(self, *args: object, in_programs: str = "") -> None:
        super().__init__(*args)
        self.in_programs = in_programs


def is_count(value: object, least: int = 1) -> bool:
    """Whether ``value`` is an integer >= ``least``. NumPy integers count, booleans do not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> bool:
    """Whether ``value`` is a real number, NaN and infinity included. Booleans do not count."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_module(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is a module."""
    # by attribute, since this file must not import torch; a class has the attribute, too
    if isinstance(value, type) or not hasattr(value, "named_modules"):
        what = f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:60]
        raise TypeError(f"{name} is {what}: expected an nn.Module, such as create_model(NAME)")


def check_callable(name: str, value: object) -> None:
    """Raise a TypeError unless ``value`` is callable. A module class is refused."""
    if isinstance(value, type) and hasattr(value, "named_modules"):
        remedy = f"create it first, {value.__name__}(...)"
        text = f"the class {value.__name__}, expected a module or a function: {remedy}"
        raise TypeError(f"{name} is {text}")
    if not callable(value):
        raise TypeError(f"{name} is {value!r:.60}, expected a module or a function")


def check_new_name(kind: str, name: object, table: Container[object]) -> None:
    """Raise unless ``name`` is a string that is not in ``table``."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"name={name!r}: expected a string, which selects the {kind}")
    if name in table:
        raise ValueError(f"{kind} {name!r} is already registered: choose another name")


def check_registered(kind: str, name: object, builder: object, table: Container[object]) -> None:
    """Raise unless ``builder`` can be added to ``table`` under a new ``name``."""
    check_new_name(kind, name, table)
    if not callable(builder):
        raise TypeError(
            f"{kind} {name!r} is {builder!r}: expected the class, or a function that builds it"
        )


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raise a ValueError unless ``value`` is an integer >= ``least``."""
    if not is_count(value, least):
        raise ValueError(f"{name}={value!r}: expected a whole number >= {least}")


def cores() -> int:
    """The number of this machine's cores."""
    return os.cpu_count() or 1


def is_first_process() -> bool:
    """Whether this process writes files: rank 0 of node 0, or the only process."""
    # from the environment: the run's folder is created before Lightning starts the processes
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    # LOCAL_RANK counts from 0 on each node
    return int(rank) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0


def at_most(most: int, name: str, value: int) -> int:
    """``value``, but at most ``most``, with a warning.

    The file of a run may come from a larger machine, or from somebody who means harm.
    """
    if value > most:
        log.warning(
            "%s=%s is too many for %s: using %s", name, value, number_of(cores(), "core"), most
        )
    return min(value, most)


def counts_of(values: object, *, repeat: int = 1, least: int = 1) -> tuple[int, ...]:
    """``values`` as a tuple, a single number repeated; empty unless all are integers >= least."""
    numbers: tuple[Any, ...] = tuple(values) if isinstance(values, Iterable) else (values,) * repeat
    return numbers if all(is_count(n, least) for n in numbers) else ()


def check_counts(name: str, values: Any) -> tuple[int, ...]:
    """``values`` as a tuple; raises a ValueError unless it has one or more integers >= 1."""
    # any iterable: configurations hold lists, or Hydra's list type
    numbers = counts_of(values, repeat=0)
    if not numbers:
        raise ValueError(f"{name}={values!r}: expected whole numbers >= 1, one for each stage")
    return numbers


def sides_of(name: str, size: object, dims: int = 2) -> tuple[int, ...]:
    """A :data:`Size` as ``dims`` sides; raises a ValueError unless they are integers >= 1."""
    sides = counts_of(size, repeat=dims)
    if len(sides) != dims:
        several = "[height, width]" if dims == 2 else f"a list of {dims}"
        raise ValueError(f"{name}={size!r}: expected a whole number >= 1, or {several}")
    return sides


def short_size(sides: Sequence[int]) -> int | list[int]:
    """The inverse of :func:`sides_of`: ``64`` for equal sides, otherwise ``[48, 80]``."""
    return sides[0] if len({*sides}) == 1 else [*sides]


def size_word(sides: Sequence[int]) -> str:
    """:func:`short_size` as a value on the command line, ``64`` or ``[48,80]``."""
    return str(short_size(sides)).replace(" ", "")


def check_number(
    name: str,
    value: object,
    *,
    low: float = 0.0,
    high: float = inf,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise a ValueError unless ``value`` is a number between ``low`` and ``high``."""
    if not (
        is_number(value)
        and (low < value if open_low else low <= value)  # type: ignore[operator]
        and (value < high if open_high else value <= high)  # type: ignore[operator]
    ):
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise ValueError(f"{name}={value!r}: expected a number in {interval}")


def check_probability(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is in [0, 1)."""
    check_number(name, value, high=1, open_high=True)


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise a ValueError unless ``value`` is one of the ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        listed = ", ".join(map(str, choices))
        raise ValueError(f"{name}={value}: expected one of {listed}{did_you_mean(value, choices)}")


def check_names(options: Iterable[object], names: Sequence[str], *, where: str) -> None:
    """Raise a ValueError for an option that is not among ``names``."""
    for key in options:
        if key not in names:
            hint = did_you_mean(key, names)
            # a long list would hide the suggestion
            listed = "" if hint and len(names) > 12 else f" (there is {', '.join(names) or 'none'})"
            raise ValueError(f"{where}.{key}: no such option{listed}{hint}")


def check_types(options: Mapping[str, Any], hints: Mapping[str, Any], *, where: str) -> None:
    """Raise a ValueError for an option whose type does not match its hint.

    Args:
        options: values by name; the items of a container are not checked.
        hints: from :func:`typing.get_type_hints`; an option without one may have any value.
        where: the section, for error messages.
    """
    for name, value in options.items():
        if expected := expected_type(value, hints.get(name, Any)):
            raise ValueError(f"{where}.{name}={value!r:.80}: expected {expected}")


def expected_type(value: object, hint: Any) -> str:
    """``"a number or null"`` if a value does not match a type hint; an empty string if it does."""
    kinds = _kinds(hint)
    if any(_fits(value, kind) for kind in kinds):
        return ""
    # dict.fromkeys drops repetitions in order: list and tuple are both "a list"
    return " or ".join(dict.fromkeys(_WORDS[kind] for kind in kinds if kind in _WORDS))


# the words of YAML and JSON: users write configurations, not Python types
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "a mapping",
    Mapping: "a mapping",
    type(None): "null",
}


def _kinds(hint: Any) -> list[Any]:
    """The classes that a type hint allows; ``object`` where it allows anything."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    if origin is Literal:
        return [type(value) for value in get_args(hint)]
    kind = origin or hint
    return [kind if isinstance(kind, type) and kind is not Any else object]


def _fits(value: object, kind: type) -> bool:
    if kind is float:  # an int fits, as for type checkers
        return is_number(value)
    if kind is int:
        return is_number(value) and isinstance(value, Integral)
    if kind in (list, tuple, Sequence):  # YAML and JSON have lists only
        return isinstance(value, Sequence) and not isinstance(value, str)
    return isinstance(value, kind)


def nearest(
    word: object, choices: Iterable[object], *, n: int = 1, cutoff: float = 0.5
) -> list[str]:
    """Up to ``n`` choices spelt like ``word``, in upper or lower case; nearest first.

    Args:
        word: a misspelt word.
        choices: the valid words.
        n: largest number of results.
        cutoff: least similarity, 0 to 1, as :func:`difflib.get_close_matches` measures it.
    """
    # keys in lower case: to difflib, A and a are different letters
    lower = {str(choice).lower(): str(choice) for choice in choices}
    return [lower[key] for key in get_close_matches(str(word).lower(), lower, n=n, cutoff=cutoff)]


def shortened(names: Iterable[object], most: int = 5) -> str:
    """``"a, b and 3 more"``: the first ``most`` names and the number of others; ``"none"``."""
    listed = list(map(str, names))
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return (", ".join(listed[:most]) or "none") + more


def package_needed(what: str, *packages: str) -> str:
    """``"revzoo sweep needs optuna: pip install optuna"``, from ``what="revzoo sweep needs"``."""
    return f"{what} {', '.join(packages)}: pip install {' '.join(packages)}"


def number_of(count: int, noun: str) -> str:
    """``"1 epoch"`` or ``"2 epochs"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def did_you_mean(
    word: object, choices: Iterable[object], *, n: int = 1, cutoff: float = 0.5
) -> str:
    """``"; did you mean 'x', 'y' or 'z'?"`` for the :func:`nearest` choices, or an empty string.

    It ends a sentence, so start a new one after it.
    """
    matches = nearest(word, choices, n=n, cutoff=cutoff)
    return f"; did you mean {either(map(repr, matches))}?" if matches else ""


def either(words: Iterable[str]) -> str:
    """``"a, b or c"``."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def build_dataclass(kind: type[T], options: Mapping[str, Any], *, where: str) -> T:
    """``kind(**options)``, with lists frozen to tuples.

    Raises:
        ValueError: for an unknown key or a value of the wrong type.
    """
    names = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    check_names(options, names, where=where)
    check_types(options, get_type_hints(kind), where=where)
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def in_section(where: str, error: ValueError) -> ValueError:
    """A constructor's error with the option's full name: ``data.batch_size=0: expected ...``."""
    # constructors write "option=value: expected ...", or another text
    joint = "." if re.match(r"[\w.]+=", str(error)) else ": "
    return ValueError(f"{where}{joint}{error}")


def keyword_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's keyword-only parameters."""
    return [p.name for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
