"""Refuses pickles that would hang the reader or fill the memory, before torch loads them.

``torch.load(weights_only=True)`` runs no code of the file, but trusts its sizes. A hundred bytes
can hold a tuple of 2**60 items as a key of a dictionary (hashing it never ends), encode a text to
hexadecimal digits forty times, or make a set of a tensor that repeats one value 10**9 times.

So :func:`check_pickles` reads the file first, with placeholders for tensors and storages.
"""

from __future__ import annotations

import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, ClassVar

from revzoo.weights.errors import UnreadableWeightsError

MAPPINGS = (dict, OrderedDict, Counter)
CONTAINERS = (*MAPPINGS, list, tuple)
MAX_DEPTH, MAX_VALUES = 50, 2_000_000  # random states of 1,000 processes fit
_STORAGE_OR_DTYPE = re.compile(r"\w+Storage|(b?float|complex|qu?int|u?int|bool)\w*")


def check_nesting(value: Any, name: str) -> None:
    """Refuse containers that take forever to walk through.

    A list may hold another list ten times at no cost to the file; forty levels of such lists have
    10**40 values. We count the values of each container once.

    Raises:
        UnreadableWeightsError: more than :data:`MAX_DEPTH` levels or :data:`MAX_VALUES` values;
            the message gives ``name`` and the keys below it.
    """
    sizes: dict[int, int] = {}  # values in each container, by its id

    def size(value: Any, keys: Sequence[Any]) -> int:
        if id(value) not in sizes:
            items = value.items() if isinstance(value, MAPPINGS) else enumerate(value)
            # recorded after its items: a container inside itself has no size yet and gets too deep
            if len(keys) < MAX_DEPTH:
                sizes[id(value)] = sum(
                    size(item, (*keys, key)) if isinstance(item, CONTAINERS) else 1
                    for key, item in items
                )
            if sizes.get(id(value), MAX_VALUES) >= MAX_VALUES:
                place = "".join(f"[{key!r:.30}]" for key in keys[:8])
                raise UnreadableWeightsError(
                    f"{name}{place} holds more than {MAX_VALUES:,} values, or lists in lists more "
                    f"than {MAX_DEPTH} deep"
                )
        return sizes[id(value)]

    if isinstance(value, CONTAINERS):
        size(value, ())


def check_pickles(file: IO[bytes], count: int = 1) -> None:
    """Refuse pickles whose loading takes more time and memory than their length suggests.

    Args:
        file: at the start of the first pickle.
        count: number of consecutive pickles.

    Raises:
        UnpicklingError: or another exception; also if the pickle is damaged, or names anything but
            tensors and plain values.
    """
    for _ in range(count):
        _Rehearsal(file, encoding="latin1").load()


def hashable(values: Sequence[Any]) -> Sequence[Any]:
    """``values``, if hashing each is fast: no tuple in a tuple."""
    for value in values:
        if isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
            raise pickle.UnpicklingError("a key or an item of a set is a tuple of tuples")
    return values


def listed(values: Any = ()) -> Any:
    """``values``, if they are in a container; a tensor may repeat values endlessly."""
    if not isinstance(values, CONTAINERS):
        raise pickle.UnpicklingError(f"it makes a collection of a {type(values).__name__}")
    return values


def ordered(pairs: Any = ()) -> OrderedDict[Any, Any]:
    """Like ``OrderedDict``, which Python 2 pickles as a list of pairs."""
    items = listed(pairs).items() if isinstance(pairs, MAPPINGS) else listed(pairs)
    hashable([key for key, _ in items])
    return OrderedDict(items)


def _checking(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        hashable(unpickler.stack[keys])
        load(unpickler)

    return checked


_dispatch = pickle._Unpickler.dispatch
# for each instruction that hashes: where the hashed values lie on the unpickler's stack
_HASHING = {
    pickle.SETITEM: slice(-2, -1),  # key, value on top
    pickle.SETITEMS: slice(0, None, 2),  # key, value, key, value, ... since the mark
    pickle.DICT: slice(0, None, 2),
    pickle.ADDITEMS: slice(None),
    pickle.FROZENSET: slice(None),
}


class BoundedUnpickler(pickle._Unpickler):
    """Python's unpickler, bounded in time and memory if the callables of ``find_class`` are.

    The C unpickler allocates its memo for the largest index in the file.
    """

    # each mention hashes a tuple again, so nested tuples take exponential time
    dispatch: ClassVar = {
        **_dispatch,
        **{op[0]: _checking(_dispatch[op[0]], keys) for op, keys in _HASHING.items()},
    }
    # bytearray: Python allocates the size that the file announces
    del dispatch[pickle.BYTEARRAY8[0]]

    def persistent_load(self, pid: Any) -> Any:
        """A placeholder for the storage; torch overrides this."""
        return _StandIn()


class _StandIn:
    """A placeholder for a tensor, storage or dtype."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        pass


def _encoded(text: str, encoding: str) -> bytes:
    """Protocol 2 stores bytes as a call of ``_codecs.encode``; only ``latin1`` keeps the length."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes a text as {encoding!r:.40}")
    return text.encode(encoding)


# All names that torch.save writes for plain values and dense tensors. Nothing here belongs to
# torch: a rehearsal must not allocate tensors.
_KNOWN: Mapping[str, Any] = {
    "collections.OrderedDict": ordered,
    "collections.Counter": lambda values=(): hashable(list(listed(values))),
    "builtins.set": lambda values=(): hashable(list(listed(values))),
    "torch.Size": lambda values=(): tuple(listed(values)),
    "_codecs.encode": _encoded,
    "builtins.complex": _StandIn,
    "torch.device": _StandIn,
    "torch.nn.parameter.Parameter": _StandIn,
    "torch._utils._rebuild_parameter": _StandIn,
    "torch._utils._rebuild_tensor": _StandIn,
    "torch._utils._rebuild_tensor_v2": _StandIn,
    "torch._utils._rebuild_tensor_v3": _StandIn,
}


class _Rehearsal(BoundedUnpickler):
    """Knows only the names that ``torch.save`` writes for plain values and dense tensors."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"  # Python 2 wrote __builtin__
        if full in _KNOWN:
            return _KNOWN[full]
        owner = re.fullmatch(r"torch|torch\.(cuda|storage)", module)
        if owner and _STORAGE_OR_DTYPE.fullmatch(name):
            return object()  # only persistent_load makes storages
        raise pickle.UnpicklingError(f"it names GLOBAL {full}")
