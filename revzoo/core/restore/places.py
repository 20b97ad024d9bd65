"""Places: where the code of a step finds a value, and where a replay puts another one.

Attributes of modules and objects, parameters, buffers and globals are in dictionaries, which need
no wrapper. If a container's class is user-defined, we call only methods of the built-in class that
it inherits from: the user's methods may do anything, such as remove the item that they return.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from operator import is_, itemgetter
from typing import Any, Protocol

import torch
from torch import nn


class Absent:
    """The type of :data:`ABSENT`."""

    __slots__ = ()


ABSENT = Absent()
"""Stands for a missing value: an empty cell or slot, a missing key."""

_PLAIN = (int, float, complex, bool, str, bytes, type(None), range, slice, type(Ellipsis))
_OF_TORCH = (torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format)
_OF_NUMPY = getattr(sys.modules.get("numpy"), "sctypeDict", {}).values()  # torch imports numpy
PLAIN_TYPES = frozenset(
    (*_PLAIN, *_OF_TORCH, *_OF_NUMPY, Decimal, Fraction, weakref.ReferenceType, Absent)
)
"""The types of values that cannot change in place and hold nothing to search."""


class Place(Protocol):
    """The location of a value: a dictionary, or one of the classes below."""

    def get(self, key: Any, default: Any = None, /) -> Any: ...

    def __setitem__(self, key: Any, value: Any, /) -> None: ...

    def __delitem__(self, key: Any, /) -> None: ...


_BUILT_IN = frozenset(
    (
        *(dict, collections.OrderedDict, types.MappingProxyType),
        *(list, tuple, set, frozenset, collections.deque),
    )
)


def built_in(container: Any, name: str) -> Callable[..., Any]:
    """The method of this name of the first built-in class among the container's bases."""
    # the first: the methods of ``dict`` would corrupt the order of an OrderedDict
    cls: Any = next(c for c in type(container).__mro__ if c in _BUILT_IN)
    method: Callable[..., Any] = getattr(cls, name).__get__(container)
    return method


class Entries:
    """The entries of a dictionary of a user-defined class, by the methods of :func:`built_in`."""

    __slots__ = ("_table",)

    def __init__(self, table: dict[Any, Any]) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self.keys())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.keys())

    def keys(self) -> Any:
        return built_in(self._table, "keys")()

    def values(self) -> Any:
        return built_in(self._table, "values")()

    def items(self) -> Any:
        return built_in(self._table, "items")()

    def copy(self) -> dict[Any, Any]:
        return dict(self.items())

    def get(self, key: Any, default: Any = None, /) -> Any:
        return built_in(self._table, "get")(key, default)

    def __setitem__(self, key: Any, value: Any, /) -> None:
        built_in(self._table, "__setitem__")(key, value)

    def __delitem__(self, key: Any, /) -> None:
        built_in(self._table, "__delitem__")(key)


def entries(table: dict[Any, Any]) -> Any:
    """``table``, or :class:`Entries` of it if its class may override a method."""
    return table if type(table) in (dict, collections.OrderedDict) else Entries(table)


class Items:
    """The items of a list or deque."""

    __slots__ = ("_get_item", "_length", "_set_item", "items")

    def __init__(self, items: list[Any] | collections.deque[Any]) -> None:
        self.items = items
        self._length = built_in(items, "__len__")
        self._get_item = built_in(items, "__getitem__")
        self._set_item = built_in(items, "__setitem__")

    def get(self, key: int, default: Any = None, /) -> Any:
        return self._get_item(key) if key < self._length() else default

    def __setitem__(self, key: int, value: Any, /) -> None:
        if key >= self._length():
            raise RuntimeError(
                f"a {type(self.items).__name__} that the forward pass used has {self._length()} "
                f"items in the backward pass; expected at least {key + 1}, so a replay cannot put "
                "the item back. Run backward before removing items, or use memory='store' for "
                "this step"
            )
        self._set_item(key, value)

    def __delitem__(self, key: int, /) -> None:
        raise AssertionError("an item is replaced, never deleted")


class Cell:
    """The cell of a closure."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def get(self, _: Any, default: Any = None, /) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:  # empty
            return default

    def __setitem__(self, _: Any, value: Any, /) -> None:
        self.cell.cell_contents = value

    def __delitem__(self, _: Any, /) -> None:
        del self.cell.cell_contents


class Constant:
    """An item of a tuple, partial or another object that cannot change."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, _: Any, __: Any = None, /) -> Any:
        return self.value

    def __setitem__(self, _: Any, value: Any, /) -> None:
        raise RuntimeError(
            "the forward pass changed a tensor in place in a tuple, a set, a partial or a default "
            "argument, where a replay cannot replace it; expected no change. Keep the tensor in a "
            "list or as a buffer, or use memory='store' for this step"
        )

    def __delitem__(self, _: Any, /) -> None:
        raise AssertionError("a constant is always there")


class SlotAttributes:
    """The attributes of an object whose class has slots for them."""

    __slots__ = ("owner",)

    def __init__(self, owner: object) -> None:
        self.owner = owner

    def get(self, key: str, default: Any = None, /) -> Any:
        # getattr would call a user's __getattr__ for an empty slot
        try:
            return object.__getattribute__(self.owner, key)
        except AttributeError:
            return default

    def __setitem__(self, key: str, value: Any, /) -> None:
        # frozen data classes refuse setattr
        object.__setattr__(self.owner, key, value)

    def __delitem__(self, key: str, /) -> None:
        object.__delattr__(self.owner, key)


class ClassAttributes:
    """The attributes of a class."""

    __slots__ = ("cls",)

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def get(self, key: str, default: Any = None, /) -> Any:
        return vars(self.cls).get(key, default)

    # the dictionary of a class is read-only, and a metaclass may refuse setattr
    def __setitem__(self, key: str, value: Any, /) -> None:
        type.__setattr__(self.cls, key, value)

    def __delitem__(self, key: str, /) -> None:
        type.__delattr__(self.cls, key)


class Attributes:
    """The attributes of the searched step; weak, since the step holds the result."""

    __slots__ = ("owner",)

    def __init__(self, owner: nn.Module) -> None:
        self.owner = weakref.ref(owner)

    def get(self, key: str, default: Any = None, /) -> Any:
        owner = self.owner()
        return default if owner is None else owner.__dict__.get(key, default)

    def __setitem__(self, key: str, value: Any, /) -> None:
        if (owner := self.owner()) is not None:
            owner.__dict__[key] = value

    def __delitem__(self, key: str, /) -> None:
        if (owner := self.owner()) is not None:
            del owner.__dict__[key]


Read = Callable[[], Iterable[Any]]


def readers(where: Iterable[tuple[Place, Any]]) -> list[tuple[Place, Sequence[Any], Read]]:
    """For each place its keys, and a function that reads all of them, in C where possible.

    For a missing key, the function gives :data:`ABSENT` or raises a LookupError.
    """
    keys_of: dict[int, tuple[Place, list[Any]]] = {}
    for place, key in where:
        keys_of.setdefault(id(place), (place, []))[1].append(key)
    return [(place, keys, _reader(place, keys)) for place, keys in keys_of.values()]


def _reader(place: Place, keys: Sequence[Any]) -> Read:
    table: Any = vars(place.cls) if isinstance(place, ClassAttributes) else place
    if isinstance(place, Items) and type(place.items) is list:
        table = place.items
    # another kind of dictionary may insert a missing key when it is read
    if len(keys) > 1 and type(table) in (dict, types.MappingProxyType, list):
        read = functools.partial(itemgetter(*keys), table)
        with contextlib.suppress(LookupError):  # some key is absent, and expected to be
            read()
            return read
    return lambda: [place.get(key, ABSENT) for key in keys]


def getter(place: Place) -> Callable[[Any, Any], Any]:
    """``place.get``, in C where possible."""
    return vars(place.cls).get if isinstance(place, ClassAttributes) else place.get


def refill(container: Any, items: Iterable[Any]) -> None:
    """Replace the items of a list, set or deque, or the entries of a dictionary."""
    built_in(container, "clear")()
    built_in(container, "update" if isinstance(container, (set, dict)) else "extend")(items)


def same(table: Any, before: Any) -> bool:
    """Whether two dictionaries hold the same objects in the same order."""
    if len(table) != len(before) or not all(map(is_, table, before)):
        return False
    return all(map(is_, table.values(), before.values()))


def reorder(table: Any, names: Iterable[Any]) -> None:
    """Give the entries of a dictionary the order of ``names``; other entries stay before them."""
    wanted = [name for name in names if table.get(name, ABSENT) is not ABSENT]
    known = set(wanted)
    if [name for name in table if name in known] != wanted:
        for name in wanted:
            value = table.get(name)
            del table[name]
            table[name] = value


Undo = list[tuple[Callable[..., Any], tuple[Any, ...]]]
"""Calls that restore the caller's values after a replay; they run from last to first."""


def swap(undo: Undo, place: Place, key: Any, value: Any) -> None:
    """Put ``value`` into a place until ``undo`` runs."""
    before = place.get(key, ABSENT)
    put(place, key, value)
    undo.append((put, (place, key, before)))


def put(place: Place, key: Any, value: Any) -> None:
    """Put ``value`` into a place; :data:`ABSENT` deletes what is there."""
    if value is not ABSENT:
        place[key] = value
    elif place.get(key, ABSENT) is not ABSENT:
        del place[key]
