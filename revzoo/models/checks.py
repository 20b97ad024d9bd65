"""Checks of numbers that users give, with errors that name the argument."""

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
