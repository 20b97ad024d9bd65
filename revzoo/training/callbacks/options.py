"""Checks the names of callbacks and their options, without importing Lightning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from revzoo._checks import check_names


def check_options(
    specs: Mapping[str, Mapping[str, Any] | None], known: Mapping[str, Sequence[str]]
) -> None:
    """Check the names of callbacks and their options.

    Args:
        specs: the options of each callback; None for no callback.
        known: the names of the options of each callback.

    Raises:
        ValueError: for a name or option that does not exist, naming the nearest.
    """
    check_names(specs, list(known), where="callbacks")
    for name, options in specs.items():
        if not isinstance(options, Mapping | None):
            raise ValueError(
                f"callbacks.{name}={options!r}: expected options in braces and quotes, "
                f"'callbacks.{name}={{OPTION: VALUE}}'; {{}} uses the defaults, null removes the "
                "callback"
            )
        check_names(options or {}, known[name], where=f"callbacks.{name}")
