"""The tensors of a step as they were in the forward pass: parameters, buffers, statistics.

See rules 4 and 5 of NOTE [ What a replay restores ] in :mod:`revzoo.core.restore.conditions`.

NOTE [ Gathered once ]
    A search result keeps the places of its modules' parameters and statistics, and their traits
    (class, dtype, device, ``requires_grad``; for statistics also the shape). Each forward pass
    checks whether tables, training flags and traits are the same, and gathers them again if not. We
    look at single parameters only if one is replaced or changed before the backward pass.

NOTE [ Copies of buffers ]
    Only after a forward pass do we know whether it changed a buffer in place. So we copy each
    buffer of up to ``_COPIED_SIZE`` elements before every forward pass. We copy a larger buffer (a
    mask, a table of positions) before the first forward pass, and later only if some forward pass
    has changed it. If such a buffer changes for the first time in a later pass, its old value is
    lost: the replay raises an error with a remedy. A buffer that is replaced (``self.count =
    self.count + 1``) needs no copy.

    Unknown code may pass a buffer to one of torch's kernels that change it without a new version.
    So if the step runs such code, its replay starts from the copies of all small
    buffers, changed or not. If the code names such a kernel or bypasses the version counters, we
    also copy every large buffer and reached tensor, and treat it as changed. Large reached tensors
    and constants are compared with their copy instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence, Set
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from revzoo.core.invertible import Invertible
from revzoo.core.restore.places import Constant, Place, Undo, refill, swap
from revzoo.core.restore.reach import Reach, has_global_hooks
from revzoo.core.tensors import has_values, storage_id, tensors_of, version_of

_LAZY = frozenset((UninitializedParameter, UninitializedBuffer))
_NORMS = frozenset(
    (
        *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d),
        *(instancenorm.InstanceNorm1d, instancenorm.InstanceNorm2d, instancenorm.InstanceNorm3d),
        batchnorm.SyncBatchNorm,
    )
)
_COPIED_SIZE = 2**14  # elements; a copy takes about as long as two checks
# large buffers that no forward pass has changed so far: (name, training)
_unchanged_buffers: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = (
    weakref.WeakKeyDictionary()
)


class Held(NamedTuple):
    """A parameter, buffer, reached tensor or keyword argument, as it was in the forward pass."""

    owner: Place | None  # such as the module's _parameters; None for an argument
    key: Any
    name: str
    tensor: Tensor
    original: weakref.ref[Tensor] | None  # if ``tensor`` is an alias of it
    version: int
    requires_grad: bool
    dtype: torch.dtype

    @staticmethod
    def of(owner: Place | None, key: Any, name: str, t: Tensor) -> Held:
        needs = t.requires_grad
        if t.is_leaf:
            return Held(owner, key, name, t, None, version_of(t), needs, t.dtype)
        # an alias: the tensor's graph may hold the tape, which holds this object
        alias = t.detach().requires_grad_(needs)
        return Held(owner, key, name, alias, weakref.ref(t), version_of(t), needs, t.dtype)

    def still_there(self) -> bool:
        """Whether the tensor is still in its place."""
        assert self.owner is not None
        now = self.owner.get(self.key)
        return now is (self.tensor if self.original is None else self.original())

    def replaced(self) -> bool:
        """Whether another tensor is in its place. FSDP2's gathered shards do not count."""
        if self.still_there():
            return False
        assert self.owner is not None
        now = self.owner.get(self.key)
        gathered = is_sharded(self.tensor) and not is_sharded(now)
        return not gathered

    def check(self) -> None:
        t = self.tensor
        if (now := version_of(t)) != self.version:
            raise RuntimeError(
                f"'{self.name}' of shape {tuple(t.shape)} was modified by an in-place "
                f"operation between forward and backward: it is at version {now}; "
                f"expected version {self.version}. Activations recomputed with it would be wrong. "
                "Run backward before changing it (optimizer.step(), load_state_dict()), or use "
                "memory='store' for this step"
            )
        if t.dtype is not self.dtype:  # another device is an error of torch's
            raise RuntimeError(
                f"'{self.name}' of shape {tuple(t.shape)} was converted between forward and "
                f"backward: it is {t.dtype} now; expected {self.dtype}. "
                "Run backward before converting the model (double(), half(), to()), or convert it "
                "before the forward pass"
            )

    def copy(self) -> Tensor:
        """A copy to put in the tensor's place, for code that may change it."""
        copy = self.tensor.detach().clone().requires_grad_(self.tensor.requires_grad)
        return nn.Parameter(copy, copy.requires_grad) if self.tensor.is_leaf else copy

    def check_copy(self, copy: Tensor, unseen: bool) -> None:
        """Raise if the replay changed the copy's value by more than rounding errors.

        Args:
            copy: the result of :meth:`copy`, after the replay.
            unseen: whether code may change it without a new version.
        """
        if not (version_of(copy) or unseen) or not copy.numel():
            return
        with torch.no_grad():
            size = self.tensor.abs().max()
            # a change such as a clamp repeats up to rounding; a counter or a step of an average
            # does not
            rounding = 100 * torch.finfo(copy.dtype).eps if copy.dtype.is_floating_point else 0
            same = bool((copy - self.tensor).abs().max() <= rounding * size)
        if not same:
            raise RuntimeError(
                f"'{self.name}' of shape {tuple(copy.shape)} is changed in place by each forward "
                "pass, so a replay cannot repeat one; expected a change that, done twice, gives "
                "the same value. Change it between training steps, or use memory='store' for "
                "this step"
            )


class Snapshot(NamedTuple):
    """A tensor that the forward pass may change, and its value before the forward pass."""

    held: Held
    before: Tensor | None  # None where no copy was taken, NOTE [ Copies of buffers ]
    module: nn.Module | None  # of a buffer
    training: bool
    unseen: bool  # whether code may change it without a new version

    @property
    def written(self) -> bool:
        """Whether the tensor was changed in place, as far as we can see."""
        held, t = self.held, self.held.tensor
        if version_of(t) != held.version:
            return True
        if not self.unseen:
            return False
        # a replay cannot replace a constant by a copy, and a kept copy of a large tensor takes
        # memory: for these the values decide
        compared = self.module is None and (
            isinstance(held.owner, Constant) or t.numel() > _COPIED_SIZE
        )
        if not compared or self.before is None:
            return True
        return has_values(t) and not torch.equal(self.before, t)

    def value(self) -> Tensor:
        """A copy of its value before the forward pass."""
        held = self.held
        before = self.before
        if before is None and version_of(held.tensor) == held.version:
            before = held.tensor  # replaced, not changed
        if before is None:
            raise RuntimeError(
                f"'{held.name}' of shape {tuple(held.tensor.shape)} was changed in place by this "
                "forward pass, but not by earlier ones; expected no change, so the replay lacks a "
                "copy of its old value. Repeat the forward pass, which now copies it; "
                "or replace the tensor instead of changing it (self.name = ...), or use "
                "memory='store' for this step"
            )
        return before.clone().requires_grad_(held.requires_grad)


class Statistics(NamedTuple):
    """A statistic of one of torch's normalisation layers, which updates it in every pass."""

    owner: dict[str, Any]
    name: str
    dtype: torch.dtype
    device: torch.device


_parameters_of = attrgetter("_parameters")
_buffers_of = attrgetter("_buffers")
_training = attrgetter("training")
_version = attrgetter("_version")
_shape = attrgetter("shape")
_traits = attrgetter("__class__", "is_leaf", "requires_grad", "dtype", "layout", "device")


class Owned:
    """Where parameters and statistics are; see NOTE [ Gathered once ].

    Its only tensors are scratch ones, which replays update instead of statistics that influence no
    output.
    """

    __slots__ = (
        "_addresses",
        "_pointers",
        "_scratch",
        "_shapes",
        "_training",
        "absent",
        "buffered",
        "carrying",
        "names",
        "places",
        "plain",
        "statistics",
        "tables",
        "traits",
    )

    def __init__(self, modules: list[nn.Module], *, shared: bool) -> None:
        self._training = list(map(_training, modules))
        self.tables = _tables_of(modules)
        self.names = list(map(tuple, self.tables))
        # positions, not modules: the first module holds this object, a cycle otherwise
        self.carrying = [
            i for i, m in enumerate(modules) if isinstance(m, Invertible) and m.carried
        ]
        self.buffered: list[int] = []  # modules with buffers whose values a replay needs
        places = [(m._parameters, k) for m in modules for k in m._parameters]
        self.places = [(table, k) for table, k in places if table[k] is not None]
        # a bias that a layer gets later would be missed if only current tensors were compared
        self.absent = _absent_from(self.tables)
        self.statistics: list[Statistics] = []
        for i, m in enumerate(modules):
            if not m._buffers:
                continue
            buffers = m._buffers.items()
            lazy = any(type(b) in _LAZY for _, b in buffers)
            if lazy or shared or not updates_statistics(m):
                self.buffered.append(i)
                continue
            self.statistics += [
                Statistics(m._buffers, k, b.dtype, b.device) for k, b in buffers if b is not None
            ]
        tensors = self.tensors()
        self.traits = list(map(_traits, tensors))
        self._shapes = list(map(_shape, tensors[len(self.places) :]))
        kinds = [nn.Parameter] * len(self.places) + [Tensor] * len(self.statistics)
        # whether all are parameters or tensors of torch itself, leaves, and strided
        self.plain = all(
            kind is expected and leaf and layout is torch.strided
            for expected, (kind, leaf, _, _, layout, _) in zip(kinds, self.traits, strict=True)
        )
        self._pointers: list[int] = []
        self._addresses: frozenset[int] = frozenset()
        self._scratch: list[Tensor] = []

    @staticmethod
    def of(reach: Reach, modules: list[nn.Module]) -> tuple[Owned, list[Tensor]]:
        """The places in ``modules`` and their current tensors; gathered once for ``reach``."""
        owned: Owned | None = reach.owned
        tensors = None if owned is None else owned.tensors_if_same(modules)
        if owned is None or tensors is None:
            reach.owned = owned = Owned(modules, shared=reach.shares_buffers)
            tensors = owned.tensors()
        return owned, tensors

    @property
    def scratch(self) -> list[Tensor]:
        """Tensors like the statistics, for replays to update: their values influence no output."""
        if not self._scratch:
            # inference tensors would refuse the updates of a later pass that records
            with torch.inference_mode(False):
                self._scratch = [
                    torch.zeros(shape, dtype=s.dtype, device=s.device)
                    for s, shape in zip(self.statistics, self._shapes, strict=True)
                ]
        return self._scratch

    def tensors(self) -> list[Any]:
        """The parameters, then the statistics; None where one is missing."""
        found = [table.get(k) for table, k in self.places]
        return found + [s.owner.get(s.name) for s in self.statistics]

    def tensors_if_same(self, modules: list[nn.Module]) -> list[Tensor] | None:
        """The current tensors, if a new search of ``modules`` would find tensors like them."""
        tables = _tables_of(modules)
        if list(map(_training, modules)) != self._training:
            return None
        if not all(map(is_, tables, self.tables)):
            return None
        if list(map(tuple, tables)) != self.names:
            return None
        if any(table.get(k) is not None for table, k in self.absent):
            return None
        tensors = self.tensors()
        if any(t is None for t in tensors) or list(map(_traits, tensors)) != self.traits:
            return None
        if list(map(_shape, tensors[len(self.places) :])) != self._shapes:
            return None
        return tensors

    def versions(self, tensors: list[Tensor]) -> list[int]:
        """The version counters of the parameters among :meth:`tensors`."""
        return list(map(_version, tensors[: len(self.places)]))

    def parameters_unchanged(self, tensors: list[Tensor], versions: list[int]) -> bool:
        """Whether the parameters among ``tensors`` are in their places, unchanged."""
        now = [table.get(key) for table, key in self.places]
        return (
            all(map(is_, now, tensors))
            and list(map(_version, now)) == versions
            and list(map(_traits, now)) == self.traits[: len(now)]
        )

    def each_parameter(self, tensors: list[Tensor], versions: list[int]) -> list[Held]:
        """One :class:`Held` for each parameter among ``tensors``."""
        each = zip(self.places, tensors, versions, self.traits, strict=False)
        return [
            Held(table, key, key, t, None, version, needs, dtype)
            for (table, key), t, version, (_, _, needs, dtype, *_) in each
        ]

    def addresses(self, tensors: list[Tensor]) -> frozenset[int]:
        """Addresses of :meth:`tensors`."""
        pointers = [t.data_ptr() for t in tensors]
        if pointers != self._pointers:
            self._pointers = pointers
            self._addresses = frozenset(map(storage_id, tensors))
        return self._addresses


def _tables_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """The modules' dictionaries of parameters, then of buffers."""
    return [*map(_parameters_of, modules), *map(_buffers_of, modules)]


def _absent_from(tables: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The parameters and buffers that are None, by table and name."""
    return [(table, k) for table in tables for k, t in table.items() if t is None]


def _copy(t: Tensor) -> Tensor:
    # detach() takes half the time of a small clone(), so only where autograd would record the copy
    return t.detach().clone() if t.requires_grad else t.clone()


def updates_statistics(m: nn.Module) -> bool:
    """Whether the buffers of ``m`` are statistics that it updates in every pass."""
    return m.training and type(m) in _NORMS


def sharing_memory(pairs: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """The copies in pairs (tensor, copy), which share memory where the tensors do."""
    copies = {key: copy for key, (_, copy) in pairs.items()}
    groups: dict[int, list[int]] = {}
    for key, (t, _) in pairs.items():
        groups.setdefault(storage_id(t), []).append(key)
    for keys in groups.values():
        if len(keys) > 1 and all(pairs[key][0].layout == torch.strided for key in keys):
            # separate copies would not see each other's changes
            storage = pairs[keys[0]][0].untyped_storage().clone()  # type: ignore[no-untyped-call]
            for key in keys:
                t, copy = pairs[key]
                place = (storage, t.storage_offset(), t.shape, t.stride())
                view = torch.empty(0, dtype=t.dtype, device=t.device).set_(*place)
                # copy_() refuses expanded tensors
                _without_repeats(view).copy_(_without_repeats(copy))
                copies[key] = view
    return copies


def _without_repeats(t: Tensor) -> Tensor:
    for d, stride in enumerate(t.stride()):
        t = t.narrow(d, 0, 1) if stride == 0 and t.shape[d] > 1 else t
    return t


def is_sharded(t: Tensor) -> bool:
    """Whether ``t`` is a DTensor, such as a shard of FSDP2."""
    return hasattr(t, "device_mesh")


class StepTensors:
    """Captures, checks and restores the tensors that a step's result depends on.

    Args:
        reaches: the reach of the step, then of its keyword arguments.
        modules: the modules of the first.
        others: further modules of the second.
        context: the step's keyword arguments.
        training: whether the step is in training mode.
    """

    __slots__ = (
        "_absent",
        "_altered",
        "_before",
        "_carried",
        "_carried_after",
        "_changes_unseen",
        "_held",
        "_names",
        "_owned",
        "_snapshots",
        "_statistics",
        "_tables",
        "_tensors",
        "_updates_unseen",
        "_versions",
        "has_lazy_layers",
        "restores_buffers",
    )

    def __init__(
        self,
        reaches: Sequence[Reach],
        modules: list[nn.Module],
        others: list[nn.Module],
        context: Mapping[str, Any],
        training: bool,
    ) -> None:
        # Whether a replay starts from copies of all statistics and small buffers: unknown code may
        # read them, or change them without a new version. Hooks of all modules are such code.
        self.restores_buffers = has_global_hooks() or any(
            r.runs_code or r.shares_buffers for r in reaches
        )
        self._updates_unseen = any(reach.updates_unseen for reach in reaches)
        self._changes_unseen = any(reach.changes_unseen for reach in reaches)
        self._held = [
            Held.of(None, None, name, t) for name, v in context.items() for t in tensors_of(v)
        ]
        self._altered: list[Held] = []  # parameters that the forward pass changed
        self.has_lazy_layers = False  # which create their tensors in the forward pass
        self._statistics: list[Statistics] = []
        self._before: list[Tensor] = []  # the statistics' values, if the replay restores them
        self._snapshots: list[Snapshot] = []
        self._carried: list[tuple[dict[str, Any], str]] = []
        self._carried_after: list[tuple[dict[str, Any], str, Tensor]] = []
        # the tensors of ``modules`` as a whole; None if they are captured one by one
        self._owned: Owned | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._tables: list[dict[str, Any]] = []  # of all parameters and buffers
        self._names: list[tuple[str, ...]] = []  # in each table
        self._absent: list[tuple[dict[str, Any], str]] = []  # the entries that are None
        at_once = self._capture_at_once(reaches[0], modules)
        for m in others if at_once else (*modules, *others):
            self._capture(m)
        if others:
            tables = _tables_of(others)
            # new lists: the current ones belong to a search result, which later passes use
            self._tables = [*self._tables, *tables]
            self._names = [*self._names, *map(tuple, tables)]
            self._absent = [*self._absent, *_absent_from(tables)]
        for reach in reaches:
            for place, key, label in reach.tensors:
                self._capture_reached(place, key, label, training)

    def _capture_at_once(self, reach: Reach, modules: list[nn.Module]) -> bool:
        """Capture all parameters and statistics of ``modules`` by NOTE [ Gathered once ].

        Parameters have no :class:`Held` until :meth:`_hold_each` makes them: most steps never need
        one, and making them takes longer than all other checks.

        Returns False if a tensor is not an ordinary one; then only the tables' names are captured.
        """
        owned, tensors = Owned.of(reach, modules)
        self._tables, self._names, self._absent = owned.tables, owned.names, owned.absent
        if not owned.plain:
            return False
        try:
            self._versions = owned.versions(tensors)
        except RuntimeError:  # inference tensors
            return False
        self._owned, self._tensors = owned, tensors
        self._statistics += owned.statistics
        if self.restores_buffers:
            self._before = list(map(_copy, tensors[len(owned.places) :]))
        for i in owned.carrying:
            self._capture_carried(modules[i])
        for i in owned.buffered:
            self._capture_buffers(modules[i])
        return True

    def _hold_each(self) -> None:
        """Make a :class:`Held` of each parameter that was captured at once."""
        if self._owned is not None:
            self._held += self._owned.each_parameter(self._tensors, self._versions)
            self._owned, self._tensors, self._versions = None, [], []

    def _capture(self, m: nn.Module) -> None:
        self._capture_carried(m)
        for name, p in m._parameters.items():
            if p is None:
                continue
            if type(p) in _LAZY:
                self.has_lazy_layers = True
            else:
                self._held.append(Held.of(m._parameters, name, name, p))
        if m._buffers:
            self._capture_buffers(m)

    def _capture_carried(self, m: nn.Module) -> None:
        if isinstance(m, Invertible):
            self._carried.extend((m._buffers, name) for name in m.carried)

    def _capture_buffers(self, m: nn.Module) -> None:
        unread = updates_statistics(m) and not self.restores_buffers
        # torch's kernels change buffers without a new version, if the step's code names such a
        # kernel, or in a subclass of a normalisation layer
        by_kernels = self._updates_unseen or (m.training and isinstance(m, batchnorm._NormBase))
        unchanged = _unchanged_buffers.get(m, ())
        for name, b in m._buffers.items():
            if b is None:
                continue
            if type(b) in _LAZY:
                self.has_lazy_layers = True
            elif unread:
                self._statistics.append(Statistics(m._buffers, name, b.dtype, b.device))
            else:  # NOTE [ Copies of buffers ]
                small = b.numel() <= _COPIED_SIZE
                unseen = by_kernels or (small and self.restores_buffers)
                skips = not (small or by_kernels) and (name, m.training) in unchanged
                before = None if skips else _copy(b)
                held = Held.of(m._buffers, name, name, b)
                self._snapshots.append(Snapshot(held, before, m, m.training, unseen))

    def _capture_reached(self, place: Place, key: Any, label: str, training: bool) -> None:
        t = place.get(key)
        if not isinstance(t, Tensor):
            return
        if type(t) in _LAZY:
            self.has_lazy_layers = True
            return
        held = Held.of(place, key, label, t)
        if isinstance(t, nn.Parameter):
            self._held.append(held)
            return
        # functions seldom change tensors that they do not own: copy large ones only if a change
        # may go unseen
        skips = t.numel() > _COPIED_SIZE and not self._updates_unseen
        before = None if skips else _copy(t)
        self._snapshots.append(Snapshot(held, before, None, training, self._updates_unseen))

    @property
    def all_plain(self) -> bool:
        """Whether every parameter is an ordinary one; a DTensor may draw random numbers."""
        return self._owned is not None

    @property
    def swaps_buffers(self) -> bool:
        """Whether a replay puts copies in place of buffers (rule 2 of NOTE [ Threads ])."""
        return bool(self._statistics or self._snapshots)

    def all(self) -> list[Tensor]:
        """Parameters, buffers, reached tensors and arguments; statistics where captured at once."""
        each = [held.tensor for held in (*self._held, *(s.held for s in self._snapshots))]
        return each + self._tensors

    def storages(self) -> tuple[Set[int], Set[int]]:
        """Tensors that stay in memory anyway: addresses of all, and ids of those known by id.

        An id is found faster than the storage_id of a storage.
        """
        held = [h.tensor for h in self._held]
        held += [s.held.tensor for s in self._snapshots]
        if self._owned is None:
            held += [s.owner[s.name] for s in self._statistics]
            return set(map(storage_id, held)), set()
        known = self._owned.addresses(self._tensors)
        found = known.union(map(storage_id, held)) if held else known
        # a forward pass may replace the storage of a parameter (weight.data = ...)
        return found, set() if self._changes_unseen else set(map(id, self._tensors))

    def finish(self) -> None:
        """After the forward pass: note what it changed, drop the other copies."""
        self._carried_after = [(owner, k, _copy(owner[k])) for owner, k in self._carried]
        owned = self._owned
        if owned and (self._changes_unseen or owned.versions(self._tensors) != self._versions):
            self._hold_each()
        for i, held in enumerate(self._held):
            if held.owner is None:  # an argument: a change of it raises, see check()
                continue
            if (now := version_of(held.tensor)) != held.version:
                self._held[i] = held = held._replace(version=now)
                self._altered.append(held)
            elif self._changes_unseen and not is_sharded(held.tensor):
                self._altered.append(held)
        if self._snapshots:
            self._drop_snapshots()

    def _drop_snapshots(self) -> None:
        """Keep the snapshots of tensors that the forward pass changed; check the others later."""
        snapshots, self._snapshots = self._snapshots, []
        # by storage: a change through one tensor changes others that share its memory
        written = {storage_id(s.held.tensor) for s in snapshots if s.written}
        for s in snapshots:
            overwritten = bool(written) and storage_id(s.held.tensor) in written
            changed = overwritten or not s.held.still_there()
            if not changed:
                self._held.append(s.held)
            elif overwritten and s.before is None:
                # lost; with an impossible version, value() raises
                self._snapshots.append(s._replace(held=s.held._replace(version=-1)))
            else:
                self._snapshots.append(s)
            if s.module is not None and s.held.tensor.numel() > _COPIED_SIZE:
                known = _unchanged_buffers.setdefault(s.module, set())
                key = s.held.key, s.training
                if changed:
                    known.discard(key)
                else:
                    known.add(key)

    def check(self) -> None:
        """Raise a RuntimeError if a tensor was changed in place since the forward pass."""
        owned = self._owned
        if owned and not owned.parameters_unchanged(self._tensors, self._versions):
            self._hold_each()  # to name the parameter
        for held in self._held:
            if version_of(held.tensor) != held.version or held.tensor.dtype is not held.dtype:
                held.check()

    def restore(self, undo: Undo) -> None:
        """Put the tensors of the forward pass, or copies for the replay to change, in place."""
        self._restore_tables(undo)
        self._restore_held(undo)
        self._swap_statistics(undo)
        self._swap_snapshots(undo)

    def _restore_tables(self, undo: Undo) -> None:
        """Give each table of parameters and buffers the names from before the forward pass."""
        # The forward pass may create parameters and buffers, which the replay creates again. One
        # comparison shows the usual case: no table has changed.
        if list(map(tuple, self._tables)) != self._names:
            for table, names in zip(self._tables, self._names, strict=True):
                if tuple(table) != names:
                    undo.append((refill, (table, dict(table))))
                    refill(table, {name: table.get(name) for name in names})
        for table, name in self._absent:
            if table[name] is not None:
                swap(undo, table, name, None)

    def _restore_held(self, undo: Undo) -> None:
        """Put replaced parameters and buffers back, and their ``requires_grad``."""
        for held in self._held:
            owner, tensor = held.owner, held.tensor
            if owner is not None and held.replaced():
                swap(undo, owner, held.key, tensor)
            # requires_grad decides which tensors autograd saves
            if tensor.requires_grad != held.requires_grad and tensor.is_leaf:
                undo.append((tensor.requires_grad_, (tensor.requires_grad,)))
                tensor.requires_grad_(held.requires_grad)

    def _swap_statistics(self, undo: Undo) -> None:
        """Give statistics their earlier values, or replace them if no code reads them.

        Scratch tensors replace those that were captured at once, copies those captured one by one.
        """
        if self.restores_buffers:
            known = list(map(_copy, self._before))
        else:
            known = self._owned.scratch if self._owned is not None else []
        for (owner, name, *_), copy in zip(self._statistics, known, strict=False):
            swap(undo, owner, name, copy)
        for owner, name, dtype, device in self._statistics[len(known) :]:
            copy = _copy(owner[name])
            if copy.dtype != dtype or copy.device != device:
                copy = copy.to(device, dtype)
            swap(undo, owner, name, copy)

    def _swap_snapshots(self, undo: Undo) -> None:
        """Replace the other changed buffers by copies of their earlier values."""
        # one copy of a tensor that is in several places
        each = {id(s.held.tensor): s for s in self._snapshots}
        copies = sharing_memory({key: (s.held.tensor, s.value()) for key, s in each.items()})
        for s in self._snapshots:
            assert s.held.owner is not None
            swap(undo, s.held.owner, s.held.key, copies[id(s.held.tensor)])

    def restore_carried(self, undo: Undo) -> None:
        """Give carried buffers their values after the forward pass, for an inverse."""
        for owner, name, after in self._carried_after:
            swap(undo, owner, name, after.clone())

    def swap_altered(self, undo: Undo) -> dict[int, Tensor]:
        """Replace parameters that the forward pass changed by copies, which it returns by id."""
        copies: dict[int, Tensor] = {}
        for held in self._altered:
            assert held.owner is not None
            copy = copies.setdefault(id(held.tensor), held.copy())
            swap(undo, held.owner, held.key, copy)
        return copies

    def check_altered(self, copies: dict[int, Tensor]) -> None:
        """Raise a RuntimeError if the replay changed the copies' values."""
        for held in self._altered:
            held.check_copy(copies[id(held.tensor)], self._changes_unseen)
