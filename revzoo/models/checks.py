"""Checks of numbers that users give, with errors that name the argument."""

from collections.abc import Iterable
from numbers import Integral


def is_count(value: object) -> bool:
    """Whether ``value`` is a positive whole number; NumPy's integers are, True is not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_count(name: str, value: int) -> None:
    """Raise a ValueError unless ``value`` is a positive whole number."""
    if not is_count(value):
        raise ValueError(f"{name}={value!r} is not valid; expected a positive whole number.")


def check_probability(name: str, value: float) -> None:
    """Raise a ValueError unless ``value`` is in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name}={value!r} is not valid; expected a probability in [0, 1).")


def check_choice(name: str, value: object, known: Iterable[str]) -> None:
    """Raise a ValueError unless ``value`` is one of the ``known`` names."""
    if value not in (known := tuple(known)):
        listed = ", ".join(map(repr, known))
        raise ValueError(f"{name}={value!r} is not valid; choose one of {listed}.")


def positive_tuple(name: str, values: Iterable[int] | int) -> tuple[int, ...]:
    """``values`` as a tuple, or a ValueError unless they are positive whole numbers."""
    # Any iterable: configuration files give lists, or list types of their own.
    numbers = tuple(values) if isinstance(values, Iterable) else ()
    if not numbers or not all(map(is_count, numbers)):
        raise ValueError(f"{name} got {values!r}; expected one positive whole number per stage.")
    return numbers
