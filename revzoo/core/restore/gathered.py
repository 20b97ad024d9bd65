"""The places and traits of a step's parameters and statistics, gathered once for many passes.

NOTE [ Gathered once ]
    A search result keeps the places of its modules' parameters and statistics, and their traits
    (class, dtype, device, ``requires_grad``; for statistics also the shape). Each forward pass
    checks whether tables, training flags and traits are the same, and gathers them again if not. We
    look at single parameters only if one is replaced or changed before the backward pass.
"""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from revzoo.core.invertible import Invertible
from revzoo.core.restore.captured import Held
from revzoo.core.restore.reach import Reach
from revzoo.core.tensors import storage_id

LAZY = frozenset((UninitializedParameter, UninitializedBuffer))
_NORMS = frozenset(
    (
        *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d),
        *(instancenorm.InstanceNorm1d, instancenorm.InstanceNorm2d, instancenorm.InstanceNorm3d),
        batchnorm.SyncBatchNorm,
    )
)


class Statistic(NamedTuple):
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


class Gathered:
    """Where parameters and statistics are; see NOTE [ Gathered once ].

    Its only tensors are scratch ones, which replays update instead of statistics that influence no
    output.
    """

    __slots__ = (
        "_pointers",
        "_scratch",
        "_shapes",
        "_storage_ids",
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
        self.tables = tables_of(modules)
        self.names = list(map(tuple, self.tables))
        # positions, not modules: the first module holds this object, a cycle otherwise
        self.carrying = [
            i for i, m in enumerate(modules) if isinstance(m, Invertible) and m.carried
        ]
        self.buffered: list[int] = []  # modules with buffers whose values a replay needs
        places = [(m._parameters, k) for m in modules for k in m._parameters]
        self.places = [(table, k) for table, k in places if table[k] is not None]
        # a bias that a layer gets later would be missed if only current tensors were compared
        self.absent = absent_from(self.tables)
        self.statistics: list[Statistic] = []
        for i, m in enumerate(modules):
            if not m._buffers:
                continue
            buffers = m._buffers.items()
            lazy = any(type(b) in LAZY for _, b in buffers)
            if lazy or shared or not updates_statistics(m):
                self.buffered.append(i)
                continue
            self.statistics += [
                Statistic(m._buffers, k, b.dtype, b.device) for k, b in buffers if b is not None
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
        self._storage_ids: frozenset[int] = frozenset()
        self._scratch: list[Tensor] = []

    @staticmethod
    def of(reach: Reach, modules: list[nn.Module]) -> tuple[Gathered, list[Tensor]]:
        """The places in ``modules`` and their current tensors; gathered once for ``reach``."""
        gathered: Gathered | None = reach.gathered
        tensors = None if gathered is None else gathered.tensors_if_same(modules)
        if gathered is None or tensors is None:
            reach.gathered = gathered = Gathered(modules, shared=reach.shares_buffers)
            tensors = gathered.tensors()
        return gathered, tensors

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
        tables = tables_of(modules)
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

    def storage_ids(self, tensors: list[Tensor]) -> frozenset[int]:
        """Identities of the storages of :meth:`tensors`."""
        pointers = [t.data_ptr() for t in tensors]
        if pointers != self._pointers:
            self._pointers = pointers
            self._storage_ids = frozenset(map(storage_id, tensors))
        return self._storage_ids


def tables_of(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """The modules' dictionaries of parameters, then of buffers."""
    return [*map(_parameters_of, modules), *map(_buffers_of, modules)]


def absent_from(tables: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The parameters and buffers that are None, by table and name."""
    return [(table, k) for table in tables for k, t in table.items() if t is None]


def updates_statistics(m: nn.Module) -> bool:
    """Whether the buffers of ``m`` are statistics that it updates in every pass."""
    return m.training and type(m) in _NORMS
