"""Finds modules, tensors and random generators that a step's code uses without owning them.

A branch may be a function that closes over a module, or that uses one by a global name; a bound
method; a partial; a module with a function or a list of tensors as an attribute. A replay must
restore these objects like submodules, parameters and buffers, so we must find them. torch has no
such search: ``nn.Module.modules()`` lists only registered modules.

NOTE [ What counts as reached ]
    1. The search starts at the step and its submodules and follows attributes and forward hooks.
       From a function it follows the closure, the bound object, default arguments, attributes and
       globals. It looks into lists, deques, sets, tuples, dictionaries, ``UserDict``,
       ``UserList`` and ``ChainMap``, partials and plain objects.
       A class that is reached may be called, so its ``__init__`` and ``__new__`` count as called.
       Modules that a function imports in its body are searched once they are imported.
    2. A user's class may have many attributes. In an object, its class and the bases, the search
       follows only attributes that a reached function loads by name. So a method of a large object
       does not bring in objects that only other methods use. A function that calls ``getattr`` may
       load any attribute. Operators call special methods without naming them, so these count as
       called, and so do methods that override a method of torch's or revzoo's forward pass.
    3. A module encloses the step if it contains the step, or if one of the module's methods is
       running and may have called ``invertible_checkpoint`` or ``checkpoint``. The other parts of
       an enclosing module belong to other steps. So the search follows only the submodules,
       parameters and buffers that are loaded by name; or all submodules, if a function iterates
       over them. It skips a ``forward`` that runs the step.
    4. If a container, simple namespace or data class holds tensors with a graph, the search uses a
       copy with detached aliases. The graph may hold the tape, and the tape holds the result of the
       search: without the copy, a list of losses, for example, would keep the graph of the
       previous forward pass alive.
    5. The search does not enter the standard library, torch, NumPy, Lightning and this package, and
       it ignores weak references and values computed at run time. Of Python's ``random`` and
       ``numpy.random`` it finds the random states.
    6. A replay cannot rewind an iterator, such as ``itertools.cycle``, or the system's random
       numbers. If a step uses one, the guard compares all tensors that the step saves.

A search takes as long as a few torch operations. The step keeps the result, with every place that
was searched; :meth:`Reach.unchanged` checks only these places.
"""

from __future__ import annotations

import builtins
import collections
import functools
import importlib.util
import random
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from revzoo.core.invertible import Step
from revzoo.core.restore.code_names import (
    ENTRY_POINTS,
    Methods,
    called_by_bases,
    functions_of,
    has_foreign_class,
    inherits_code,
    is_foreign_module,
    is_operator,
    loads,
    loads_any,
    methods_of,
    slots_of,
)
from revzoo.core.restore.detached_copies import (
    CONTAINERS,
    LISTS,
    attributes_of,
    items_of,
    without_graph,
)
from revzoo.core.restore.global_state import HostGenerator, host_generator
from revzoo.core.restore.places import (
    ABSENT,
    PLAIN_TYPES,
    Attributes,
    Cell,
    ClassAttributes,
    Constant,
    Items,
    Place,
    SlotAttributes,
    entries,
)

CACHE_KEY = "_revzoo_reach"  # in the __dict__ of a step
MAX_ITEMS = 256  # a dictionary or list with more items is a table, which no forward pass changes
_STANDARD = frozenset(vars(nn.Module())) | {"_compiled_call_impl", CACHE_KEY}
_STEP_OPTIONS = frozenset(Step.__annotations__)
_STEP_RUNNERS = frozenset(("invertible_checkpoint", "checkpoint"))  # functions that run a step
_LOADS_ANY = frozenset(("getattr", "vars", "__dict__"))
_LOADS_ANY_MEMBER = _LOADS_ANY | {
    "children",
    "modules",
    "named_children",
    "named_modules",
    "get_submodule",
    "_modules",
}
# Attributes in which Python and data classes describe a class. Python adds some at any time
# (annotations), and reading a dozen in each class takes as long as checking all other attributes.
# So they count only if a function loads them by name: getattr(), vars() and the like do not bring
# them in.
ABOUT_CLASS = frozenset(
    (
        *("__doc__", "__module__", "__dict__", "__weakref__", "__slots__", "__annotations__"),
        *("__abstractmethods__", "_abc_impl", "__orig_bases__", "__parameters__", "__match_args__"),
        *("__dataclass_fields__", "__dataclass_params__"),
        *("__static_attributes__", "__firstlineno__"),  # from Python 3.13 on
        *("__annotate__", "__annotate_func__", "__annotations_cache__"),  # from Python 3.14 on
    )
)
_BUILTINS = frozenset(vars(builtins))
_CONSTRUCTORS = frozenset(("__init__", "__new__"))


def modules_in(roots: Iterable[nn.Module | None]) -> list[nn.Module]:
    """All ``modules()`` of ``roots``, without the cost of nested generators."""
    found: dict[nn.Module, None] = {}
    stack = [*roots]
    stack.reverse()
    while stack:
        m = stack.pop()
        if m is not None and m not in found:
            found[m] = None
            stack += m._modules.values()
    return list(found)


class _Object(NamedTuple):
    """A namespace; the search follows the attributes in it that a function loads by name."""

    attributes: dict[str, Any]
    place: Place
    methods: Methods
    skipped: frozenset[str]  # attributes that are never followed
    all_names: bool  # whether to follow attributes that no function loads by name, too
    wildcards: frozenset[str]  # names that load any attribute
    called: frozenset[str]  # methods that code of the class's bases may call, which is not searched


class Search:
    """Follows the code of ``step``; holds what it finds, and every place that it looked at."""

    def __init__(self, step: nn.Module | None, names: Iterable[str] = ()) -> None:
        self.step = step
        self.roots: list[nn.Module] = []
        self.enclosing: list[nn.Module] = []
        self.tensors: list[tuple[Place, Any, str]] = []
        self.generators: list[torch.Generator | HostGenerator] = []
        self.unrepeatable = False  # whether it found a value that a replay cannot rewind
        self.uses_numpy = False
        # rule 2: a new function may add names, which open attributes of earlier objects
        self.names: set[str] = {*ENTRY_POINTS, *names}
        self.loaded: set[str] = set()
        self.watched: list[tuple[Place, Any, Any]] = []  # places of objects
        self.kinds: list[tuple[Place, Any, type]] = []  # places of plain values and tensors
        self.namespaces: list[dict[Any, Any]] = []  # of objects, and dictionaries
        self.lists: list[Any] = []  # and sets, and deques
        self.plain: list[tuple[Place, Any]] = []
        self.sized: list[Any] = []
        self.flat: list[Any] = []  # containers of plain values only
        self.classes: list[tuple[type, frozenset[str]]] = []  # with the names of all attributes
        self.runs_code = False  # whether it found a function or an object that may have methods
        self._seen: set[int] = set()
        self._kept: list[Any] = []  # alive, so that no id in _seen is reused
        self._visited: set[tuple[int, str]] = set()
        self._objects: list[_Object] = []
        owned = modules_in([step])
        self._owned = set(owned)
        for m in owned:
            self._module(m)
        self.run()

    def run(self) -> None:
        """Follow names into objects until nothing new turns up."""
        names = -1
        while names != len(self.names):  # a new name opens attributes of earlier objects
            names = len(self.names)
            # the list grows meanwhile: to start again after each new object would be quadratic
            for thing in self._objects:
                self._expand(thing)
        # np.random.rand(), say
        named = not self.names.isdisjoint({"random", *_LOADS_ANY})
        if self.uses_numpy and named and "numpy.random" in sys.modules:
            self._library(sys.modules["numpy.random"])

    def _expand(self, thing: _Object) -> None:
        for name, functions in thing.methods.items():
            if name in self.names or name in thing.called or is_operator(name):
                for f in functions:
                    self._function(f)
        follows_all = thing.all_names or not thing.wildcards.isdisjoint(self.names)
        for name in thing.attributes if follows_all else thing.attributes.keys() & self.names:
            self._follow(thing, name)

    def _follow(self, thing: _Object, name: str) -> None:
        """Search the value of an attribute, once."""
        v = thing.attributes[name]
        is_method = isinstance(thing.place, ClassAttributes) and bool(functions_of(v))
        # these count only by name, even if a function calls getattr()
        if (is_method or name in ABOUT_CLASS) and name not in self.names:
            return
        mark = id(thing.attributes), name
        if mark in self._visited or name in thing.skipped:
            return
        self._visited.add(mark)
        if is_method:  # its code is searched with the objects of the class
            self.watched.append((thing.place, name, v))
        # a layer of torch has the same numbers as attributes in every pass
        elif not (thing.all_names and type(v) in PLAIN_TYPES):
            self.value(v, thing.place, name, name)

    def _is_new(self, thing: Any) -> bool:
        """Whether the search meets ``thing`` for the first time."""
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        self._kept.append(thing)
        return True

    def value(self, v: Any, place: Place, key: Any, label: str) -> None:
        """Record the value in a place, and search it."""
        if type(v) in PLAIN_TYPES:
            self.kinds.append((place, key, type(v)))
            # constants cannot change; Reach restores lists and modules as a whole
            if not isinstance(place, (Constant, Items, Attributes)):
                self.plain.append((place, key))
        elif isinstance(v, Tensor):
            self.kinds.append((place, key, type(v)))
            self.tensors.append((place, key, label))
        elif isinstance(v, torch.Generator):
            self.watched.append((place, key, v))
            self.generators.append(v)
        elif isinstance(v, nn.Module):
            self.watched.append((place, key, v))
            self._reached_module(v)
        elif isinstance(v, CONTAINERS):
            v = without_graph(v)
            self.watched.append((place, key, v))
            if self._is_new(v):
                self._container(v, label)
        elif isinstance(v, _WRAPPERS):
            self.watched.append((place, key, v))
            items = "maps" if isinstance(v, collections.ChainMap) else "data"
            self.value(getattr(v, items), vars(v), items, label)
        elif isinstance(v, type):
            self.watched.append((place, key, v))
            if not is_foreign_module(v.__module__):
                self._class(v)
                self._object({}, methods_of(v), called=_CONSTRUCTORS)
                if not has_foreign_class(v):  # a metaclass of the user
                    self._object({}, methods_of(type(v)))
        elif isinstance(v, types.ModuleType) and is_foreign_module(v.__name__):
            self._library(v)
            if label != key:  # most are torch, nn and the like in the globals
                self.watched.append((place, key, v))
        elif _is_unrepeatable(v):
            self.unrepeatable = True
        elif (generator := host_generator(v)) is not None:
            self.watched.append((place, key, v))
            self.generators.append(generator)
        elif callable(v) or isinstance(v, _SEARCHED) or not has_foreign_class(v):
            v = without_graph(v)
            self.watched.append((place, key, v))
            if self._is_new(v):
                self._code_or_object(v, label)
        else:
            self.kinds.append((place, key, type(v)))

    def _library(self, module: types.ModuleType) -> None:
        """A module whose code is not searched: its global random state is all that counts."""
        if (generator := host_generator(module)) is not None:
            self.generators.append(generator)
        self.uses_numpy = self.uses_numpy or module.__name__ == "numpy"

    def _constants(self, values: Iterable[Any], label: str) -> None:
        """Search values in places that cannot change, such as the items of a tuple."""
        for v in values:
            self.value(v, Constant(v), None, label)

    def _reached_module(self, m: nn.Module) -> None:
        if m in self._owned or m in self.enclosing:
            return
        if self._is_enclosing(m):
            self.enclosing.append(m)
            self._search_enclosing(m)
        else:
            self._owned.update(modules_in([m]))
            self.roots.append(m)
            for child in modules_in(m._modules.values()):
                self._module(child)
            self._module(m)

    def _is_enclosing(self, m: nn.Module) -> bool:
        """Whether the step runs inside ``m`` (rule 3); otherwise the step runs ``m``."""
        if self._contains_step(m):
            return True
        calls = any(
            loads_any(f, _STEP_RUNNERS)
            for name, functions in methods_of(type(m)).items()
            if name[:2] != "__"
            for f in functions
        )
        return calls and _is_running(m)

    def _contains_step(self, m: nn.Module | None) -> bool:
        return self.step is not None and self.step in modules_in([m])

    def _search_enclosing(self, m: nn.Module) -> None:
        # code that runs the step would bring in all siblings; the step may call other methods
        runs = _STEP_RUNNERS | {k for k, child in m._modules.items() if self._contains_step(child)}
        methods = {
            name: tuple(f for f in functions if name not in ENTRY_POINTS or not loads_any(f, runs))
            for name, functions in methods_of(type(m)).items()
        }
        self._object(m.__dict__, methods, _STANDARD)
        self._class(type(m))
        for members in (m._parameters, m._buffers, m._modules):
            self._object(members, {}, wildcards=_LOADS_ANY_MEMBER)

    def _container(self, v: Any, label: str) -> None:
        # a change of length is seen without looking at the items
        self.sized.append(v)
        if isinstance(v, LISTS):
            self.lists.append(v)
        table = entries(v) if isinstance(v, dict) else None
        items = list(enumerate(items_of(v)) if table is None else table.items())
        if table is not None and len(items) <= MAX_ITEMS:
            self.namespaces.append(table)
        # the usual case, and the only cheap one for long lists
        if PLAIN_TYPES.issuperset(type(item) for _, item in items):
            if len(items) <= MAX_ITEMS and not isinstance(v, (tuple, frozenset)):
                self.flat.append(v)
            return
        place = Items(v) if isinstance(v, (list, collections.deque)) else table
        if place is None:  # a tuple or set
            self._constants((item for _, item in items), label)
            return
        for key, item in items:
            self.value(item, place, key, f"{label}[{key!r}]")

    def _code_or_object(self, v: Any, label: str) -> None:
        self.runs_code = True
        # the value's name in its library: the code may use another name
        if isinstance(v, _FUNCTIONS):
            self.loaded.add(v.__name__)
        if isinstance(v, types.FunctionType):
            self._function(v)
        elif isinstance(v, functools.partial):
            self._constants((v.func, *v.args, *v.keywords.values()), label)
        elif isinstance(v, types.MethodType):
            self._constants((v.__func__, v.__self__), label)
        elif isinstance(v, (types.BuiltinMethodType, types.MethodWrapperType)):
            if not isinstance(v.__self__, types.ModuleType):
                self._constants((v.__self__,), label)
        elif isinstance(v, types.ModuleType):
            if not is_foreign_module(v.__name__):
                # without wildcards: not even getattr brings in a whole package
                self._object(vars(v), {}, watch_size=False, wildcards=frozenset())
        else:
            attributes = attributes_of(v)
            if "__wrapped__" in attributes:  # functools.lru_cache
                self.value(attributes["__wrapped__"], attributes, "__wrapped__", label)
            if isinstance(v, types.SimpleNamespace) or not has_foreign_class(v):
                self._attributes(v)

    def _attributes(self, v: Any) -> None:
        slots = SlotAttributes(v)
        for name in slots_of(type(v)):
            self.value(slots.get(name, ABSENT), slots, name, name)
        attributes = attributes_of(v)
        self.namespaces.append(attributes)
        self._object(attributes, methods_of(type(v)))
        self._class(type(v))

    def _class(self, cls: type) -> None:
        """The attributes of user-defined classes."""
        # class attributes may be tensors, counters or modules that several objects share
        for c in cls.__mro__:
            if not is_foreign_module(c.__module__) and self._is_new(c):
                self.sized.append(vars(c))
                self.classes.append((c, frozenset(vars(c))))
                self._object(
                    dict(vars(c)),
                    {},
                    _STANDARD | _STEP_OPTIONS,
                    place=ClassAttributes(c),
                    watch_size=False,  # done above: the dictionary is a copy
                )

    def _object(
        self,
        attributes: dict[str, Any],
        methods: Methods,
        skipped: frozenset[str] = frozenset(),
        *,
        place: Place | None = None,
        all_names: bool = False,
        watch_size: bool = True,
        wildcards: frozenset[str] = _LOADS_ANY,
        called: frozenset[str] = frozenset(),
    ) -> None:
        """Add a namespace to those that :meth:`run` follows; its place is itself by default."""
        if self.step is not None and attributes is self.step.__dict__:
            # this dictionary will hold the result: its size changes, and a strong reference to it
            # would be a cycle
            place, watch_size = Attributes(self.step), False
        elif place is None:
            place = attributes
        thing = _Object(attributes, place, methods, skipped, all_names, wildcards, called)
        self._objects.append(thing)
        if watch_size:
            self.sized.append(attributes)

    def _module(self, m: nn.Module) -> None:
        if not self._is_new(m):
            return
        cls = type(m)
        skipped = _STANDARD | _STEP_OPTIONS if isinstance(m, Step) else _STANDARD
        inherits, called = inherits_code(cls), called_by_bases(cls)
        self._object(m.__dict__, methods_of(cls), skipped, all_names=inherits, called=called)
        self._class(cls)
        for hooks in (m._forward_pre_hooks, m._forward_hooks):
            self.sized.append(hooks)
            for key, hook in hooks.items():
                self.value(hook, hooks, key, "a hook")

    def _function(self, f: types.FunctionType) -> None:
        self.runs_code = True
        # functions with the same code may hold other objects, such as lambdas made in a loop
        holds = f.__closure__ or f.__defaults__ or f.__kwdefaults__ or f.__dict__
        if not self._is_new(f.__code__) and not holds:
            return
        foreign = is_foreign_module(f.__globals__.get("__name__", ""))
        if foreign and f.__closure__ is None:
            return
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            if self._is_new(cell):
                place = Cell(cell)
                # empty: a variable that is assigned later, perhaps by the forward pass
                self.value(place.get(None, ABSENT), place, None, name)
        self._constants((*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()), f.__name__)
        if foreign:
            return
        if f.__dict__ and self._is_new(f.__dict__):
            self.namespaces.append(f.__dict__)
            self._object(f.__dict__, {})
        loaded, attributes, imported = loads(f.__code__)
        # Globals are looked up in the function's module only, attributes in every object. Code that
        # calls super().__init__() does not create the objects that the search has reached.
        self.names |= (attributes - _CONSTRUCTORS) | (loaded & _LOADS_ANY)
        self.loaded |= loaded
        for name in imported:
            self._imported(name, f.__globals__.get("__package__"))
        for name in loaded:
            # not with _is_new: many functions share the globals, but load different names
            mark = id(f.__globals__), name
            # a missing global that is not a built-in may be defined before the backward pass
            if mark not in self._visited and (name in f.__globals__ or name not in _BUILTINS):
                self._visited.add(mark)
                self.value(f.__globals__.get(name, ABSENT), f.__globals__, name, name)

    def _imported(self, name: str, package: str | None) -> None:
        """Search a module that a function imports, if it is there."""
        if name[0] == "." and not package:
            return  # such an import fails
        name = importlib.util.resolve_name(name, package)
        module = sys.modules.get(name, ABSENT)
        if is_foreign_module(name):
            if isinstance(module, types.ModuleType):
                self._library(module)
        else:
            self.kinds.append((sys.modules, name, type(module)))  # a search finds it later
            self._constants((module,), name)


_SEARCHED = (types.SimpleNamespace, types.ModuleType)  # though their classes are foreign
# of the standard library, but written in Python: their items are in an attribute
_WRAPPERS = (collections.UserDict, collections.UserList, collections.ChainMap)
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
)


def _is_unrepeatable(v: object) -> bool:
    """Whether a replay can neither read nor rewind the state of ``v``."""
    # iterators of users are searched like any object
    is_iterator = hasattr(type(v), "__next__") and type(v).__module__ in ("builtins", "itertools")
    return is_iterator or isinstance(v, random.SystemRandom)


def _is_running(m: nn.Module) -> bool:
    """Whether a user-defined method of ``m`` is running in this thread."""
    codes = {f.__code__ for functions in methods_of(type(m)).values() for f in functions}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # the code alone does not show the object: all objects of a class share it
        code = frame.f_code
        if code in codes and code.co_argcount and frame.f_locals.get(code.co_varnames[0]) is m:
            return True
        frame = frame.f_back
    return False
