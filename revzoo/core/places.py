"""Places: where the code of a step finds a value, and where a replay puts another one.

A dictionary is a place as it is: attributes of modules and objects, parameters, buffers, globals.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Protocol

from torch import nn


class Place(Protocol):
    """The location of a value: a dictionary, or one of the wrappers below."""

    def get(self, key: Any, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...


class Items:
    """The items of a list or deque."""

    __slots__ = ("items",)

    def __init__(self, items: list[Any] | collections.deque[Any]) -> None:
        self.items = items

    def get(self, key: int, /) -> Any:
        return self.items[key] if key < len(self.items) else None

    def __setitem__(self, key: int, value: Any, /) -> None:
        self.items[key] = value


class Cell:
    """The cell of a closure."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self, _: Any, /) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # empty
            return None

    def __setitem__(self, _: Any, value: Any, /) -> None:
        self.cell.cell_contents = value


class Constant:
    """An item of a tuple, partial or another object that cannot change."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, _: Any, /) -> Any:
        return self.value

    def __setitem__(self, _: Any, value: Any, /) -> None:
        raise RuntimeError(
            "the forward pass changed a tensor in place in a tuple, a set, a partial or a default "
            "argument, where a replay cannot replace it; expected no change. Keep the tensor in a "
            "list or as a buffer, or use memory='store' for this step"
        )


class SlotAttributes:
    """The attributes of an object whose class has slots for them."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def get(self, key: str, /) -> Any:
        return getattr(self.owner, key, None)

    def __setitem__(self, key: str, value: Any, /) -> None:
        # frozen data classes refuse setattr
        object.__setattr__(self.owner, key, value)


class ClassAttributes:
    """The attributes of a class."""

    __slots__ = ("cls",)

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def get(self, key: str, /) -> Any:
        return vars(self.cls).get(key)

    def __setitem__(self, key: str, value: Any, /) -> None:
        # the dictionary of a class is read-only
        setattr(self.cls, key, value)


class Attributes:
    """The attributes of the searched step; weak, since the step holds the result."""

    __slots__ = ("owner",)

    def __init__(self, owner: nn.Module) -> None:
        self.owner = weakref.ref(owner)

    def get(self, key: str, /) -> Any:
        owner = self.owner()
        return None if owner is None else owner.__dict__.get(key)

    def __setitem__(self, key: str, value: Any, /) -> None:
        if (owner := self.owner()) is not None:
            owner.__dict__[key] = value

    def __contains__(self, key: str, /) -> bool:
        return (owner := self.owner()) is not None and key in owner.__dict__

    def pop(self, key: str, /) -> Any:
        return None if (owner := self.owner()) is None else owner.__dict__.pop(key)


Read = Callable[[], Sequence[Any]]


def readers(entries: Iterable[tuple[Place, Any]]) -> list[tuple[Place, Sequence[Any], Read]]:
    """For each place its keys, and a function that reads all of them, in C where possible.

    The function raises a LookupError if a key of a dictionary or list is gone.
    """
    keys_of: dict[int, tuple[Place, list[Any]]] = {}
    for place, key in entries:
        keys_of.setdefault(id(place), (place, []))[1].append(key)
    return [(place, keys, _reader(place, keys)) for place, keys in keys_of.values()]


def _reader(place: Place, keys: Sequence[Any]) -> Read:
    table = _table_of(place)
    # another kind of dictionary may insert a missing key when it is read
    if len(keys) > 1 and type(table) in (dict, types.MappingProxyType, list):
        return functools.partial(itemgetter(*keys), table)
    return lambda: [place.get(key) for key in keys]


def getter(place: Place) -> Callable[[Any], Any]:
    """``place.get``, in C where possible."""
    get: Callable[[Any], Any] = getattr(_table_of(place), "get", place.get)
    return get


def _table_of(place: Place) -> Any:
    if isinstance(place, ClassAttributes):
        return vars(place.cls)
    return place.items if isinstance(place, Items) else place


def refill(container: Any, items: Iterable[Any]) -> None:
    """Replace the items of a list, set or deque."""
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(items)


Undo = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Calls that restore the caller's values after a replay, last one first."""


def swap(undo: Undo, place: Place, key: Any, value: Any) -> None:
    """Put ``value`` into a place until ``undo`` runs."""
    # undo by deleting the key: a value of None would leave a new attribute
    if isinstance(place, (dict, Attributes)) and key not in place:
        undo.append((place.pop, (key,)))
    else:
        undo.append((place.__setitem__, (key, place.get(key))))
    place[key] = value
