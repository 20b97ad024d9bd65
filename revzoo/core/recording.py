"""What the graph holds instead of activations, and how a replay fills it in.

See NOTE [ Slots and the tape ] in :mod:`revzoo.core.checkpoint`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from revzoo.core.fixedpoint import Extremes, extremes
from revzoo.core.guard import Guard, Samples, sample
from revzoo.core.invertible import Invertible, State, Step, as_state, check_inputs, name_of
from revzoo.core.reach import reached
from revzoo.core.replay import Conditions, address


class ReplayMismatchError(RuntimeError):
    """A step's replay saved other tensors than its forward: it is no function of its inputs."""


class _Tape(Protocol):
    def replay(self, index: int) -> None: ...


class Slot:
    """Stands in the graph for one saved activation of the tape's entry ``index``."""

    __slots__ = ("__weakref__", "dtype", "index", "shape", "tape", "value")

    def __init__(self, tape: _Tape, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tape = tape
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.value: Tensor | None = None


class Resident(NamedTuple):
    """A tensor that the graph keeps as it is, such as a parameter or a buffer."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(t: Tensor) -> Resident:
        """``t`` as it is now; detached, since an output that its node saves holds its grad_fn."""
        return Resident(t if t.is_leaf else t.detach(), t._version)

    def check(self) -> None:
        """Raise if the tensor was changed since; saved-tensor hooks switch autograd's check off."""
        if (now := self.tensor._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{now}; expected version {self.version} instead"
            )


def unpack(packed: Slot | Resident) -> Tensor:
    """Give the graph what it saved, replaying the step if need be."""
    if isinstance(packed, Slot):
        if packed.value is None:
            packed.tape.replay(packed.index)
        assert packed.value is not None
        return packed.value
    packed.check()
    return packed.tensor


def unshared(t: Tensor) -> bool:
    """Whether ``t`` fills a storage that no other tensor has, so that it may be overwritten."""
    storage = t.untyped_storage()
    if _use_count is None or storage.nbytes() != t.nbytes:  # an expanded tensor does not fill it
        return False
    return _use_count(storage._cdata) == 2  # t's own and this handle's


_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private: do without if it is gone


class Entry:
    """One executed step: what replaying it needs, but no activation and no part of the graph."""

    __slots__ = (
        "conditions",
        "context",
        "extremes",
        "limit",
        "name",
        "needs",
        "samples",
        "saved",
        "step",
        "strides",
    )

    def __init__(self, step: Step, inputs: State, context: Mapping[str, Any]) -> None:
        self.step = step
        self.name = name_of(step)
        self.needs = tuple(t.requires_grad for t in inputs)
        # Detached: a context computed from this very chain would hold the graph that holds it.
        self.context = tree_map_only(Tensor, _leaf, dict(context)) if context else {}
        self.conditions = Conditions(step, inputs, self.context)
        self.limit = 0.0 if step.memory == "exact" else step.drift_limit
        self.saved: list[weakref.ref[Slot] | None] = []  # None for what is resident
        self.samples: list[Samples] = []
        self.extremes: list[Extremes] = []
        self.strides: list[tuple[int, ...]] = []  # of the outputs

    def observe(self, known: State, computed: State) -> None:
        """Note what the guard will compare: values of what is ``computed`` from what is known."""
        if self.limit < math.inf:
            self.samples = sample(computed, known)

    def observe_outputs(self, inputs: State, outputs: State) -> None:
        """Note the strides of the outputs and, if the step is on a grid, their range."""
        self.strides = [t.stride() for t in outputs]
        if self.step.grid is not None:
            self.extremes = extremes(inputs, outputs, self.step.grid)

    def report(self, guard: Guard, computed: State) -> None:
        """Hand the guard what the replay computed."""
        if self.samples:
            guard.compare(self.step, self.name, self.limit, self.samples, computed)
        for values in self.extremes:
            guard.bound(self.step, self.name, values)

    def packer(self, tape: _Tape, index: int) -> Callable[[Tensor], Slot | Resident]:
        """The pack hook for the step's forward pass."""
        resident = self.conditions.storages()
        saved = self.saved

        def pack(t: Tensor) -> Slot | Resident:
            if address(t) in resident:
                saved.append(None)
                return Resident.of(t)
            slot = Slot(tape, index, t.shape, t.dtype)
            saved.append(weakref.ref(slot))
            return slot

        return pack

    @property
    def wanted(self) -> bool:
        """Whether the graph may still ask for a slot of the step that is empty."""
        slots = (ref() for ref in self.saved if ref is not None)
        return any(slot is not None and slot.value is None for slot in slots)

    def invert(self, outputs: State) -> State:
        """The step's inputs, without recording."""
        assert isinstance(self.step, Invertible)
        with torch.no_grad(), self.conditions.restored(inverting=True):
            inputs = self.step.inverse(*self._laid_out(outputs), **self.context)
        state = as_state(inputs, self.step)
        check_inputs(self.step, state, len(self.needs))
        return state

    def _laid_out(self, outputs: State) -> State:
        """The outputs with the strides of the forward pass, on which kernels' choices depend.

        Other strides may sum in another order, and gradients would not be the same bit for bit;
        the compiled backward pass of a compiled branch accepts no other strides at all.
        """
        same = all(t.stride() == at for t, at in zip(outputs, self.strides, strict=True))
        if same or (self.step.grid is None and not _has_compiled(self.step)):
            return outputs
        return tuple(
            t if t.stride() == stride else _empty(t, stride).copy_(t)
            for t, stride in zip(outputs, self.strides, strict=True)
        )

    def record_from_inputs(self, inputs: State) -> tuple[State, Replayed]:
        """Replay the step forwards; returns its outputs."""
        replayed = Replayed(self)
        with self.conditions.restored():
            outputs = replayed(self.step, inputs, self.needs, self.context)
        replayed.check()
        return outputs, replayed

    def record_from_outputs(self, outputs: State) -> tuple[State, Replayed]:
        """Replay the step while inverting it; returns its inputs."""
        assert isinstance(self.step, Invertible)
        replayed = Replayed(self)
        with self.conditions.restored():
            inputs = self.step.replay(self._laid_out(outputs), replayed, self.context)
        replayed.check()
        return inputs, replayed


class Replayed:
    """The tensors that a replay saves, matched one by one with those of the forward pass."""

    def __init__(self, entry: Entry) -> None:
        self.needs = entry.needs
        self._entry = entry
        self._count = 0
        self._values: list[tuple[Slot, Resident]] = []

    @property
    def complete(self) -> bool:
        """Whether as many tensors were recorded as the forward pass saved."""
        return self._count == len(self._entry.saved)

    def inverted(
        self, inverse: Callable[..., Any], outputs: State, context: Mapping[str, Any]
    ) -> State:
        """See :class:`revzoo.core.invertible.Recording`."""
        with torch.no_grad(), self._entry.conditions.restored(inverting=True):
            return as_state(inverse(*outputs, **context), self._entry.step)

    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: State,
        needs: tuple[bool, ...],
        context: Mapping[str, Any],
    ) -> State:
        """See :class:`revzoo.core.invertible.Recording`."""
        leaves = [t.detach().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
        with torch.enable_grad(), saved_tensors_hooks(self._pack, _refuse):
            outputs = as_state(fn(*leaves, **context))
        return tuple(map(_leaf, outputs))

    def _pack(self, t: Tensor) -> None:
        k = self._count
        self._count += 1
        if k >= len(self._entry.saved):
            return  # check() tells how many there were
        ref = self._entry.saved[k]
        slot = None if ref is None else ref()
        if slot is None:
            return
        if t.shape != slot.shape or t.dtype != slot.dtype:
            raise self._mismatch(
                f"saved tensor {k} is {t.dtype} of shape {tuple(t.shape)} in the replay, "
                f"{slot.dtype} of shape {tuple(slot.shape)} in the forward pass"
            )
        self._values.append((slot, Resident.of(t)))

    def check(self) -> None:
        """Raise unless the replay saved as many tensors as the forward pass, and left them be."""
        if not self.complete:
            forward = len(self._entry.saved)
            raise self._mismatch(
                f"its replay saved {self._count} tensors, its forward pass {forward}"
            )

        for _, value in self._values:
            value.check()  # the branch itself may have changed what it had saved

    def fill(self) -> list[weakref.ref[Slot]]:
        """Put the recorded tensors into their slots."""
        for slot, value in self._values:
            slot.value = value.tensor
        return [weakref.ref(slot) for slot, _ in self._values]

    def _mismatch(self, what: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._entry.name} did not repeat its forward pass: {what}. A step must be a "
            "function of its inputs, parameters, buffers and torch's random state; use "
            "memory='store' for one that is not"
        )


def _empty(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device)


def _has_compiled(step: Step) -> bool:
    # module.compile() sets the one, torch.compile(module) wraps it as the other
    _, modules = reached(step)
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules for m in modules)


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _refuse(_: None) -> Tensor:
    raise RuntimeError(DIFFERENTIATES_INSIDE)


DIFFERENTIATES_INSIDE = (
    "a backward pass ran inside the forward code of a step before that step was complete: "
    "use memory='store' for a step that differentiates inside its forward"
)
