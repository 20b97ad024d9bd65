"""Single tensors of a step as they were in the forward pass, with checks of what happened to them.

See rules 4 and 5 of NOTE [ What a replay restores ] in :mod:`revzoo.core.restore.conditions`.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from revzoo.core.restore.places import Constant, Place
from revzoo.core.tensors import has_values, storage_id, version_of

COPIED_SIZE = 2**14  # elements; a copy takes about as long as two checks


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
            isinstance(held.owner, Constant) or t.numel() > COPIED_SIZE
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


def copied(t: Tensor) -> Tensor:
    """A copy of ``t`` without a graph."""
    # detach() takes half the time of a small clone(), so only where autograd would record the copy
    return t.detach().clone() if t.requires_grad else t.clone()


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
