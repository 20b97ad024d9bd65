"""A table of classes and functions that are imported on first use.

A run uses a few rows of each table; importing all of them takes time and, for some, a library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class LazyTable(MutableMapping[str, T]):
    """A table whose values may be written as ``module:name``.

    Args:
        rows: the values, or where they are.
    """

    def __init__(self, rows: Mapping[str, T | str]) -> None:
        self._rows: dict[str, Any] = dict(rows)

    def __getitem__(self, name: str) -> T:
        if isinstance(row := self._rows[name], str):
            module, _, attribute = row.partition(":")
            row = self._rows[name] = getattr(import_module(module), attribute)
        return row

    def __setitem__(self, name: str, row: T) -> None:
        self._rows[name] = row

    def __delitem__(self, name: str) -> None:
        del self._rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)
