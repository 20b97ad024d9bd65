"""The tensors of a step as they were in the forward pass: parameters, buffers, statistics.

See rules 4 and 5 of NOTE [ What a replay restores ] in :mod:`revzoo.core.replay`.
"""

from __future__ import annotations

import weakref
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from revzoo.core.invertible import Step
from revzoo.core.places import Place
from revzoo.core.reach import Reach
from revzoo.core.tensors import address, version_of

LAZY = frozenset((UninitializedParameter, UninitializedBuffer))
_NORMS = frozenset(
    (
        *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d),
        *(instancenorm.InstanceNorm1d, instancenorm.InstanceNorm2d, instancenorm.InstanceNorm3d),
        batchnorm.SyncBatchNorm,
    )
)


class Held(NamedTuple):
    """A parameter, buffer, reached tensor or keyword argument, as it was in the forward pass."""

    owner: Place | None  # such as the module's _parameters; None for an argument
    key: Any
    name: str
    tensor: Tensor
    made: weakref.ref[Tensor] | None  # the original, if ``tensor`` is an alias
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
        return now is (self.tensor if self.made is None else self.made())

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
    def changed(self) -> bool:
        return (
            self.unseen
            or not self.held.still_there()
            or version_of(self.held.tensor) != self.held.version
        )

    def value(self) -> Tensor:
        """A copy of its value before the forward pass."""
        held = self.held
        before = self.before
        if before is None and version_of(held.tensor) == held.version:
            before = held.tensor  # replaced, not changed
        if before is None:
            raise RuntimeError(
                f"'{held.name}' of shape {tuple(held.tensor.shape)} was changed in place by this "
                "forward pass, but by no earlier one; expected no change, so its old value, which "
                "the replay needs, was not copied. Repeat the forward pass, which now copies it; "
                "or replace the tensor instead of changing it (self.name = ...), or use "
                "memory='store' for this step"
            )
        return before.clone()


class Statistics(NamedTuple):
    """A statistic that influences no output."""

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

    Its only tensors are scratch ones, which replays update instead of the statistics.
    """

    __slots__ = (
        "_absent",
        "_addresses",
        "_key",
        "_pointers",
        "_scratch",
        "_shapes",
        "_sizes",
        "_tables",
        "buffered",
        "places",
        "plain",
        "statistics",
        "steps",
        "traits",
    )

    def __init__(self, modules: list[nn.Module], key: list[Any]) -> None:
        self._key = key
        reads = key[0]
        self._tables = [*map(_parameters_of, modules), *map(_buffers_of, modules)]
        self._sizes = list(map(len, self._tables))
        # positions, as the first module holds this object
        self.steps = [i for i, m in enumerate(modules) if isinstance(m, Step)]
        self.buffered: list[int] = []  # modules with buffers of which a replay needs the values
        places = [(m._parameters, k) for m in modules for k in m._parameters]
        self.places = [(table, k) for table, k in places if table[k] is not None]
        self._absent: list[tuple[Any, str]] = [p for p in places if p[0][p[1]] is None]
        self.statistics: list[Statistics] = []
        for i, m in enumerate(modules):
            if not m._buffers:
                continue
            buffers = m._buffers.items()
            if not has_unread_statistics(m, reads) or any(type(b) in LAZY for _, b in buffers):
                self.buffered.append(i)
                continue
            for k, b in buffers:
                if b is None:
                    self._absent.append((m._buffers, k))
                else:
                    self.statistics.append(Statistics(m._buffers, k, b.dtype, b.device))
        tensors = self.tensors()
        self.traits = list(map(_traits, tensors))
        self._shapes = list(map(_shape, tensors[len(self.places) :]))
        kinds = [nn.Parameter] * len(self.places) + [Tensor] * len(self.statistics)
        self.plain = all(
            kind is expected and leaf and layout is torch.strided
            for expected, (kind, leaf, _, _, layout, _) in zip(kinds, self.traits, strict=True)
        )
        self._pointers: list[int] = []
        self._addresses: frozenset[int] = frozenset()
        self._scratch: list[Tensor] = []

    @staticmethod
    def of(
        reach: Reach, modules: list[nn.Module], reads: bool, unseen: bool
    ) -> tuple[Owned, list[Tensor]]:
        """The places in ``modules`` and their present tensors; gathered once for ``reach``."""
        key = [reads, unseen, *map(_training, modules)]
        owned: Owned | None = reach.owned
        tensors = None if owned is None else owned.tensors_if_same(modules, key)
        if owned is None or tensors is None:
            reach.owned = owned = Owned(modules, key)
            tensors = owned.tensors()
        return owned, tensors

    @property
    def scratch(self) -> list[Tensor]:
        """Tensors like the statistics, for replays to update: their values influence no output."""
        if not self._scratch:
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

    def tensors_if_same(self, modules: list[nn.Module], key: list[Any]) -> list[Tensor] | None:
        """The present tensors, if a new search of ``modules`` would find tensors like them."""
        tables = [*map(_parameters_of, modules), *map(_buffers_of, modules)]
        if key != self._key or not all(map(is_, tables, self._tables)):
            return None
        if list(map(len, tables)) != self._sizes:
            return None
        if any(table.get(k) is not None for table, k in self._absent):
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
            self._addresses = frozenset(map(address, tensors))
        return self._addresses


def has_unread_statistics(m: nn.Module, reads: bool) -> bool:
    """Whether the buffers of ``m`` are statistics that influence no output."""
    # a subclass, a hook or other code of the step may read statistics in training
    if not m.training or reads or type(m) not in _NORMS:
        return False
    return not (m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__)


def replaced(held: Held) -> bool:
    """Whether another tensor is in its place, other than gathered shards."""
    if held.still_there():
        return False
    assert held.owner is not None
    now = held.owner.get(held.key)
    gathered = is_sharded(held.tensor) and not hasattr(now, "device_mesh")
    return not gathered


def sharing_memory(pairs: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """The copies in pairs of (tensor, copy), made to share memory where the tensors do."""
    copies = {key: copy for key, (_, copy) in pairs.items()}
    groups: dict[int, list[int]] = {}
    for key, (t, _) in pairs.items():
        groups.setdefault(address(t), []).append(key)
    for keys in groups.values():
        if len(keys) > 1 and all(pairs[key][0].layout == torch.strided for key in keys):
            storage = pairs[keys[0]][0].untyped_storage().clone()  # type: ignore[no-untyped-call]
            for key in keys:
                t, copy = pairs[key]
                place = (storage, t.storage_offset(), t.shape, t.stride())
                view = torch.empty(0, dtype=t.dtype, device=t.device).set_(*place)
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
