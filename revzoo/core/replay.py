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
    3. ``training`` of every submodule, grid and memory mode of every step.
    4. Parameters: the very tensors of the forward pass (``torch.func.functional_call`` swaps
       them), but for shards that FSDP2 gathers before its branch runs, forward or replay, and
       that stand gathered in their place. One changed in place since then is an error, as it is
       in autograd: the reconstruction would be wrong. One that the forward pass itself changed
       (an initialisation from the first batch) has the value that it left.
    5. Buffers: normalisation statistics in training influence no output, so the replay works on
       throw-away copies. Any other buffer that the forward pass changed (spectral norm's vectors,
       a user's counter) is given back its value from before it; while a step is inverted, those
       that it carries (``Invertible.carried``) have the value from after it. One that changed
       after the forward pass is an error, as for parameters; so is a changed keyword argument.

Known limit: state outside tensors (a Python attribute that ``forward`` changes) is not seen; ask
:func:`is_replaying` there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # base of BatchNorm*, InstanceNorm*, SyncBatchNorm
from torch.utils._pytree import tree_iter

from revzoo.core.invertible import Invertible, Step

_thread = threading.local()
_CPU = torch.device("cpu")
_HOST = ("cpu", "meta")  # devices without a random state of their own


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

    __slots__ = (
        "_autocast",
        "_carried",
        "_devices",
        "_flags",
        "_held",
        "_left",
        "_rng",
        "_snapshots",
        "_statistics",
    )

    def __init__(
        self, module: nn.Module, inputs: Iterable[Tensor], context: Mapping[str, Any] | None = None
    ) -> None:
        """Capture before the forward pass; call :meth:`finish` right after it."""
        self._devices = frozenset(t.device for t in inputs if t.device.type not in _HOST)
        self._autocast = _autocast_state(_with_autocast(self._devices))
        self._flags: list[tuple[nn.Module, str, Any]] = []
        self._held: list[_Held] = []
        self._statistics: list[tuple[dict[str, Any], str]] = []
        self._snapshots: list[tuple[dict[str, Any], str, Tensor, Tensor, int]] = []
        self._carried: list[tuple[dict[str, Any], str]] = []
        self._left: list[tuple[dict[str, Any], str, Tensor]] = []
        for m in _walk(module):
            self._flags.append((m, "training", m.training))
            if isinstance(m, Step):
                self._flags += ((m, "grid", m.grid), (m, "memory", m.memory))
            if isinstance(m, Invertible):
                self._carried.extend((m._buffers, name) for name in m.carried)
            for name, p in m._parameters.items():
                if p is not None:
                    # One computed from this very chain would hold the graph that holds us.
                    kept = p if p.is_leaf else p.detach().requires_grad_(p.requires_grad)
                    version = version_of(p)
                    self._held.append(_Held(m._parameters, name, kept, version, p.requires_grad))
            if m._buffers:
                self._capture_buffers(m)
        for name, value in (context or {}).items():
            for t in tensors_of(value):
                self._held.append(_Held(None, name, t, version_of(t), t.requires_grad))
        self._rng: dict[torch.device, Tensor] | None = _rng_state(self._devices)

    def _capture_buffers(self, m: nn.Module) -> None:
        for name, b in m._buffers.items():
            if b is None:
                continue
            if m.training and isinstance(m, _NormBase):
                self._statistics.append((m._buffers, name))
            else:
                self._snapshots.append((m._buffers, name, b, b.detach().clone(), version_of(b)))

    def finish(self) -> None:
        """After the forward pass: forget the random state and the buffers that it left alone."""
        if self._rng is not None and _same(self._rng, _rng_state(self._devices)):
            self._rng = None
        self._left = [(owner, name, owner[name].detach().clone()) for owner, name in self._carried]
        for i, held in enumerate(self._held):
            if held.owner is not None and version_of(held.tensor) != held.version:
                self._held[i] = held._replace(version=version_of(held.tensor))
        if not self._snapshots:
            return
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
        held = [h.tensor for h in self._held]
        held += [b for _, _, b, _, _ in self._snapshots]
        held += [owner[name] for owner, name in self._statistics]
        return {address(t) for t in held}

    @contextlib.contextmanager
    def restored(self, *, inverting: bool = False) -> Iterator[None]:
        """Set the conditions up again; the caller's own are back afterwards, come what may.

        Args:
            inverting: give carried buffers the values that the forward pass left.

        Raises:
            RuntimeError: a parameter or buffer was changed in place since the forward pass.
        """
        for held in self._held:
            held.check()
        undo: _Undo = []
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            if self._rng is not None:
                undo.append((_set_rng_state, (_rng_state(self._devices),)))
                _set_rng_state(self._rng)
            self._restore_modules(undo)
            for owner, name, left in self._left if inverting else ():
                _swap(undo, owner, name, left.clone())
            with self._autocast_restored():
                yield
        finally:
            _thread.depth -= 1
            for fn, arguments in reversed(undo):
                fn(*arguments)

    def _autocast_restored(self) -> contextlib.AbstractContextManager[None]:
        same = self._autocast == _autocast_state(_with_autocast(self._devices))
        return contextlib.nullcontext() if same else _autocast(self._autocast)

    def _restore_modules(self, undo: _Undo) -> None:
        for m, name, value in self._flags:
            if (now := getattr(m, name)) != value:
                undo.append((setattr, (m, name, now)))
                setattr(m, name, value)
        for owner, name, tensor, _, requires_grad in self._held:
            if owner is not None and _replaced(tensor, owner.get(name)):
                _swap(undo, owner, name, tensor)
            if tensor.requires_grad != requires_grad and tensor.is_leaf:
                undo.append((tensor.requires_grad_, (tensor.requires_grad,)))
                tensor.requires_grad_(requires_grad)
        for owner, name in self._statistics:
            _swap(undo, owner, name, owner[name].detach().clone())
        for owner, name, _, before, _ in self._snapshots:
            _swap(undo, owner, name, before.clone())


_Undo = list[tuple[Callable[..., Any], tuple[Any, ...]]]


def _walk(module: nn.Module) -> list[nn.Module]:
    """``module.modules()`` without the cost of its nested generators."""
    found: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [module]
    while stack:
        m = stack.pop()
        if m is not None and m not in found:
            found[m] = None
            stack += m._modules.values()
    return list(found)


def address(t: Tensor) -> int:
    """Identifies the storage of ``t`` for as long as it lives, empty or not."""
    return t.untyped_storage()._cdata


def version_of(t: Tensor) -> int:
    """How often ``t`` was changed in place; inference tensors do not count."""
    try:
        return t._version
    except RuntimeError:
        return 0


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    return [t for t in tree_iter(tree) if isinstance(t, Tensor)]


def _replaced(tensor: Tensor, now: Tensor | None) -> bool:
    """Whether another parameter stands in the place of ``tensor``, and not its gathered shards."""
    if now is tensor:
        return False
    gathered = hasattr(tensor, "device_mesh") and not hasattr(now, "device_mesh")  # a DTensor's
    return not gathered


def _swap(undo: _Undo, owner: dict[str, Any], name: str, tensor: Tensor) -> None:
    undo.append((owner.__setitem__, (name, owner.get(name))))
    owner[name] = tensor


def _rng_state(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    states = {_CPU: torch.get_rng_state()}
    for device in devices:
        states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


def _same(a: dict[torch.device, Tensor], b: dict[torch.device, Tensor]) -> bool:
    return all(torch.equal(state, b[device]) for device, state in a.items())


def _set_rng_state(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


_AutocastState = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]


def _autocast_state(device_types: Iterable[str]) -> _AutocastState:
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]
    return torch.is_autocast_cache_enabled(), tuple(states)


@functools.cache
def _with_autocast(devices: frozenset[torch.device]) -> list[str]:
    """The types of the CPU and of ``devices`` that know autocast, in an order of their own."""
    kinds = sorted({"cpu", *(d.type for d in devices)})
    return [d for d in kinds if torch.amp.is_autocast_available(d)]


@contextlib.contextmanager
def _autocast(wanted: _AutocastState) -> Iterator[None]:
    cache, states = wanted
    with contextlib.ExitStack() as stack:
        for d, on, dtype in states:
            stack.enter_context(torch.autocast(d, dtype=dtype, enabled=on, cache_enabled=cache))
        yield
