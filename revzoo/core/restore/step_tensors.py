"""The tensors of a step as they were in the forward pass: parameters, buffers, statistics.

See rules 4 and 5 of NOTE [ What a replay restores ] in :mod:`revzoo.core.restore.conditions`.

NOTE [ Copies of buffers ]
    Only after a forward pass do we know whether it changed a buffer in place. So we copy each
    buffer of up to ``COPIED_SIZE`` elements before every forward pass. We copy a larger buffer (a
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
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm

from revzoo.core.invertible import Invertible
from revzoo.core.restore.captured import (
    COPIED_SIZE,
    Held,
    Snapshot,
    copied,
    is_sharded,
    sharing_memory,
)
from revzoo.core.restore.gathered import (
    LAZY,
    Gathered,
    Statistic,
    absent_from,
    tables_of,
    updates_statistics,
)
from revzoo.core.restore.places import Place, Undo, refill, swap
from revzoo.core.restore.reach import Reach, has_global_hooks
from revzoo.core.tensors import storage_id, tensors_of, version_of

# large buffers that no forward pass has changed so far: (name, training)
_unchanged_buffers: weakref.WeakKeyDictionary[nn.Module, set[tuple[str, bool]]] = (
    weakref.WeakKeyDictionary()
)


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
        "_gathered",
        "_held",
        "_names",
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
        self._statistics: list[Statistic] = []
        self._before: list[Tensor] = []  # the statistics' values, if the replay restores them
        self._snapshots: list[Snapshot] = []
        self._carried: list[tuple[dict[str, Any], str]] = []
        self._carried_after: list[tuple[dict[str, Any], str, Tensor]] = []
        # the tensors of ``modules`` as a whole; None if they are captured one by one
        self._gathered: Gathered | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._tables: list[dict[str, Any]] = []  # of all parameters and buffers
        self._names: list[tuple[str, ...]] = []  # in each table
        self._absent: list[tuple[dict[str, Any], str]] = []  # the entries that are None
        at_once = self._capture_at_once(reaches[0], modules)
        for m in others if at_once else (*modules, *others):
            self._capture(m)
        if others:
            tables = tables_of(others)
            # new lists: the current ones belong to a search result, which later passes use
            self._tables = [*self._tables, *tables]
            self._names = [*self._names, *map(tuple, tables)]
            self._absent = [*self._absent, *absent_from(tables)]
        for reach in reaches:
            for place, key, label in reach.tensors:
                self._capture_reached(place, key, label, training)

    def _capture_at_once(self, reach: Reach, modules: list[nn.Module]) -> bool:
        """Capture all parameters and statistics of ``modules`` by NOTE [ Gathered once ].

        Parameters have no :class:`Held` until :meth:`_hold_each` makes them: most steps never need
        one, and making them takes longer than all other checks.

        Returns False if a tensor is not an ordinary one; then only the tables' names are captured.
        """
        gathered, tensors = Gathered.of(reach, modules)
        self._tables, self._names, self._absent = gathered.tables, gathered.names, gathered.absent
        if not gathered.plain:
            return False
        try:
            self._versions = gathered.versions(tensors)
        except RuntimeError:  # inference tensors
            return False
        self._gathered, self._tensors = gathered, tensors
        self._statistics += gathered.statistics
        if self.restores_buffers:
            self._before = list(map(copied, tensors[len(gathered.places) :]))
        for i in gathered.carrying:
            self._capture_carried(modules[i])
        for i in gathered.buffered:
            self._capture_buffers(modules[i])
        return True

    def _hold_each(self) -> None:
        """Make a :class:`Held` of each parameter that was captured at once."""
        if self._gathered is not None:
            self._held += self._gathered.each_parameter(self._tensors, self._versions)
            self._gathered, self._tensors, self._versions = None, [], []

    def _capture(self, m: nn.Module) -> None:
        self._capture_carried(m)
        for name, p in m._parameters.items():
            if p is None:
                continue
            if type(p) in LAZY:
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
            if type(b) in LAZY:
                self.has_lazy_layers = True
            elif unread:
                self._statistics.append(Statistic(m._buffers, name, b.dtype, b.device))
            else:  # NOTE [ Copies of buffers ]
                small = b.numel() <= COPIED_SIZE
                unseen = by_kernels or (small and self.restores_buffers)
                skips = not (small or by_kernels) and (name, m.training) in unchanged
                before = None if skips else copied(b)
                held = Held.of(m._buffers, name, name, b)
                self._snapshots.append(Snapshot(held, before, m, m.training, unseen))

    def _capture_reached(self, place: Place, key: Any, label: str, training: bool) -> None:
        t = place.get(key)
        if not isinstance(t, Tensor):
            return
        if type(t) in LAZY:
            self.has_lazy_layers = True
            return
        held = Held.of(place, key, label, t)
        if isinstance(t, nn.Parameter):
            self._held.append(held)
            return
        # functions seldom change tensors that they do not own: copy large ones only if a change
        # may go unseen
        skips = t.numel() > COPIED_SIZE and not self._updates_unseen
        before = None if skips else copied(t)
        self._snapshots.append(Snapshot(held, before, None, training, self._updates_unseen))

    @property
    def all_plain(self) -> bool:
        """Whether every parameter is an ordinary one; a DTensor may draw random numbers."""
        return self._gathered is not None

    @property
    def swaps_buffers(self) -> bool:
        """Whether a replay puts copies in place of buffers (rule 2 of NOTE [ Threads ])."""
        return bool(self._statistics or self._snapshots)

    def all(self) -> list[Tensor]:
        """Parameters, buffers, reached tensors and arguments; statistics where captured at once."""
        each = [held.tensor for held in (*self._held, *(s.held for s in self._snapshots))]
        return each + self._tensors

    def storages(self) -> tuple[Set[int], Set[int]]:
        """Tensors that stay in memory anyway: all by their storages, and some also by their ids.

        An id is found faster than the identity of a storage.
        """
        held = [h.tensor for h in self._held]
        held += [s.held.tensor for s in self._snapshots]
        if self._gathered is None:
            held += [s.owner[s.name] for s in self._statistics]
            return set(map(storage_id, held)), set()
        known = self._gathered.storage_ids(self._tensors)
        found = known.union(map(storage_id, held)) if held else known
        # a forward pass may replace the storage of a parameter (weight.data = ...)
        return found, set() if self._changes_unseen else set(map(id, self._tensors))

    def finish(self) -> None:
        """After the forward pass: note what it changed, drop the other copies."""
        self._carried_after = [(owner, k, copied(owner[k])) for owner, k in self._carried]
        gathered = self._gathered
        if gathered and (
            self._changes_unseen or gathered.versions(self._tensors) != self._versions
        ):
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
            if s.module is not None and s.held.tensor.numel() > COPIED_SIZE:
                known = _unchanged_buffers.setdefault(s.module, set())
                key = s.held.key, s.training
                if changed:
                    known.discard(key)
                else:
                    known.add(key)

    def check(self) -> None:
        """Raise a RuntimeError if a tensor was changed in place since the forward pass."""
        gathered = self._gathered
        if gathered and not gathered.parameters_unchanged(self._tensors, self._versions):
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
            known = list(map(copied, self._before))
        else:
            known = self._gathered.scratch if self._gathered is not None else []
        for (owner, name, *_), copy in zip(self._statistics, known, strict=False):
            swap(undo, owner, name, copy)
        for owner, name, dtype, device in self._statistics[len(known) :]:
            copy = copied(owner[name])
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
