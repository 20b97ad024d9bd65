"""The cached result of a search for the objects that a step reaches, until the step changes.

See NOTE [ What counts as reached ] in :mod:`revzoo.core.restore.search`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter, call, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as all_modules
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from revzoo.core.invertible import Step
from revzoo.core.restore.places import (
    ABSENT,
    PLAIN_TYPES,
    ClassAttributes,
    Constant,
    Place,
    Read,
    built_in,
    getter,
    readers,
)
from revzoo.core.restore.search import (
    ABOUT_CLASS,
    CACHE_KEY,
    MAX_ITEMS,
    Search,
    modules_in,
)
from revzoo.core.restore.threads import locks_of
from revzoo.core.tensors import storage_id

# ours: the result of the search, the forward that calls.py wraps, and the guard's figure
NOT_RESTORED = frozenset((CACHE_KEY, "forward", "drift"))
# Names that change tensors without a new version: two bypass autograd, the others are kernels that
# update statistics.
_CHANGE_UNSEEN = frozenset(("data", "numpy"))
_NORMALIZE = frozenset(
    ("batch_norm", "instance_norm", "native_batch_norm", "batch_norm_update_stats")
)
_UPDATE_UNSEEN = _CHANGE_UNSEEN | _NORMALIZE
# Functions that fill a tensor after autograd has saved it, or never fill all of it: we can neither
# stop a replay there nor compare the tensor. RReLU's noise is not filled in evaluation; the CTC
# loss's table only up to the length of each sequence.
_UNFILLED = frozenset(
    ("rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "ctc_loss", "_ctc_loss")
)
# Functions that set a random state, of torch and of Lightning: afterwards it can be the same as
# before, although numbers were drawn.
_SET_STATES = frozenset(
    (
        *("fork_rng", "set_rng_state", "set_rng_state_all", "set_state", "manual_seed"),
        *("isolate_rng", "seed_everything", "setstate", "bit_generator", "clone_state"),
    )
)
# Tables of a module, apart from parameters and buffers, whose entries and order decide what runs.
_TABLES = (
    "_modules",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# Layers of torch whose forward draws no random numbers; so do most of this package's.
_SILENT = frozenset(
    getattr(nn, name)
    for name in (
        *(f"{kind}{d}d" for kind in ("Conv", "ConvTranspose", "BatchNorm") for d in (1, 2, 3)),
        *(f"{kind}Pool{d}d" for kind in ("Max", "Avg", "AdaptiveAvg") for d in (1, 2, 3)),
        *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "GroupNorm", "LayerNorm"),
        *("RMSNorm", "Linear", "Identity", "Sequential", "ModuleList", "ModuleDict", "Flatten"),
        *("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish"),
        *("Sigmoid", "Tanh", "Softplus", "Softmax", "Hardswish", "Hardsigmoid", "Hardtanh"),
        *("Upsample", "PixelShuffle", "PixelUnshuffle", "ZeroPad2d", "ReflectionPad2d"),
    )
)
# these draw only in training, with a positive probability: see draws_nothing
_DROPOUTS = frozenset((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
_OURS = ("revzoo.layers.", "revzoo.models.")  # modules with layers of this package


def _is_known(m: nn.Module) -> bool:
    """Whether ``m`` is a layer of torch or this package; functions that it holds may be unknown."""
    return type(m).__module__.startswith(("torch.nn.modules.", *_OURS))


def _is_silent(m: nn.Module) -> bool:
    """Whether the known layer ``m`` itself draws nothing, or is a dropout."""
    cls = type(m)
    return cls in _SILENT or cls in _DROPOUTS or cls.__module__.startswith(_OURS)


def has_global_hooks() -> bool:
    """Whether hooks run in every module."""
    return bool(all_modules._global_forward_hooks or all_modules._global_forward_pre_hooks)


_table_of_children = attrgetter("_modules")


class _Seen:
    """The findings of a search in each place, and functions that read the current values.

    Args:
        entries: each with a place, a key, and the object or the type of the value that was there.
    """

    def __init__(self, entries: Sequence[tuple[Place, Any, Any]]) -> None:
        known = {(id(place), key): seen for place, key, seen in entries}
        # one call reads all keys of a place; calls for a single key cost more than its getter
        found = readers((place, key) for place, key, _ in entries)
        several = [(p, keys, read) for p, keys, read in found if len(keys) > 1]
        single = [(p, keys[0]) for p, keys, _ in found if len(keys) == 1]
        self.seen = [known[id(p), key] for p, keys, _ in several for key in keys]
        self.seen += [known[id(p), key] for p, key in single]
        self._reads = [read for _, _, read in several]
        self._single = [(getter(p), key) for p, key in single]

    def now(self) -> Iterator[Any]:
        """The current values, in the order of ``seen``."""
        several = itertools.chain.from_iterable(map(call, self._reads))
        return itertools.chain(several, [get(key, ABSENT) for get, key in self._single])


class Reach:
    """The result of one search (NOTE [ What counts as reached ])."""

    __slots__ = (
        "_children",
        "_classes",
        "_flat",
        "_kinds",
        "_lengths",
        "_may_draw",
        "_members",
        "_nested",
        "_objects",
        "_own",
        "_places",
        "_plain",
        "_roots",
        "_sized",
        "_types",
        "_watched",
        "changes_unseen",
        "draws",
        "enclosing",
        "gathered",
        "generators",
        "leaves_unfilled",
        "lists",
        "locks",
        "names",
        "namespaces",
        "resets_states",
        "runs_code",
        "scripted",
        "shares_buffers",
        "step",
        "tables",
        "tensors",
        "unrepeatable",
        "updates_unseen",
    )

    def __init__(self, search: Search, step: nn.Module | None, draws: bool = True) -> None:
        self.step = weakref.ref(step) if step is not None else _nothing
        self._roots = search.roots
        self.enclosing = search.enclosing  # modules around the step (rule 3)
        self._members = self.modules()
        tables = [getattr(m, name, {}) for m in self._members for name in _TABLES]
        self.tables = [(table, dict(table)) for table in tables]  # children and hooks, in order
        self.tensors = search.tensors
        self.generators = list(dict.fromkeys(search.generators))
        self.unrepeatable = search.unrepeatable
        self.namespaces = search.namespaces
        # with readers of their length and items
        self.lists = [(v, built_in(v, "__len__"), built_in(v, "__iter__")) for v in search.lists]
        self._plain: list[Plain] = []
        spaces = {id(m.__dict__) for m in self._members} | set(map(id, self.namespaces))
        self._places = readers(p for p in search.plain if id(p[0]) not in spaces)
        names = search.names | search.loaded
        self.updates_unseen = not _UPDATE_UNSEEN.isdisjoint(names)
        self.changes_unseen = not _CHANGE_UNSEEN.isdisjoint(names)
        # whether it runs code other than layers of torch and this package
        self.runs_code = search.runs_code or not all(map(_is_known, self._members))
        self.shares_buffers = _share_memory(
            [b for m in self._members for b in m._buffers.values()]
            + [place.get(key) for place, key, _ in self.tensors]
        )
        self.names = search.names
        self.leaves_unfilled = not _UNFILLED.isdisjoint(names) or any(
            isinstance(m, (nn.RReLU, nn.CTCLoss)) for m in self._members
        )
        self.resets_states = not _SET_STATES.isdisjoint(names)
        self.scripted = any(isinstance(m, torch.jit.ScriptModule) for m in self._members)
        self.draws = draws  # whether the step may draw random numbers; each forward pass updates it
        self.locks = locks_of(self._members)
        # from its code and layers alone; ``draws`` is known from its passes
        self._may_draw = self.runs_code or not all(map(_is_silent, self._members))
        self.gathered: Any = None  # parameters and buffers of the modules, see gathered.py
        self._nested = [m._modules for m in self._members]
        # compared by identity: a child that was replaced has other parameters
        self._children = [child for table in self._nested for child in table.values()]
        if step is not None:
            self._members = self._members[1:]  # without the step, to avoid a cycle
            # the class and the number of attributes, to which reached() will add the key
            mark = {CACHE_KEY} if isinstance(step, Step) else set()
            self._own = type(step), len(step.__dict__.keys() | mark)
        self._types = list(map(type, self._members))
        # objects and kinds of values in their places; constants never change
        self._watched = [entry for entry in search.watched if not isinstance(entry[0], Constant)]
        self._objects = _Seen(self._watched)
        self._kinds = _Seen([entry for entry in search.kinds if not isinstance(entry[0], Constant)])
        self._sized = [built_in(v, "__len__") for v in search.sized]  # readers of lengths
        self._lengths = list(map(call, self._sized))
        # readers of the items of containers that held only plain values
        self._flat = [
            built_in(v, "values" if isinstance(v, dict) else "__iter__") for v in search.flat
        ]
        self._classes = search.classes

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nothing, ()  # a copied or unpickled step searches again

    def modules(self) -> list[nn.Module]:
        """The step, its submodules, and the reached modules with their submodules."""
        step = self.step()
        return modules_in(self._roots if step is None else [step, *self._roots])

    def plain_values(self, modules: list[nn.Module]) -> list[tuple[dict[Any, Any], Plain]]:
        """Each namespace (attributes of a module or object, a dictionary) and its plain values.

        ``modules`` is the result of :meth:`modules`.
        """
        spaces = [m.__dict__ for m in modules]
        spaces += self.namespaces
        known = self._plain  # shared with earlier calls until a value changes
        if not known:
            self._plain = known = list(map(Plain.of, spaces))
        for i, space in enumerate(spaces):
            if not known[i].hold(space):
                # a copy: the conditions of earlier forward passes hold the old list's items
                known = known if known is not self._plain else [*known]
                known[i] = Plain.of(space)
        self._plain = known
        return list(zip(spaces, known, strict=True))

    def outer_values(self) -> list[tuple[Place, Sequence[Any], Read, Sequence[Any]]]:
        """Plain values in closures, globals and classes: place, keys, reader, current values."""
        return [(place, keys, read, tuple(read())) for place, keys, read in self._places]

    def containers(self) -> list[tuple[Any, Read, tuple[Any, ...]]]:
        """Reached lists, sets and deques, with a reader and the present items."""
        found = [(v, read, tuple(read())) for v, n, read in self.lists if n() <= MAX_ITEMS]
        kinds = set(map(type, itertools.chain.from_iterable(items for *_, items in found)))
        if not any(issubclass(kind, Tensor) for kind in kinds):
            return found
        # not containers with a graph: the search uses copies of these (rule 4)
        return [entry for entry in found if all(map(_is_leaf, entry[2]))]

    def is_of(self, step: nn.Module) -> bool:
        """Whether this is the result for ``step``, not for one that it was copied from."""
        return self.step() is step

    def unchanged(self) -> list[nn.Module] | None:
        """:meth:`modules`, if a search would find the same; otherwise None."""
        modules = self._members
        if (step := self.step()) is not None:
            # a new or deleted attribute; a replaced one is among the watched places
            if self._own != (type(step), len(step.__dict__)):
                return None
            modules = [step, *modules]
        nested = list(map(_table_of_children, modules))
        children = [child for table in nested for child in table.values()]
        if len(children) != len(self._children) or not all(map(is_, children, self._children)):
            return None
        if not all(map(is_, nested, self._nested)):
            return None
        if list(map(type, self._members)) != self._types:
            return None
        if list(map(call, self._sized)) != self._lengths:
            return None
        # an object among the numbers of a list: the search did not look into it
        items = itertools.chain.from_iterable(map(call, self._flat))
        if self._flat and not PLAIN_TYPES.issuperset(map(type, items)):
            return None
        try:
            same = all(map(is_, self._objects.now(), self._objects.seen))
            same = same and all(map(is_, map(type, self._kinds.now()), self._kinds.seen))
        except LookupError:
            return None
        return modules if same else None

    @property
    def draws_nothing(self) -> bool:
        """Whether the step holds only layers that draw no random numbers in their current state."""
        if self._may_draw or has_global_hooks():
            return False
        # a mode of the user may draw in any operator
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return False
        members = [self.step(), *self._members]
        drops = [m for m in members if isinstance(m, _DropoutNd)]
        return not any(m.training and m.p for m in drops)

    def displaced(self) -> list[tuple[Place, Any, Any]]:
        """Places, keys and old objects (no tensors) where another object is now."""
        return [entry for entry in self._watched if entry[0].get(entry[1], ABSENT) is not entry[2]]

    def added(self) -> list[tuple[Place, str]]:
        """Attributes that classes got after the search."""
        return [
            (ClassAttributes(c), name)
            for c, names in self._classes
            for name in vars(c).keys() - names
            if name not in ABOUT_CLASS
        ]


def _share_memory(tensors: Iterable[Any]) -> bool:
    """Whether some of the tensors share memory, so that an update of one changes others."""
    storages = [storage_id(t) for t in tensors if isinstance(t, Tensor) and not is_lazy(t)]
    return len({*storages}) < len(storages)


class Plain(NamedTuple):
    """The numbers, flags and strings in a namespace."""

    names: tuple[Any, ...]  # of all attributes, plain or not
    values: dict[Any, Any]
    get: Callable[[dict[Any, Any]], Iterable[Any]]  # the current values

    def hold(self, attributes: dict[Any, Any]) -> bool:
        """Whether ``attributes`` has these names, in this order, and plain values."""
        if tuple(attributes) != self.names:
            return False
        try:
            return all(map(is_, self.get(attributes), self.values.values()))
        except KeyError:
            return False

    def restore(self, attributes: dict[Any, Any]) -> None:
        """Restore the plain values and remove new names; other values stay."""
        for name in attributes.keys() - set(self.names) - NOT_RESTORED:
            del attributes[name]
        for name, value in self.values.items():
            if attributes.get(name, ABSENT) is not value:
                attributes[name] = value

    @staticmethod
    def of(attributes: dict[Any, Any]) -> Plain:
        values = {
            k: v for k, v in attributes.items() if type(v) in PLAIN_TYPES and k not in NOT_RESTORED
        }
        # itemgetter returns no tuple for one key, and calls a user's __getitem__
        fast = len(values) > 1 and type(attributes) is dict
        get = itemgetter(*values) if fast else functools.partial(_values_of, values)
        return Plain(tuple(attributes), values, get)


def _values_of(names: Iterable[Any], attributes: dict[Any, Any]) -> list[Any]:
    return [attributes.get(name, ABSENT) for name in names]


def reached(step: nn.Module) -> tuple[Reach, list[nn.Module]]:
    """The reach of ``step``, and all modules in it; cached until the step changes."""
    ours = isinstance(step, Step)
    reach: Reach | None = step.__dict__.get(CACHE_KEY) if ours else _searched.get(step)
    known = reach is not None and reach.is_of(step)
    if reach is not None and known and (modules := reach.unchanged()) is not None:
        return reach, modules
    # a new search finds other objects, but whether the step draws is known from its passes
    draws = reach.draws if reach is not None and known else True
    reach = Reach(Search(step), step, draws)
    if ours:
        step.__dict__[CACHE_KEY] = reach
    else:
        _searched[step] = reach
    return reach, reach.modules()


# for modules that are not steps: an attribute of theirs would be pickled with them
_searched: weakref.WeakKeyDictionary[nn.Module, Reach] = weakref.WeakKeyDictionary()


def reached_from(values: Iterable[Any], names: Iterable[str] = ()) -> Reach | None:
    """The reach of keyword arguments, if the step loads the attributes ``names``.

    None if the arguments are only tensors and plain values.
    """
    values = [v for v in values if type(v) not in PLAIN_TYPES and not isinstance(v, Tensor)]
    if not values:
        return None
    search = Search(None, names)
    for i, value in enumerate(values):
        search.value(value, Constant(value), None, f"an argument ({i})")
    search.run()
    return Reach(search, None)


def _nothing() -> None:
    return None


def _is_leaf(v: Any) -> bool:
    return not isinstance(v, Tensor) or v.is_leaf
