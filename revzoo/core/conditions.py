"""What a replay restores, and what it refuses.

A step is evaluated twice: in the forward pass, and once more in the backward pass. Both give the
same bits only under the same conditions.

NOTE [ The contract ]
    A replay restores six things:

    1. torch's random state, of the CPU and of the inputs' devices, if the step may draw;
    2. autocast, and torch's default dtype and device;
    3. the ``training`` flags of the step's modules, and the grids of steps;
    4. parameters: the same tensors as in the forward pass. One that was changed in place raises;
    5. buffers: torch's norms update scratch tensors, so a batch counts once. Other small buffers
       start from their values before the forward pass. A large one that changed raises, and so do
       statistics that a norm read in evaluation mode. Grids of inner chains start from what they
       were, too;
    6. the buffers that an inverse needs (``Invertible.carried``): their values after the forward
       pass.

    The step's modules are its own, and those one level away: in the closure of a function, the
    globals that it names, the object of a bound method, the arguments of a partial. Everything else
    must stay as it is between forward and backward. If it does not, the guard
    (:mod:`revzoo.core.guard`) reports the difference.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, starmap, zip_longest
from operator import getitem, is_
from types import FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from revzoo.core.invertible import Invertible, Step, kind_of, name_of
from revzoo.core.tensors import (
    capturing_cuda_graph,
    detached,
    is_faked,
    version_of,
    versions_of,
)


class _Thread(threading.local):
    depth = 0  # how many replays run, one inside the other


_thread = _Thread()


def is_replaying() -> bool:
    """Whether the calling code runs in a replay, the inverse of a sequence, or ``check_inverse``.

    For forward hooks and modules with side effects (logging, counting).

    Example:
        >>> def log(module, inputs, output):
        ...     print("replay" if revzoo.is_replaying() else "forward")
        >>> block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> handle = block[0].register_forward_hook(log)
        >>> y = revzoo.checkpoint(block, torch.randn(2, 4))
        forward
        >>> y.sum().backward()
        replay
    """
    return _thread.depth > 0


_CPU = torch.device("cpu")
_HOST = ("cpu", "meta")  # no accelerators: the CPU's random state is always kept, meta has none
SMALL = 2**14
"""A buffer of at most this many elements is copied before each forward pass."""

# Layers that draw no random numbers and compute the same bits with and without recording. Code that
# we do not know may do either.
_QUIET = (
    *("container", "conv", "linear", "batchnorm", "normalization", "instancenorm", "activation"),
    *("pooling", "padding", "flatten", "pixelshuffle", "upsampling", "channelshuffle", "dropout"),
)
_QUIET_FILES = frozenset(f"torch.nn.modules.{name}" for name in _QUIET)
_LOUD_FILES = ("revzoo.models.revvit", "revzoo.models.revmvit")
_COUNTER = "num_batches_tracked"
_LOUD = (nn.MultiheadAttention, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)

Undo = list[tuple[Callable[..., Any], tuple[Any, ...]]]
_Autocast = tuple[str, torch.dtype]
_Buffer = tuple[dict[str, Any], str, Tensor]  # where it is, and its value


def is_quiet(m: nn.Module) -> bool:
    """Whether ``m`` itself, without its children, runs only code in ``_QUIET_FILES``."""
    file = type(m).__module__
    known = file in _QUIET_FILES or (file.startswith("revzoo.models.") and file not in _LOUD_FILES)
    replaced = "forward" in vars(m) or m._compiled_call_impl is not None
    hooked = m._forward_hooks or m._forward_pre_hooks
    return known and not (isinstance(m, _LOUD) or replaced or hooked)


class Members:
    """The modules of steps, and what follows from them; gathered again when they change.

    Parameters and buffers are given by their places: table and name.

    Args:
        steps: the steps, which hold the result, and so are not in it.
        parts: for each step its modules, with their children.
        tensors: tensors that the steps' functions hold, one level away.
        runs_alone: whether only code of these modules runs.
    """

    def __init__(
        self,
        steps: tuple[Step, ...],
        parts: Sequence[Iterable[nn.Module]],
        tensors: list[Tensor],
        *,
        runs_alone: bool = True,
    ) -> None:
        self.of_steps: list[Members] = []  # of each step, if there are several
        self.tensors = tensors
        self.walked = False  # whether a forward pass has looked for tensors that the step captures
        found_in = [dict.fromkeys(m for root in part for m in root.modules()) for part in parts]
        found = dict.fromkeys(m for part in found_in for m in part)
        self.modules = [m for m in found if m not in steps]
        every = [*steps, *self.modules]
        self.norms = [
            m for m in self.modules if isinstance(m, _NormBase) and _is_from(m, "torch.nn.")
        ]
        tables: list[Any] = [t for m in every for t in (m._modules, m._parameters)]
        tables += [m._buffers for m in self.norms]  # which Module.to() replaces
        self._tables = [t for t in tables if t]
        self._child_tables = [m._modules for m in every if m._modules]
        # of others the number of entries tells: a buffer may be replaced in each pass
        self._counted = [t for t in tables if not t]
        for m in every:
            self._counted += [m._buffers, m._forward_hooks, m._forward_pre_hooks]
        self._counted += [vars(m) for m in self.modules]  # which may get a forward of their own
        self._seen = self._signature()
        self.parameters = _places(every, "_parameters")
        owners = steps or (None,)
        self._owned = [
            _places(part if step is None else (step, *part), "_parameters")
            for step, part in zip(owners, found_in, strict=True)
        ]
        self.lazy = any(is_lazy(t[name]) for t, name in self.parameters)
        own = [m for m in every if _is_from(m, "revzoo.layers.")]
        kept = {id(m._buffers) for m in (*self.norms, *own)}
        self.buffers = [p for p in _places(every, "_buffers") if id(p[0]) not in kept]
        # the layers of this package change no other buffers
        self.carried: list[tuple[dict[str, Any], str]] = [
            (m._buffers, name) for m in every for name in _carried_by(m)
        ]
        known = {(id(table), name) for table, name in self.buffers}
        self.buffers += [p for p in self.carried if (id(p[0]), p[1]) not in known]
        # of which we do not know the code
        self.loud = [m for m in self.modules if not is_quiet(m)]
        # a step of a class that we do not know; not in `loud`, which would hold it in a cycle
        self.owner_is_loud = not all(
            _is_from(step, "revzoo.layers.", "revzoo.models.") or is_quiet(step) for step in steps
        )
        # whether only layers run that draw nothing and compute alike without recording
        self.quiet = runs_alone and not (self.loud or self.tensors or self.owner_is_loud)
        # which may begin chains of their own
        self.inner = [m for m in self.modules if isinstance(m, Step)]
        self.dropouts = [m for m in self.modules if isinstance(m, _DropoutNd)]

    @staticmethod
    def of(step: Step) -> Members:
        """The members of ``step``, as they are now."""
        members: Members | None = vars(step).get("_members")
        if members is None or not members._are_there():
            members = vars(step)["_members"] = Members._gather((step,))
        return members

    @staticmethod
    def together(steps: tuple[Step, ...]) -> Members | None:
        """The members of several steps, after ``of`` each; None if they share a parameter."""
        first, of_steps = vars(steps[0]), [vars(step)["_members"] for step in steps]
        members: Members | None = first.get("_together")
        if members is None or members.of_steps != of_steps:
            members = first["_together"] = Members._gather(steps)
            members.of_steps = of_steps
        tied = sum(map(len, members._owned)) > len(members.parameters)
        return None if tied else members

    @staticmethod
    def _gather(steps: tuple[Step, ...]) -> Members:
        tensors: list[Tensor] = []
        return Members(steps, [list(_parts(step, tensors)) for step in steps], tensors)

    @staticmethod
    def of_function(fn: Callable[..., Any], among: Sequence[nn.Module] = ()) -> Members:
        """The members of a module, or of what is one level away from a function.

        ``among`` are modules among its arguments.
        """
        tensors: list[Tensor] = []
        if isinstance(fn, nn.Module):
            return Members((), [[*_parts(fn, tensors), *among]], tensors)
        parts = [*_one_level_away(fn), *among]
        roots = [m for m in parts if isinstance(m, nn.Module)]
        tensors += [t for t in parts if isinstance(t, Tensor)]
        # a function runs code that we do not know
        return Members((), [roots], tensors, runs_alone=False)

    def _are_there(self) -> bool:
        # lazy parameters get their values in place
        return not self.lazy and self._signature() == self._seen

    def _signature(self) -> list[int]:
        children = chain.from_iterable([table.values() for table in self._tables])
        return [*map(id, children), *map(len, self._counted)]

    def children(self) -> list[nn.Module | None]:
        """The modules in all places of the modules, as they are now."""
        return [*chain.from_iterable([table.values() for table in self._child_tables])]

    def unknown(self, steps: Sequence[nn.Module]) -> list[nn.Module]:
        """The modules of which we do not know the code; ``steps`` as in the constructor."""
        return [*self.loud, *steps] if self.owner_is_loud else self.loud

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # None: copies and pickles of a step gather their own

    def draws(self) -> bool:
        """Whether a call now may draw random numbers."""
        return not self.quiet or any(m.training and m.p > 0 for m in self.dropouts)

    @functools.cached_property
    def scratch(self) -> list[dict[str, Tensor | None]]:
        """For each norm, buffers that a replay may overwrite; they influence no output."""
        return [_scratch_of(m, self.quiet) for m in self.norms]

    @property
    def may_share(self) -> bool:
        """Whether a replay may run under the conditions of several steps."""
        return self.quiet and not (self.buffers or self.lazy or self.draws())

    def trained(self) -> list[list[Tensor]]:
        """For each step, parameters and captured tensors that require gradient."""
        every = [[table[name] for table, name in places] for places in self._owned]
        found = [[t for t in tensors if t.requires_grad] for tensors in every]
        found[0] += [t for t in self.tensors if t.requires_grad]
        return found


def _is_from(m: nn.Module, *packages: str) -> bool:
    return type(m).__module__.startswith(packages)


def _carried_by(m: nn.Module) -> tuple[str, ...]:
    """The buffers of ``m`` that an inverse needs; of a step, or of a layer inside one of ours."""
    carries = isinstance(m, Invertible) or _is_from(m, "revzoo.layers.")
    return getattr(m, "carried", ()) if carries else ()


def _places(modules: Iterable[nn.Module], tables: str) -> list[tuple[dict[str, Any], str]]:
    places = {}
    for m in modules:
        table = getattr(m, tables)
        for name, t in table.items():
            if t is not None:
                places[id(t)] = table, name  # a shared tensor counts once
    return list(places.values())


def _parts(module: nn.Module, tensors: list[Tensor]) -> Iterator[nn.Module]:
    """The module that a step runs, and the modules one level away from its functions."""
    subject = module.subject if isinstance(module, Step) else module
    yield subject
    for m in (module, *subject.modules()):
        for v in list(vars(m).values()):
            if isinstance(v, (FunctionType, MethodType, functools.partial)):
                for part in _one_level_away(v):
                    if isinstance(part, nn.Module):
                        yield part
                    elif isinstance(part, Tensor):
                        tensors.append(part)


def _one_level_away(fn: Any) -> list[Any]:
    if isinstance(fn, functools.partial):
        return [*_one_level_away(fn.func), *fn.args, *fn.keywords.values()]
    if isinstance(fn, MethodType):
        return [fn.__self__]
    if isinstance(fn, FunctionType):
        own = fn.__globals__
        contents = [own[name] for name in fn.__code__.co_names if name in own]
        for cell in fn.__closure__ or ():
            try:
                contents.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        return contents
    return [fn]


class Conditions:
    """The conditions of one forward pass; captured before it, completed after it.

    Args:
        steps: the steps; none for a function or another module, which needs a name and a remedy.
        members: of the steps.
        inputs: the streams.
        name: for error messages.
        remedy: how to do without a replay, for error messages.
        ambient: whether to restore autocast; torch's checkpoint does it itself.
    """

    _versions: list[int] | None = None
    _children: list[nn.Module | None] | None = None
    _random: Sequence[tuple[torch.device, Tensor]] = ()
    _copies: Sequence[_Buffer] = ()
    _watched: Sequence[tuple[_Buffer, int]] = ()
    _carried: Sequence[_Buffer] = ()
    _growths: Sequence[tuple[dict[str, Any], Any]] = ()

    def __init__(
        self,
        steps: tuple[Step, ...],
        members: Members,
        inputs: Sequence[Tensor],
        *,
        name: str = "",
        remedy: str = "",
        ambient: bool = True,
    ) -> None:
        self.members = members
        self._steps = steps
        self._name = name
        self._remedy = remedy
        self._flagged = [*steps, *members.modules]
        self._flags = [m.training for m in self._flagged]
        self._on_grids = [*steps, *members.inner]
        self._grids = [m.grid for m in self._on_grids]
        self._parameters = [table[name] for table, name in members.parameters]
        self._trained = [p.requires_grad for p in self._parameters]
        devices = frozenset([t.device for t in (*inputs, *members.tensors)])
        self._kinds = _autocast_kinds(devices) if ambient else []
        self._ambient = _ambient(self._kinds)
        self.autocast = self._ambient[2]
        if members.draws() and not is_faked(inputs):
            if capturing_cuda_graph():
                raise RuntimeError(
                    f"{self.name} may draw random numbers while a CUDA graph is captured, and a "
                    "replay in the graph cannot draw the same numbers: remove dropout, or use "
                    "memory='store' for this step"
                )
            drawn = {_CPU, *(d for d in devices if d.type not in _HOST)}
            self._random = [(d, _random_state(d)) for d in drawn]
        # grids of inner chains adapt between the passes
        if members.inner:
            self._growths = [(vars(m), copy.copy(m.growth)) for m in members.inner]
        if members.buffers:
            held = [(table, key, table[key]) for table, key in members.buffers]
            self._copies = [(d, key, t.clone()) for d, key, t in held if t.numel() <= SMALL]
            self._watched = [(b, version_of(b[2])) for b in held if b[2].numel() > SMALL]
        if read := [m._buffers for m in members.norms if not m.training]:
            # BatchNorm changes its averages without a new version, but not its counter
            statistics = [(d, k, t) for d in read for k, t in d.items() if t is not None]
            self._watched = [*self._watched, *((b, version_of(b[2])) for b in statistics)]

    @property
    def name(self) -> str:
        return name_of(self._steps[0]) if self._steps else self._name

    @property
    def remedy(self) -> str:
        return self._steps[0].remedy if self._steps else self._remedy

    def finish(self) -> None:
        """Complete after the forward pass, in which a first batch may initialise parameters."""
        self._versions = versions_of(self._parameters)
        self._children = self.members.children()
        if carried := self.members.carried:
            self._carried = [(table, key, table[key].clone()) for table, key in carried]

    def check(self) -> None:
        """Raise a RuntimeError if a parameter or large buffer changed in place, or a module."""
        if self._children is not None and (found := self.members.children()) != self._children:
            old = next(a for a, b in zip_longest(self._children, found) if a is not b)
            raise RuntimeError(
                f"a module of {self.name}, {kind_of(old) if old is not None else 'None'}, was "
                "replaced between its forward pass and its replay, so its parameters would get no "
                f"gradient. Replace it after the backward pass, or {self.remedy}"
            )
        trained = [p.requires_grad for p in self._parameters]
        if trained != self._trained:
            changed = next(i for i, t in enumerate(trained) if t != self._trained[i])
            raise RuntimeError(
                f"requires_grad of {self.members.parameters[changed][1]!r} of {self.name} changed "
                f"to {trained[changed]} between its forward pass and its replay: set it before the "
                f"forward pass, or after the backward pass, or {self.remedy}"
            )
        now = versions_of(self._parameters)
        if self._versions is not None and now != self._versions:
            pairs = zip(now, self._versions, strict=True)
            changed = next(i for i, (a, b) in enumerate(pairs) if a != b)
            self._refuse(self._parameters[changed], self.members.parameters[changed][1])
        for (_, name, t), version in self._watched:
            if version_of(t) != version:
                self._refuse(t, name)

    def _refuse(self, t: Tensor, name: str) -> None:
        holders = (s for s in self._steps if any(t is p for p in s.parameters()))
        holder = next(map(name_of, holders), self.name)
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: {name!r} of {holder}, of shape {tuple(t.shape)}, "
            "changed between its forward pass and its replay. Change it after the backward pass, "
            f"or {self.remedy}"
        )

    def enter(self, *, inverting: bool = False) -> Undo:
        """Restore; returns what :func:`leave` undoes. ``inverting``: also the carried buffers."""
        self.check()
        undo: Undo = []
        members = self.members
        _thread.depth += 1
        try:
            for m in members.unknown(self._steps):  # assignments of the replay
                undo.append((_put_back, (m.__dict__, dict(m.__dict__))))
            if [m.training for m in self._flagged] != self._flags:
                for m, flag in zip(self._flagged, self._flags, strict=True):
                    _swap(undo, m.__dict__, "training", flag)
            if [m.grid for m in self._on_grids] != self._grids:
                for m, grid in zip(self._on_grids, self._grids, strict=True):
                    _swap(undo, m.__dict__, "grid", grid)
            if not self._has_parameters():
                for (table, name), p in zip(members.parameters, self._parameters, strict=True):
                    # FSDP2 gathers its shards itself
                    now = table[name] if name in table else None  # noqa: SIM401
                    if now is not p and not is_traceable_wrapper_subclass(p):
                        _swap(undo, table, name, p)
            for table, growth in self._growths:
                _swap(undo, table, "growth", copy.copy(growth))
            self._swap_buffers(undo, inverting=inverting)
            self._set_ambient(undo)
            for device, state in self._random:
                undo.append((_set_random_state, (device, _random_state(device))))
                _set_random_state(device, state)
        except BaseException:
            leave(undo)
            raise
        return undo

    def _has_parameters(self) -> bool:
        try:
            return all(map(is_, starmap(getitem, self.members.parameters), self._parameters))
        except KeyError:  # one is gone
            return False

    def _swap_buffers(self, undo: Undo, *, inverting: bool) -> None:
        members = self.members
        if members.norms:
            for m, scratch in zip(members.norms, members.scratch, strict=True):
                if m.training and scratch:
                    _swap(undo, m.__dict__, "_buffers", scratch)
        for table, name, t in self._copies:
            _swap(undo, table, name, t.clone())
        for (table, name, t), _ in self._watched:  # the forward pass may have replaced it
            _swap(undo, table, name, t)
        if inverting:
            for table, name, t in self._carried:
                _swap(undo, table, name, t.clone())

    def _set_ambient(self, undo: Undo) -> None:
        now, (dtype, device, autocast) = _ambient(self._kinds), self._ambient
        if now != self._ambient:
            undo.append((torch.set_default_dtype, (now[0],)))
            torch.set_default_dtype(dtype)
            if now[1] != device:
                context = device or torch.device("cpu")
                context.__enter__()
                undo.append((context.__exit__, (None, None, None)))
            wanted = dict(autocast)
            for kind in self._kinds:
                on, current = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
                undo.append((_set_autocast, (kind, on, current)))
                _set_autocast(kind, kind in wanted, wanted.get(kind, current))
        if autocast:  # a cast that recorded nothing must not serve code that records
            undo.append((torch.set_autocast_cache_enabled, (torch.is_autocast_cache_enabled(),)))
            torch.set_autocast_cache_enabled(False)


@functools.cache
def _autocast_kinds(devices: frozenset[torch.device]) -> list[str]:
    """The CPU's and the ``devices``' types that have autocast, sorted."""
    # the CPU always: branches may compute there, whatever the inputs' device
    kinds = sorted({"cpu", *(d.type for d in devices)})
    return [d for d in kinds if torch.amp.is_autocast_available(d)]


def _ambient(kinds: list[str]) -> tuple[torch.dtype, torch.device | None, list[_Autocast]]:
    """The default dtype and device, and which of the ``kinds`` of devices have which autocast."""
    on = [kind for kind in kinds if torch.is_autocast_enabled(kind)]
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in on]
    # set_default_device() and `with device:` are both modes on this stack
    device = torch.get_default_device() if torch._C._len_torch_function_stack() else None
    return torch.get_default_dtype(), device, autocast


def leave(undo: Undo) -> None:
    """End a replay: the caller's conditions again."""
    _thread.depth -= 1
    while undo:
        fn, args = undo.pop()
        fn(*args)


def _swap(undo: Undo, table: dict[str, Any], name: str, value: Any) -> None:
    # TorchScript's tables have no get()
    undo.append((_set, (table, name, table[name] if name in table else None)))  # noqa: SIM401
    _set(table, name, value)


def _set(table: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value


def _put_back(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in [*attributes]:
        if name not in before:
            del attributes[name]
    attributes.update(before)


def _set_autocast(kind: str, on: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, on)
    torch.set_autocast_dtype(kind, dtype)


def _scratch_of(m: nn.Module, quiet: bool) -> dict[str, Tensor | None]:
    scratch: dict[str, Any] = {k: t.clone() for k, t in m._buffers.items() if t is not None}
    # without its counter, torch's code has one kernel less to run; SyncBatchNorm needs it
    if quiet and _COUNTER in scratch and not isinstance(m, nn.SyncBatchNorm):
        scratch[_COUNTER] = None
    return scratch


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def repeating(step: Step, inputs: Sequence[Tensor]) -> Iterator[Conditions]:
    """A context in which evaluations leave statistics and random state as they are."""
    conditions = Conditions((step,), Members.of(step), inputs)
    undo = conditions.enter()
    try:
        yield conditions
    finally:
        leave(undo)


_PLAIN = (int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, nn.Module)


class Kept(NamedTuple):
    """A tensor or an object among the keyword arguments, as it was before the forward pass."""

    value: Any
    needs: bool = False
    version: int = 0
    tensors: Sequence[Any] = ()  # that the pickled ``value`` refers to

    @staticmethod
    def of(value: Any) -> Kept:
        """Keep ``value``, a leaf of the arguments."""
        if isinstance(value, _PLAIN):
            return Kept(value)
        if isinstance(value, Tensor):
            # detached: a context that this chain computed would form a cycle through the graph
            return Kept(detached(value), value.requires_grad, version_of(value))
        # an object that the step may fill, such as a cache of keys: tensors are shared, not copied
        file, tensors = io.BytesIO(), list[Any]()
        pickler = pickle.Pickler(file)
        pickler.persistent_id = lambda v: _shared(v, tensors)  # type: ignore[method-assign]
        try:
            pickler.dump(value)
        except Exception:  # what cannot be copied is passed as it is
            return Kept(value)
        return Kept(file.getvalue(), tensors=(tensors,))

    def changed(self) -> bool:
        """Whether it is a tensor that was changed in place since."""
        return isinstance(self.value, Tensor) and version_of(self.value) != self.version

    def again(self) -> Any:
        """The value for one more evaluation; a new leaf if it requires gradient."""
        if self.tensors:
            unpickler = pickle.Unpickler(io.BytesIO(self.value))
            unpickler.persistent_load = self.tensors[0].__getitem__  # type: ignore[method-assign]
            return unpickler.load()
        return self.value.detach().requires_grad_() if self.needs else self.value


def _shared(v: Any, shared: list[Any]) -> int | None:
    if not isinstance(v, (Tensor, nn.Module, FunctionType, type)):
        return None
    shared.append(v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v)
    return len(shared) - 1
