"""Faithful replays: the conditions of a forward pass, captured and set up again.

A value computed twice is the same value only if everything it depends on is the same: random
state, autocast, train/eval flags, buffers, parameters. ``torch.utils.checkpoint`` restores the
first two; it lets BatchNorm count the batch twice and follows whatever flags and parameters the
modules have by the time of the backward pass.

NOTE [ What a replay restores ]
    1. Random state of the CPU and of each device among the inputs, where the step drew from it.
       The caller's own state is put back afterwards, so that the caller's random numbers are
       those of a run without replay.
    2. Autocast: enabled, dtype and cache, for the CPU and the inputs' device type.
    3. ``training`` of every submodule, and the grid of every step.
    4. Parameters: the very tensors of the forward pass (``torch.func.functional_call`` swaps
       them), but for shards that FSDP2 gathers before its branch runs, forward or replay, and
       that stand gathered in their place. One changed in place since then is an error, as it is
       in autograd: the reconstruction would be wrong.
    5. Buffers: normalisation statistics in training influence no output, so the replay works on
       throw-away copies. Any other buffer that the forward pass changed (spectral norm's vectors,
       a user's counter) is given back its value from before it. One that changed after the
       forward pass is an error, as for parameters; so is a changed keyword argument.

Known limit: state outside tensors (a Python attribute that ``forward`` changes) is not seen; ask
:func:`is_replaying` there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # base of BatchNorm*, InstanceNorm*, SyncBatchNorm
from torch.utils._pytree import tree_iter

from revzoo.core.invertible import Step

_thread = threading.local()


def is_replaying() -> bool:
    """Whether the calling code runs inside a replay, i.e. for the second time on the same values.

    For forward hooks and modules with side effects of their own (logging, counting)::

        def hook(module, inputs, output):
            if not revzoo.is_replaying():
                log(output)
    """
    return getattr(_thread, "depth", 0) > 0


class _Held(NamedTuple):
    """A parameter, buffer or keyword argument and what it was at forward."""

    owner: dict[str, Any] | None  # the module's _parameters or _buffers; None for an argument
    name: str
    tensor: Tensor
    version: int
    requires_grad: bool

    def check(self) -> None:
        if (now := version_of(self.tensor)) != self.version:
            raise RuntimeError(
                f"'{self.name}' of shape {tuple(self.tensor.shape)} was modified by an in-place "
                f"operation between forward and backward: it is at version {now}; "
                f"expected version {self.version}. Activations recomputed with it would be wrong. "
                "Run backward before changing it (optimizer.step(), load_state_dict()), or use "
                "memory='store' for this step"
            )


class Conditions:
    """All but its inputs that a module depends on (NOTE [ What a replay restores ])."""

    __slots__ = ("_autocast", "_devices", "_flags", "_held", "_rng", "_snapshots", "_statistics")

    def __init__(
        self, module: nn.Module, inputs: Iterable[Tensor], context: Mapping[str, Any] | None = None
    ) -> None:
        """Capture before the forward pass; call :meth:`finish` right after it."""
        self._devices = {t.device for t in inputs if t.device.type not in ("cpu", "meta")}
        self._autocast = _autocast_state({"cpu", *(d.type for d in self._devices)})
        self._flags: list[tuple[nn.Module, str, Any]] = []
        self._held: list[_Held] = []
        self._statistics: list[tuple[dict[str, Any], str]] = []
        self._snapshots: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
        for m in module.modules():
            self._flags.append((m, "training", m.training))
            if isinstance(m, Step):
                self._flags.append((m, "grid", m.grid))
            for name, p in m._parameters.items():
                if p is not None:
                    self._held.append(_Held(m._parameters, name, p, version_of(p), p.requires_grad))
            for name, b in m._buffers.items():
                if b is None:
                    continue
                if isinstance(m, _NormBase) and m.training:
                    self._statistics.append((m._buffers, name))
                else:
                    self._snapshots.append((m._buffers, name, b, b.detach().clone(), version_of(b)))
        for name, value in (context or {}).items():
            for t in tensors_of(value):
                self._held.append(_Held(None, name, t, version_of(t), t.requires_grad))
        self._rng: dict[torch.device, Tensor] | None = _rng_state(self._devices)

    def finish(self) -> None:
        """After the forward pass: forget the random state and the buffers that it left alone."""
        after = _rng_state(self._devices)
        if all(torch.equal(after[d], state) for d, state in (self._rng or {}).items()):
            self._rng = None
        changed = []
        for entry in self._snapshots:
            owner, name, tensor, _, version = entry
            if owner.get(name) is tensor and version_of(tensor) == version:
                self._held.append(_Held(owner, name, tensor, version, tensor.requires_grad))
            else:
                changed.append(entry)
        self._snapshots = changed

    def storages(self) -> set[int]:
        """Addresses of parameters and buffers: they stay in memory, saved by the graph or not."""
        held = {address(h.tensor) for h in self._held}
        held.update(address(b) for _, _, b, _, _ in self._snapshots)
        held.update(address(owner[name]) for owner, name in self._statistics)
        return held

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set the conditions up again; the caller's own are back afterwards, come what may.

        Raises:
            RuntimeError: a parameter or buffer was changed in place since the forward pass.
        """
        for held in self._held:
            held.check()
        with contextlib.ExitStack() as stack:
            _thread.depth = getattr(_thread, "depth", 0) + 1
            stack.callback(_leave)
            if self._rng is not None:
                stack.callback(_set_rng_state, _rng_state(self._devices))
                _set_rng_state(self._rng)
            self._restore_modules(stack)
            for context in _autocast_contexts(self._autocast):
                stack.enter_context(context)
            yield

    def _restore_modules(self, stack: contextlib.ExitStack) -> None:
        for m, name, value in self._flags:
            if (now := getattr(m, name)) != value:
                stack.callback(setattr, m, name, now)
                setattr(m, name, value)
        for owner, name, tensor, _, requires_grad in self._held:
            if owner is not None and _replaced(tensor, owner.get(name)):
                _swap(stack, owner, name, tensor)
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                stack.callback(tensor.requires_grad_, tensor.requires_grad)
                tensor.requires_grad_(requires_grad)
        for owner, name in self._statistics:
            _swap(stack, owner, name, owner[name].detach().clone())
        for owner, name, _, before, _ in self._snapshots:
            _swap(stack, owner, name, before.clone())


def address(t: Tensor) -> int:
    """Identifies the storage of ``t`` for as long as it lives, empty or not."""
    return t.untyped_storage()._cdata


def version_of(t: Tensor) -> int:
    """How often ``t`` was changed in place; inference tensors do not count."""
    return 0 if t.is_inference() else t._version


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    return [t for t in tree_iter(tree) if isinstance(t, Tensor)]


def _leave() -> None:
    _thread.depth -= 1


def _replaced(tensor: Tensor, now: Tensor | None) -> bool:
    """Whether another parameter stands in the place of ``tensor``, and not its gathered shards."""
    gathered = hasattr(tensor, "device_mesh") and not hasattr(now, "device_mesh")  # a DTensor's
    return now is not tensor and not gathered


def _swap(stack: contextlib.ExitStack, owner: dict[str, Any], name: str, tensor: Tensor) -> None:
    stack.callback(owner.__setitem__, name, owner.get(name))
    owner[name] = tensor


def _rng_state(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in devices:
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_rng_state(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


_Autocast = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]


def _autocast_state(device_types: set[str]) -> _Autocast:
    kinds = [d for d in sorted(device_types) if torch.amp.is_autocast_available(d)]
    states = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in kinds)
    return torch.is_autocast_cache_enabled(), states


def _autocast_contexts(wanted: _Autocast) -> list[contextlib.AbstractContextManager[Any]]:
    cache, states = wanted
    if wanted == _autocast_state({d for d, _, _ in states}):
        return []
    return [
        torch.autocast(d, dtype=dtype, enabled=on, cache_enabled=cache) for d, on, dtype in states
    ]
