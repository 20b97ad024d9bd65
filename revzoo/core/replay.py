"""Faithful replays: captures the conditions of a forward pass and restores them.

A second computation gives the same value only under the same conditions: random state, autocast,
train/eval flags, buffers, parameters. ``torch.utils.checkpoint`` restores the first two. It lets
BatchNorm count the batch twice, and it uses flags and parameters as they are in the backward pass.

NOTE [ What a replay restores ]
    1. Random state: of the CPU, of the inputs' devices, and of each ``torch.Generator`` that the
       step reaches or receives as a keyword argument, if the step drew from it. Afterwards the
       caller's state is restored, so a replay does not change the caller's random numbers. For
       threads see NOTE [ Threads ] in :mod:`revzoo.core.threads`.
    2. Autocast: enabled, dtype and cache, for the CPU and the inputs' device type. Also the default
       device and dtype, the allowed attention kernels, and deterministic algorithms.
    3. Plain values: ``training`` and all other numbers, flags and strings of every module, and of
       objects, classes, functions, dictionaries, closures and globals that the step reaches; grid
       and memory mode of every step. Assignments during the replay are undone afterwards. Lists,
       sets and deques have the items from before the forward pass.
    4. Parameters: the same tensor objects as in the forward pass (``torch.func.functional_call``
       swaps them). Shards of FSDP2 are an exception: FSDP2 gathers them before the forward pass
       and before the replay. A parameter that was changed in place, or converted
       (``model.double()``), after the forward pass raises as in autograd, since the reconstruction
       would be wrong. The forward pass itself may change a parameter (an initialisation from the
       first batch, a clamp) or create it (``nn.LazyLinear``). The replay then uses a copy of the
       value after the forward pass, and raises if it changes that value. If code bypasses the
       version counters (``weight.data``), we treat every parameter like this.
    5. Buffers: in training, the statistics of torch's normalisation layers influence no output
       unless code of the step reads them, so the replay updates temporary copies. Any other buffer
       that the forward pass changed (spectral norm's vectors, a user's counter, statistics of a
       subclass) gets back its value from before the forward pass. During an inversion,
       ``Invertible.carried`` buffers have their value from after it. A buffer or keyword argument
       that was changed after the forward pass raises. Buffers that share memory share it in the
       replay, too.
    6. Objects that the step reaches without owning them (NOTE [ What counts as reached ] in
       :mod:`revzoo.core.search`): modules count as submodules, tensors as buffers. Functions, lists
       and modules that were replaced after the forward pass are put back during the replay.

NOTE [ Gathered once ]
    A search result keeps where the parameters and statistics of its modules are, and what they are
    like. Each forward pass checks it: the same tables of the same sizes, the same
    training flags, tensors of the same kinds. A difference gathers anew. Only if a parameter is
    replaced or changed before the backward pass do we look at each one by itself. Random states are
    not read for a step of layers that draw no random numbers (``Reach.draws_nothing``).

NOTE [ Copies of buffers ]
    Only after a forward pass do we know whether it changed a buffer in place. So we copy each
    buffer of up to ``_COPIED_SIZE`` elements before every forward pass. We copy a larger buffer (a
    mask, a table of positions) before the first forward pass, and later only if some forward pass
    has changed it. If such a buffer changes for the first time in a later pass, its old value is
    lost: the replay raises an error with a remedy. A buffer that is replaced (``self.count =
    self.count + 1``) needs no copy.

Known limit: side effects outside the step, such as appending to a list, happen again in a replay;
such code should check :func:`is_replaying`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.utils._pytree import tree_iter

from revzoo.core import threads
from revzoo.core.ambient import (
    CPU,
    HOST,
    Source,
    States,
    ambient,
    autocast,
    autocast_state,
    is_faked,
    random_states,
    set_ambient,
    set_random_states,
    with_autocast,
)
from revzoo.core.held import (
    LAZY,
    Held,
    Owned,
    Snapshot,
    Statistics,
    has_unread_statistics,
    is_sharded,
    replaced,
    sharing_memory,
)
from revzoo.core.invertible import Invertible, Step
from revzoo.core.places import Attributes, Place, refill
from revzoo.core.reach import OWN_ATTRIBUTES, Reach, reached, reached_from
from revzoo.core.tensors import address, tensors_of, version_of

_thread = threading.local()
_COPIED_SIZE = 2**14  # elements; a copy takes about as long as two checks


def is_replaying() -> bool:
    """Whether the calling code runs inside a replay, i.e. for the second time on the same values.

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
    return getattr(_thread, "depth", 0) > 0


# large buffers that no forward pass has changed so far: (name, training)
_unchanged_buffers: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = (
    weakref.WeakKeyDictionary()
)


class Conditions:
    """Everything that a module's result depends on, except its inputs and its code.

    See NOTE [ What a replay restores ]. The forward pass runs inside ``with conditions:``.
    """

    __slots__ = (
        "_after",
        "_altered",
        "_ambient",
        "_autocast",
        "_carried",
        "_carried_after",
        "_changes_unseen",
        "_containers",
        "_devices",
        "_entered",
        "_extra",
        "_flags",
        "_held",
        "_lazy",
        "_locked",
        "_locks",
        "_outer_values",
        "_owned",
        "_plain",
        "_reach",
        "_rng",
        "_snapshots",
        "_sources",
        "_statistics",
        "_swap_mark",
        "_tensors",
        "_versions",
        "reads_statistics",
    )

    def __init__(
        self, module: nn.Module, inputs: Iterable[Tensor], context: Mapping[str, Any] | None = None
    ) -> None:
        """Capture before the forward pass."""
        inputs = tuple(inputs)
        self._devices = frozenset(t.device for t in inputs if t.device.type not in HOST)
        self._autocast = autocast_state(with_autocast(self._devices))
        self._ambient = ambient()
        self._flags: list[tuple[nn.Module, str, Any]] = []
        self._held: list[Held] = []
        self._altered: list[Held] = []  # parameters that the forward pass changed
        self._statistics: list[Statistics] = []
        self._snapshots: list[Snapshot] = []
        self._carried: list[tuple[dict[str, Any], str]] = []
        self._carried_after: list[tuple[dict[str, Any], str, Tensor]] = []
        self._lazy: list[tuple[dict[str, Any], str]] = []
        self._reach, modules = reached(module)
        if self._reach.scripted:
            raise RuntimeError(
                f"{type(module).__name__} holds a TorchScript module, whose buffers and flags a "
                "replay cannot exchange; expected a plain module. Use torch.compile instead of "
                "torch.jit, or memory='store' or 'offload' for this step"
            )
        members = len(modules)
        self._extra = None
        self._plain = self._reach.plain_values(modules)
        if context:
            for name, value in context.items():
                for t in tensors_of(value):
                    self._held.append(Held.of(None, None, name, t))
            self._extra = reached_from(tree_iter(dict(context)), self._reach.names)
        if self._extra is not None:
            others = self._extra.modules()
            self._plain += self._extra.plain_values(others)
            modules = list(dict.fromkeys((*modules, *others)))
        self._outer_values = [entry for reach in self._reaches() for entry in reach.outer_values()]
        self._containers = [entry for reach in self._reaches() for entry in reach.containers()]
        self.reads_statistics = reads = any(r.reads_statistics for r in self._reaches())
        unseen = any(reach.updates_unseen for reach in self._reaches())
        self._changes_unseen = any(reach.changes_unseen for reach in self._reaches())
        self._owned: Owned | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        if not self._capture_owned(modules[:members], reads, unseen):
            members = 0
        for m in modules[members:]:
            self._capture(m, reads, unseen)
        for reach in self._reaches():
            self._flags.extend((m, "training", m.training) for m in reach.enclosing)
            for place, key, label in reach.tensors:
                self._capture_reached(place, key, label, module.training, unseen)
        if not inputs:  # then the step's own tensors decide the devices
            self._devices = self._devices_held()
            self._autocast = autocast_state(with_autocast(self._devices))
        self._sources: tuple[Source, ...] = ()
        draws_nothing = (
            self._owned is not None and self._extra is None and self._reach.draws_nothing
        )
        if not (draws_nothing and all(map(_is_plain, inputs))) and not is_faked(
            inputs
        ):  # fake: no draws
            generators = [g for reach in self._reaches() for g in reach.generators]
            self._sources = (CPU, *self._devices, *generators)
        self._rng: States | None = None
        self._after: States = {}
        self._entered = self._locked = False

    def _devices_held(self) -> frozenset[torch.device]:
        held = [h.tensor for h in (*self._held, *(s.held for s in self._snapshots))]
        devices = [t.device for t in (*held, *self._tensors)]
        return frozenset(d for d in devices if d.type not in HOST)

    def _capture_owned(self, modules: list[nn.Module], reads: bool, unseen: bool) -> bool:
        """Capture modules at once, where their parameters and statistics are as in the last pass.

        Their parameters have no :class:`Held` until :meth:`_hold_each` makes them.
        """
        owned, tensors = Owned.of(self._reach, modules, reads, unseen)
        if not owned.plain:
            return False
        try:
            self._versions = owned.versions(tensors)
        except RuntimeError:  # inference tensors
            return False
        self._owned, self._tensors = owned, tensors
        self._statistics += owned.statistics
        for i in owned.steps:
            m = modules[i]
            self._flags += ((m, "grid", m.grid), (m, "memory", m.memory))
            if isinstance(m, Invertible) and m.carried:
                self._carried.extend((m._buffers, name) for name in m.carried)
        for i in owned.buffered:
            self._capture_buffers(modules[i], reads, unseen)
        return True

    def _hold_each(self) -> None:
        """Make a :class:`Held` of each captured parameter."""
        if self._owned is not None:
            self._held += self._owned.each_parameter(self._tensors, self._versions)
            self._owned, self._tensors, self._versions = None, [], []

    def _parameters_unchanged(self) -> bool:
        """Whether the captured parameters are in their places, unchanged."""
        return self._owned is None or self._owned.parameters_unchanged(
            self._tensors, self._versions
        )

    def _capture(self, m: nn.Module, reads: bool, unseen: bool) -> None:
        if isinstance(m, Step):
            self._flags += ((m, "grid", m.grid), (m, "memory", m.memory))
        if isinstance(m, Invertible):
            self._carried.extend((m._buffers, name) for name in m.carried)
        for name, p in m._parameters.items():
            if p is None:
                continue
            if type(p) in LAZY:
                self._lazy.append((m._parameters, name))
            else:
                self._held.append(Held.of(m._parameters, name, name, p))
        if m._buffers:
            self._capture_buffers(m, reads, unseen)

    def _capture_buffers(self, m: nn.Module, reads: bool, unseen: bool) -> None:
        unread = has_unread_statistics(m, reads)
        unseen |= m.training and isinstance(m, batchnorm._NormBase)
        for name, b in m._buffers.items():
            if b is None:
                continue
            if type(b) in LAZY:
                self._lazy.append((m._buffers, name))
            elif unread:
                self._statistics.append(Statistics(m._buffers, name, b.dtype, b.device))
            else:
                large = b.numel() > _COPIED_SIZE and not unseen
                never_changed = large and (name, m.training) in _unchanged_buffers.get(m, ())
                before = None if never_changed else b.detach().clone()
                held = Held.of(m._buffers, name, name, b)
                self._snapshots.append(Snapshot(held, before, m, m.training, unseen))

    def _capture_reached(
        self, place: Place, key: Any, label: str, training: bool, unseen: bool
    ) -> None:
        t = place.get(key)
        if not isinstance(t, Tensor) or type(t) in LAZY:
            return
        held = Held.of(place, key, label, t)
        if isinstance(t, nn.Parameter):
            self._held.append(held)
            return
        # functions seldom change tensors that they do not own: large ones are not copied
        before = None if t.numel() > _COPIED_SIZE else t.detach().clone()
        self._snapshots.append(Snapshot(held, before, None, training, unseen))

    def _reaches(self) -> list[Reach]:
        return [self._reach] if self._extra is None else [self._reach, self._extra]

    def __enter__(self) -> None:
        """Begin the forward pass."""
        self._locks = self._reach.locks if self._statistics or self._snapshots else []
        threads.acquire(self._locks)
        self._locked = self._reach.draws and bool(self._sources) and threads.random_lock.acquire()
        self._entered = True
        if self._sources:
            self._swap_mark = threads.swaps.now()
            self._rng = random_states(self._sources)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """End the forward pass; drop random states and buffers that it did not change."""
        try:
            if failure is None:
                self._finish_random()
                self._finish_tensors()
        finally:
            if self._locked:
                threads.random_lock.release()
            threads.release(self._locks)

    def _finish_random(self) -> None:
        if not self._sources:
            return
        assert self._rng is not None
        before, after = self._rng, random_states(self._sources)
        changed = {s: state for s, state in before.items() if not torch.equal(state, after[s])}
        # another thread's replay may have restored the state, which hides draws of this thread
        hidden = not (self._locked or threads.swaps.alone(self._swap_mark))
        self._rng = before if hidden and before else changed or None
        self._after = {s: after[s] for s in self._rng or ()}
        if self._reach.draws != bool(changed):
            self._reach.draws = bool(changed)

    def _finish_tensors(self) -> None:
        self._carried_after = [
            (owner, name, owner[name].detach().clone()) for owner, name in self._carried
        ]
        owned = self._owned
        if owned and (self._changes_unseen or owned.versions(self._tensors) != self._versions):
            self._hold_each()
        for i, held in enumerate(self._held):
            if held.owner is None:
                continue
            if (now := version_of(held.tensor)) != held.version:
                self._held[i] = held = held._replace(version=now)
                self._altered.append(held)
            elif self._changes_unseen and not is_sharded(held.tensor):
                self._altered.append(held)
        for owner, name in self._lazy:
            if type(t := owner[name]) not in LAZY:
                self._held.append(Held.of(owner, name, name, t))
        if self._lazy and (step := self._reach.step()) is not None:
            self._reach = reached(step)[0]  # torch has removed the hook that made them
        if not self._snapshots:
            return
        snapshots, self._snapshots = self._snapshots, []
        written = {address(s.held.tensor) for s in snapshots if s.changed}
        for s in snapshots:
            if (
                written and address(s.held.tensor) in written
            ):  # perhaps through another tensor of this storage
                if s.before is None:
                    s = s._replace(held=s.held._replace(version=-1))
                self._snapshots.append(s)
            else:
                self._held.append(s.held)
            if s.module is not None and s.held.tensor.numel() > _COPIED_SIZE:
                known = _unchanged_buffers.setdefault(s.module, set())
                (known.discard if s in self._snapshots else known.add)((s.held.key, s.training))

    def storages(self) -> tuple[Set[int], Set[int]]:
        """Addresses of parameters and buffers, which stay in memory anyway; ids of most of them."""
        held = [h.tensor for h in self._held]
        held += [s.held.tensor for s in self._snapshots]
        if self._owned is None:
            held += [s.owner[s.name] for s in self._statistics]
            return set(map(address, held)), set()
        known = self._owned.addresses(self._tensors)
        found = known.union(map(address, held)) if held else known
        # a forward pass may replace the storage of a parameter (weight.data = ...)
        return found, set() if self._changes_unseen else set(map(id, self._tensors))

    def restored(self, *, inverting: bool = False) -> _Restored:
        """Restore the conditions of the forward pass; afterwards the caller's, also after errors.

        Args:
            inverting: give carried buffers their values after the forward pass.

        Raises:
            RuntimeError: a parameter or buffer was changed in place since the forward pass, or
                the replay drew other random numbers.
        """
        return _Restored(self, inverting)

    def _check_unchanged(self) -> None:
        if not self._parameters_unchanged():
            self._hold_each()
        for held in self._held:
            if version_of(held.tensor) != held.version or held.tensor.dtype is not held.dtype:
                held.check()

    def drawn(self) -> bool:
        """Whether the replay that is under way has drawn all that the forward pass drew."""
        if not self._rng:
            return True
        return all(torch.equal(t, self._after[s]) for s, t in random_states(self._rng).items())

    def _check_draws(self, before: States) -> None:
        """Rule 4 of NOTE [ Threads ]."""
        for source, state in random_states(before).items():
            if not torch.equal(state, self._after[source]):
                if torch.equal(state, before[source]):
                    continue  # the replay drew nothing
                raise RuntimeError(
                    "a replay did not draw the random numbers of its forward pass: several "
                    "threads drew at once, or a branch draws only in one of the two, as a lazy "
                    "layer that was initialised; expected one thread at a time. Call a model with "
                    "lazy layers once under torch.no_grad(). Put a lock around the threads' "
                    "forward and backward passes, give each thread's branches their own "
                    "torch.Generator, use processes, or memory='store'"
                )

    def _namespaces(self) -> Iterator[dict[str, Any]]:
        """The namespaces to which a replay may assign."""
        for attributes, _ in self._plain:
            yield attributes
        for reach in self._reaches():
            yield from (m.__dict__ for m in reach.enclosing)

    def _swap_copies(self, undo: _Undo) -> dict[int, Tensor]:
        """Replace the parameters that the forward pass changed by copies."""
        copies: dict[int, Tensor] = {}
        for held in self._altered:
            assert held.owner is not None
            copy = copies.setdefault(id(held.tensor), held.copy())
            _swap(undo, held.owner, held.key, copy)
        return copies

    @property
    def in_float16(self) -> bool:
        """Whether the forward pass ran under autocast to float16."""
        return any(on and dtype is torch.float16 for _, on, dtype in self._autocast[1])

    def _restore_modules(self, undo: _Undo) -> None:
        for container, items in self._containers:
            if not _contains(container, items):
                undo.append((_put_items_back, (container, items, tuple(container))))
                refill(container, items)
        for place, key, value in self._outer_values:
            if place.get(key) is not value:
                _swap(undo, place, key, value)
            else:
                undo.append((_put_value_back, (place, key, value)))
        if self._reach.unchanged() is None:
            for table, before in self._reach.tables:
                if table != before:
                    undo.append((_refill, (table, dict(table))))
                    _refill(table, before)
            for place, key, seen in self._reach.displaced():
                _swap(undo, place, key, seen)
        for attributes, plain in self._plain:
            if not plain.hold(attributes):
                plain.restore(attributes)  # undone together with the replay's assignments
        for m, name, value in self._flags:
            if (now := getattr(m, name)) != value:
                undo.append((setattr, (m, name, now)))
                setattr(m, name, value)
        for held in self._held:
            owner, tensor = held.owner, held.tensor
            if owner is not None and owner.get(held.key) is not tensor and replaced(held):
                _swap(undo, owner, held.key, tensor)
            if tensor.requires_grad != held.requires_grad and tensor.is_leaf:
                undo.append((tensor.requires_grad_, (tensor.requires_grad,)))
                tensor.requires_grad_(held.requires_grad)
        scratch = self._owned.scratch if self._owned is not None else ()
        for (owner, name, *_), copy in zip(self._statistics, scratch, strict=False):
            _swap(undo, owner, name, copy)
        for owner, name, dtype, device in self._statistics[len(scratch) :]:
            copy = owner[name].detach().clone()
            if copy.dtype != dtype or copy.device != device:
                copy = copy.to(device, dtype)
            _swap(undo, owner, name, copy)
        each = {id(s.held.tensor): s for s in self._snapshots}
        copies = sharing_memory({key: (s.held.tensor, s.value()) for key, s in each.items()})
        for s in self._snapshots:  # a tensor in several places gets one copy
            assert s.held.owner is not None
            _swap(undo, s.held.owner, s.held.key, copies[id(s.held.tensor)])


_Undo = list[tuple[Callable[..., Any], tuple[Any, ...]]]


class _Restored:
    """The context of :meth:`Conditions.restored`; a class, since a generator takes longer."""

    __slots__ = (
        "_conditions",
        "_copies",
        "_entered",
        "_inverting",
        "_locked",
        "_locks",
        "_rng",
        "_undo",
    )

    def __init__(self, conditions: Conditions, inverting: bool) -> None:
        self._conditions = conditions
        self._inverting = inverting

    def __enter__(self) -> None:
        c = self._conditions
        c._check_unchanged()
        self._entered = c._entered
        self._rng = rng = c._rng if self._entered else random_states(c._sources)
        self._locks = c._reach.locks if c._statistics or c._snapshots else []
        threads.acquire(self._locks)
        self._locked = bool(rng) and threads.random_lock.acquire()
        if rng:
            threads.swaps.enter()
        self._undo: _Undo = [
            (_restore_namespace, (space, space.copy())) for space in c._namespaces()
        ]
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            if rng:
                self._undo.append((set_random_states, (random_states(rng),)))
                set_random_states(rng)
            c._restore_modules(self._undo)
            for owner, name, after in c._carried_after if self._inverting else ():
                _swap(self._undo, owner, name, after.clone())
            self._copies = c._swap_copies(self._undo)
            if ambient() != c._ambient:
                self._enter(set_ambient(c._ambient))
            if c._autocast != autocast_state(with_autocast(c._devices)):
                self._enter(autocast(c._autocast))
        except BaseException:
            self._leave()
            raise

    def _enter(self, context: contextlib.AbstractContextManager[None]) -> None:
        context.__enter__()
        self._undo.append((context.__exit__, (None, None, None)))

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        c = self._conditions
        try:
            if failure is None:
                for held in c._altered:
                    held.check_copy(self._copies[id(held.tensor)], c._changes_unseen)
                if self._rng and self._entered and not self._inverting:
                    c._check_draws(self._rng)
        finally:
            self._leave()

    def _leave(self) -> None:
        _thread.depth -= 1
        for fn, arguments in reversed(self._undo):
            fn(*arguments)
        if self._rng:
            threads.swaps.leave()
        if self._locked:
            threads.random_lock.release()
        threads.release(self._locks)


def beside_replays(step: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context for a forward pass without recording: no other thread may swap its buffers."""
    if torch.compiler.is_compiling() or threading.active_count() == 1 or not step.training:
        return contextlib.nullcontext()
    return threads.exclusive(reached(step)[0].locks)


def parameters_of(step: nn.Module) -> Iterator[Tensor]:
    """The parameters of the step and of reached modules, and reached tensors."""
    yield from step.parameters()
    reach, modules = reached(step)
    for m in modules:
        yield from (p for p in m._parameters.values() if p is not None)
    for place, key, _ in reach.tensors:
        if isinstance(t := place.get(key), Tensor):
            yield t


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter)


def _restore_namespace(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    same = len(attributes) == len(before) and all(map(is_, attributes, before))
    if same and all(map(is_, attributes.values(), before.values())):
        return
    for name in attributes.keys() - before.keys() - OWN_ATTRIBUTES:
        del attributes[name]
    for name, value in before.items():
        if name not in OWN_ATTRIBUTES and attributes.get(name, before) is not value:
            attributes[name] = value


def _swap(undo: _Undo, owner: Place, key: Any, value: Any) -> None:
    if isinstance(owner, (dict, Attributes)) and key not in owner:
        undo.append((owner.pop, (key,)))
    else:
        undo.append((owner.__setitem__, (key, owner.get(key))))
    owner[key] = value


def _put_value_back(place: Place, key: Any, value: Any) -> None:
    if place.get(key) is not value:  # the replay assigned there
        place[key] = value


def _contains(container: Any, items: tuple[Any, ...]) -> bool:
    return len(container) == len(items) and all(map(is_, container, items))


def _put_items_back(container: Any, before: tuple[Any, ...], now: tuple[Any, ...]) -> None:
    """Restore the items ``now`` of the caller, and keep items that the replay added at the end."""
    added = list(itertools.islice(container, len(before), None))
    refill(container, (*now, *added))


def _refill(table: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    table.clear()
    table.update(wanted)
