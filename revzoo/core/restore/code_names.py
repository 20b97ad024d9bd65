"""Finds the globals, attributes, modules and methods that functions and classes use by name.

It reads byte code, so it depends on the version of Python. See NOTE [ What counts as reached ] in
:mod:`revzoo.core.restore.search`.
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from revzoo.core.invertible import Invertible, Step

# packages whose code is not searched, besides the standard library
_FOREIGN = frozenset(
    (
        *("torch", "functorch", "triton", "numpy", "torchmetrics", "revzoo"),
        *("lightning", "pytorch_lightning", "lightning_fabric"),
    )
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
# methods that are called without a name in the user's code
ENTRY_POINTS = frozenset(name for c in (Step, Invertible) for name in vars(c) if name[0] != "_") | {
    "forward",
    "__call__",
}
# special methods that no operator calls in a branch, or that data classes make (__eq__)
_NO_OPERATORS = frozenset(vars(object)) | {"__del__", "__setstate__", "__copy__", "__deepcopy__"}

# The functions that a class and its bases define, by name; also overridden ones, since super()
# calls them.
Methods = dict[str, tuple[types.FunctionType, ...]]


def has_foreign_class(v: object) -> bool:
    """Whether the class of ``v`` is of a package whose code is not searched."""
    return is_foreign_module(type(v).__module__)


def _cached(f: Callable[[type], Any]) -> Callable[[type], Any]:
    """A cache that keeps no class alive; the results must not refer to the class."""
    results: weakref.WeakKeyDictionary[type, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(f)
    def cached(cls: type) -> Any:
        if (result := results.get(cls)) is None:
            results[cls] = result = f(cls)
        return result

    return cached


@functools.lru_cache(maxsize=4096)
def is_foreign_module(module: str | None) -> bool:
    """Whether a module of this name belongs to a package whose code is not searched."""
    root = (module or "").partition(".")[0]
    if root not in sys.stdlib_module_names:
        return root in _FOREIGN
    # a user's file may be called profile.py
    file = getattr(sys.modules.get(root), "__file__", None)
    return file is None or file.startswith(_STANDARD_LIBRARY)


def loads_any(f: types.FunctionType, names: frozenset[str]) -> bool:
    """Whether the function loads a global of one of the ``names``, an attribute or a module."""
    return any(not names.isdisjoint(loaded) for loaded in loads(f.__code__))


@functools.lru_cache(maxsize=4096)
def loads(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Names of globals, attributes and modules that the code, and code nested in it, loads.

    A module's name begins with as many dots as its import is relative.
    """
    names: set[str] = set()
    attributes: set[str] = set()
    modules: set[str] = set()
    level: Any = 0
    constant: Any = None  # the last one
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            # of an import: how relative it is, then the names
            level, constant = constant, instruction.argval
        elif instruction.opname == "IMPORT_NAME":
            modules.add("." * level + instruction.argval)
        # its keywords are in a tuple: case Scale(factor=f)
        elif instruction.opname == "MATCH_CLASS":
            attributes.update(constant)
        elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        # LOAD_METHOD until Python 3.11, LOAD_SUPER_ATTR from 3.12 on
        # an imported name may get another one: from torch import batch_norm as norm
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(instruction.argval)
    # lambdas, comprehensions and inner functions are constants of the code around them
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            inner = loads(const)
            names |= inner[0]
            attributes |= inner[1]
            modules |= inner[2]
    return frozenset(names), frozenset(attributes), frozenset(modules)


# not cached: a method may be replaced between two forward passes
def methods_of(cls: type) -> Methods:
    """The functions that user-defined classes define; setters of properties as ``__set__``."""
    methods: Methods = {}
    for c in cls.__mro__:
        if not is_foreign_module(c.__module__):
            for name, value in vars(c).items():
                if functions := functions_of(value):
                    methods[name] = (*methods.get(name, ()), *functions)
                # code that only sets a property does not load its name
                if isinstance(value, property) and isinstance(value.fset, types.FunctionType):
                    methods["__set__"] = (*methods.get("__set__", ()), value.fset)
    return methods


def is_operator(name: str) -> bool:
    """Whether ``name`` is a method that an operator or a built-in function calls."""
    return name[:2] == "__" and name not in _NO_OPERATORS


def functions_of(value: Any) -> list[types.FunctionType]:
    """The functions of an attribute of a class."""
    found = [value.fget if isinstance(value, property) else value]
    if isinstance(value, functools.singledispatchmethod):
        found = [value.func, *value.dispatcher.registry.values()]
    elif isinstance(value, (functools.cached_property, functools.partialmethod)):
        found = [value.func]
    found = [f.__func__ if isinstance(f, (staticmethod, classmethod)) else f for f in found]
    return [f for f in found if isinstance(f, types.FunctionType)]


@_cached
def slots_of(cls: type) -> tuple[str, ...]:
    """The slots that user-defined classes define."""
    # types of C extensions have members, too, but no __slots__; some are read-only
    own = [
        vars(c)
        for c in cls.__mro__
        if not is_foreign_module(c.__module__) and "__slots__" in vars(c)
    ]
    kinds = types.MemberDescriptorType
    return tuple(name for names in own for name, m in names.items() if isinstance(m, kinds))


@_cached
def inherits_code(cls: type) -> bool:
    """Whether the class inherits code that is not searched and may load any attribute."""
    return bool(_library_bases(cls))


@_cached
def called_by_bases(cls: type) -> frozenset[str]:
    """The methods that the forward passes of torch's and revzoo's bases of ``cls`` may call."""
    defined: dict[str, list[types.FunctionType]] = {}
    for c in _library_bases(cls):
        for name, value in vars(c).items():
            defined.setdefault(name, []).extend(functions_of(value))
    operators = set(filter(is_operator, defined))
    called: set[str] = set()
    new: set[str] = {*ENTRY_POINTS, *operators} & defined.keys()
    while new:  # and what these call, and so on
        called |= new
        loaded = [loads(f.__code__)[1] for name in new for f in defined[name]]
        new = (set[str]().union(*loaded) & defined.keys()) - called
    return frozenset(name for name in called if name[:2] != "__")


def _library_bases(cls: type) -> list[type]:
    bare = (object, nn.Module, Step, Invertible)
    bases = [c for c in cls.__mro__ if c not in bare]
    return [c for c in bases if c.__module__.partition(".")[0] in ("torch", "revzoo")]
