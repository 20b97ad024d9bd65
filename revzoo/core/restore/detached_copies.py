"""Copies of containers and objects whose tensors have no graph.

See rule 4 of NOTE [ What counts as reached ] in :mod:`revzoo.core.restore.search`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from revzoo.core.restore.code_names import slots_of
from revzoo.core.restore.places import PLAIN_TYPES, SlotAttributes, built_in, entries, refill

LISTS = (list, set, collections.deque)
CONTAINERS = (*LISTS, tuple, dict, frozenset)
_DEPTH = 4  # levels of containers to search for tensors with a graph


def without_graph(v: Any) -> Any:
    """``v``, or if it holds tensors with a graph, a copy with aliases of them (rule 4)."""
    changed = _aliases(v, 0)
    return v if changed is None else changed


def _aliases(v: Any, depth: int) -> Any:
    """A copy of ``v`` with aliases of tensors with a graph; None if there are none."""
    if isinstance(v, Tensor):
        return None if v.is_leaf else v.detach().requires_grad_(v.requires_grad)
    if depth > _DEPTH or type(v) in PLAIN_TYPES:
        return None
    if isinstance(v, dict):
        aliases = _aliases_of(entries(v).copy(), depth)
    elif isinstance(v, CONTAINERS):
        aliases = _aliases_of(dict(enumerate(items_of(v))), depth)
    elif isinstance(v, types.SimpleNamespace) or dataclasses.is_dataclass(type(v)):
        place = SlotAttributes(v)
        slots = {name: place.get(name) for name in slots_of(type(v))}
        aliases = _aliases_of({**attributes_of(v), **slots}, depth)
    else:
        return None
    return _with(v, aliases) if aliases else None


def _aliases_of(items: dict[Any, Any], depth: int) -> dict[Any, Any]:
    copies = {key: _aliases(item, depth + 1) for key, item in items.items()}
    return {key: item for key, item in copies.items() if item is not None}


def _with(v: Any, aliases: dict[Any, Any]) -> Any:
    """A copy of ``v`` with these items or attributes."""
    if isinstance(v, (tuple, frozenset)):
        items = [aliases.get(i, item) for i, item in enumerate(items_of(v))]
        named = hasattr(v, "_fields")  # named tuples take their items one by one
        return type(v)(*items) if named else type(v)(items)
    changed = copy.copy(v)  # keeps the class and its attributes
    if isinstance(v, dict):
        table = entries(changed)
        for key, item in aliases.items():
            table[key] = item
    elif isinstance(v, LISTS):
        refill(changed, [aliases.get(i, item) for i, item in enumerate(items_of(v))])
    else:
        for name, value in aliases.items():
            object.__setattr__(changed, name, value)  # frozen data classes refuse setattr
    return changed


def items_of(container: Any) -> Iterable[Any]:
    """The items of a list, deque, set or tuple."""
    items: Iterable[Any] = built_in(container, "__iter__")()
    return items


def attributes_of(v: Any) -> dict[str, Any]:
    """The ``__dict__`` of ``v``; empty if it has none."""
    # getattr would call a user's __getattr__ or __getattribute__
    try:
        attributes: dict[str, Any] = object.__getattribute__(v, "__dict__")
    except AttributeError:
        return {}
    return attributes
