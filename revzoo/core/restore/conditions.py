"""Faithful replays: captures the conditions of a forward pass and restores them.

A second computation gives the same value only under the same conditions: random state, autocast,
train/eval flags, buffers, parameters. ``torch.utils.checkpoint`` restores the first two. It lets
BatchNorm count the batch twice, and it uses flags and parameters as they are in the backward pass.

NOTE [ What a replay restores ]
    1. Random state: of the CPU, of the inputs' devices, and of each generator of torch, Python or
       NumPy that the step reaches or receives as a keyword argument. We keep the states that the
       forward pass changed; all of them if the step may set states (``Reach.resets_states``), which
       hides that it drew. Afterwards the caller's state is restored, so a replay does not change
       the caller's random numbers. Steps of layers that draw no random numbers are left out
       (``Reach.draws_nothing``). For threads see NOTE [ Threads ] in
       :mod:`revzoo.core.restore.threads`.
    2. Autocast: enabled, dtype and cache, for the CPU and the inputs' device type. Also the default
       device and dtype, the allowed attention kernels, and deterministic algorithms.
    3. Plain values: ``training`` and all other numbers, flags and strings of every module, and of
       objects, classes, functions, dictionaries, closures and globals that the step reaches; grid
       and memory mode of every step. Assignments during the replay are undone afterwards. Lists,
       sets and deques have the items from before the forward pass, dictionaries also their order.
       Class attributes, slots and globals added after the forward pass are hidden in the replay.
    4. Parameters: the same tensor objects as in the forward pass (``torch.func.functional_call``
       swaps them). Shards of FSDP2 are an exception: FSDP2 gathers them before the forward pass
       and before the replay. A parameter that was changed in place, or converted
       (``model.double()``), after the forward pass raises as in autograd, since the reconstruction
       would be wrong. The forward pass itself may change a parameter (an initialisation from the
       first batch, a clamp). The replay then uses a copy of the value after the forward pass, and
       raises if it changes that value. If code bypasses the version counters (``weight.data``), we
       treat every parameter like this. If the forward pass registers a new parameter or buffer, the
       replay registers its own. Afterwards the first one is put back. While torch's lazy layers may
       still create theirs, a pass is not replayed: it keeps its activations.
    5. Buffers: in training, the statistics of torch's normalisation layers influence no output if
       the step consists of layers of torch and this package, so the replay updates scratch
       tensors. If other code runs, the replay starts from the statistics and all other small
       buffers as they were before the forward pass. Every other buffer that the forward pass
       changed (spectral norm's vectors, a large table) also starts from its earlier value. During
       an inversion, ``Invertible.carried`` buffers have the values that the forward pass left. If
       another buffer or a keyword argument was changed after the forward pass, the replay raises.
       Buffers that share memory share it in the replay, too.
    6. Objects that the step reaches without owning them (NOTE [ What counts as reached ] in
       :mod:`revzoo.core.restore.search`): modules count as submodules, tensors as buffers.
       Functions, methods, classes, lists and modules that were replaced after the forward pass are
       put back during the replay.

Known limit: side effects outside the step, such as appending to a list, happen again in a replay;
such code should check :func:`is_replaying`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from revzoo.core.restore import threads
from revzoo.core.restore.global_state import (
    CPU,
    HOST,
    CountedDraws,
    RandomStates,
    Surroundings,
    capturing_cuda_graph,
    is_faked,
    random_states,
    set_random_states,
)
from revzoo.core.restore.places import (
    ABSENT,
    Place,
    Read,
    Undo,
    put,
    refill,
    reorder,
    same,
    swap,
)
from revzoo.core.restore.reach import NOT_RESTORED, Plain, Reach, reached, reached_from
from revzoo.core.restore.step_tensors import StepTensors

_thread = threading.local()


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
    return getattr(_thread, "depth", 0) > 0


class Conditions:
    """Everything that a module's result depends on, except its inputs and its code.

    See NOTE [ What a replay restores ]. The forward pass runs inside ``with conditions:``.
    """

    __slots__ = ("_locks", "_random", "_reaches", "_surroundings", "_tensors", "_values")

    def __init__(
        self, module: nn.Module, inputs: Iterable[Tensor], context: Mapping[str, Any] | None = None
    ) -> None:
        """Capture before the forward pass."""
        inputs = tuple(inputs)
        reach, modules = reached(module)  # rule 6
        if reach.scripted:
            raise TypeError(
                f"{type(module).__name__} holds a TorchScript module, whose buffers and flags a "
                "replay cannot exchange; expected a plain module. Use torch.compile instead of "
                "torch.jit, or memory='store' or 'offload' for this step"
            )
        # what the step reaches, and what its keyword arguments reach
        self._reaches, others = [reach], []
        if context and (of_arguments := reached_from(tree_iter(dict(context)), reach.names)):
            self._reaches.append(of_arguments)
            others = of_arguments.modules()
        self._values = _PlainValues(self._reaches, [modules, others])  # rule 3
        if others:  # a module may be reached both ways: capture it once
            others = list(dict.fromkeys((*modules, *others)))[len(modules) :]
        self._tensors = StepTensors(self._reaches, modules, others, context or {}, module.training)
        # without inputs, the step's own tensors decide the devices
        tensors = inputs or self._tensors.all()
        accelerators = frozenset(t.device for t in tensors if t.device.type not in HOST)
        self._surroundings = Surroundings(accelerators)  # rule 2
        # reading a random state takes as long as a small kernel
        draws_nothing = (
            len(self._reaches) == 1
            and self._tensors.all_plain
            and reach.draws_nothing
            and all(type(t) in (Tensor, nn.Parameter) for t in inputs)
        )
        # rule 1
        if draws_nothing or _captured_without_draws(reach):
            self._random = RandomStates(())
        elif is_faked(inputs):
            self._random = CountedDraws()
        else:
            generators = (g for each in self._reaches for g in each.generators)
            resets = any(each.resets_states for each in self._reaches)
            self._random = RandomStates((CPU, *accelerators, *generators), resets=resets)

    @property
    def restores_buffers(self) -> bool:
        """Whether code may read statistics of normalisation layers, see rule 5."""
        return self._tensors.restores_buffers

    @property
    def may_stop(self) -> bool:
        """Whether each tensor has its values when autograd saves it: a replay may stop there."""
        return not any(reach.leaves_unfilled for reach in self._reaches)

    @property
    def repeatable(self) -> bool:
        """Whether a replay can put everything back (rule 6 of NOTE [ What counts as reached ])."""
        return not any(reach.unrepeatable for reach in self._reaches)

    @property
    def has_lazy_layers(self) -> bool:
        """Whether the forward pass may create parameters or buffers of torch's lazy layers."""
        return self._tensors.has_lazy_layers

    @property
    def autocast_dtypes(self) -> list[torch.dtype]:
        """The dtypes of autocast in the forward pass."""
        return self._surroundings.autocast_dtypes

    def storages(self) -> tuple[Set[int], Set[int]]:
        """See :meth:`revzoo.core.restore.step_tensors.StepTensors.storages`."""
        return self._tensors.storages()

    def __enter__(self) -> None:
        """Begin the forward pass."""
        reach = self._reaches[0]
        self._locks = reach.locks if self._tensors.swaps_buffers else []
        threads.acquire(self._locks)
        self._random.begin(reach.draws)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """End the forward pass; drop random states and buffers that it did not change."""
        try:
            if failure is None:
                reach = self._reaches[0]
                reach.draws = self._random.finish(reach.draws)
                self._tensors.finish()
        finally:
            self._random.release()
            threads.release(self._locks)

    def restored(self, *, inverting: bool = False) -> _Restored:
        """Restore the conditions of the forward pass, and the caller's at the end and after errors.

        Args:
            inverting: give carried buffers their values after the forward pass.

        Raises:
            RuntimeError: a parameter or buffer was changed in place since the forward pass, or
                the replay drew other random numbers.
        """
        return _Restored(self, inverting)

    def drawn(self) -> bool:
        """Whether the running replay has drawn everything that the forward pass drew."""
        return self._random.drawn()


def _captured_without_draws(reach: Reach) -> bool:
    """Whether a CUDA graph is being captured; raises a RuntimeError if the step may draw."""
    captured = capturing_cuda_graph()
    if captured and reach.draws:
        raise RuntimeError(
            "a step that draws random numbers, or has not run yet, runs while a CUDA graph is "
            "captured, and a replay in the graph cannot draw the same numbers: run a few steps "
            "before the capture, remove dropout, or use memory='store' for this step"
        )
    return captured


class _PlainValues:
    """Numbers, flags and strings, and the contents of lists and tables of modules (rule 3)."""

    __slots__ = ("_containers", "_namespaces", "_outer_values", "_training")

    def __init__(self, reaches: list[Reach], members: list[list[nn.Module]]) -> None:
        """``members``: the modules of the step, then of its keyword arguments."""
        # without keyword arguments that reach something, there is one reach
        pairs = zip(reaches, members, strict=False)
        self._namespaces = [entry for reach, each in pairs for entry in reach.plain_values(each)]
        self._outer_values = [value for reach in reaches for value in reach.outer_values()]
        self._containers = [entry for reach in reaches for entry in reach.containers()]
        # of a module that encloses the step, a replay restores only this flag
        self._training = [(m, m.training) for reach in reaches for m in reach.enclosing]

    def namespaces(self) -> Iterator[dict[str, Any]]:
        """The namespaces to which a replay may assign."""
        for attributes, _ in self._namespaces:
            yield attributes
        for m, _ in self._training:
            yield m.__dict__

    def restore(self, undo: Undo, reaches: list[Reach]) -> list[tuple[dict[Any, Any], Plain]]:
        """Put the values of the forward pass in place.

        Returns the namespaces whose names, or their order, differ from the forward pass.
        """
        for container, read, items in self._containers:
            if not _are_there(read, items):
                undo.append((_put_items_back, (container, read, len(items), tuple(read()))))
                refill(container, items)
        for place, keys, read, values in self._outer_values:
            there = _are_there(read, values)
            now = values if there else [place.get(key, ABSENT) for key in keys]
            undo.append((_put_values, (place, keys, read, now)))
            if not there:
                _put_values(place, keys, read, values)
        for reach in reaches:
            if reach.unchanged() is None:  # a child, a hook or an object was replaced
                for table, before in reach.tables:
                    if not same(table, before):
                        undo.append((refill, (table, dict(table))))
                        refill(table, before)
                for place, key, seen in reach.displaced():
                    swap(undo, place, key, seen)
                for place, name in reach.added():
                    swap(undo, place, name, ABSENT)
        changed = [entry for entry in self._namespaces if not entry[1].hold(entry[0])]
        for attributes, plain in changed:
            plain.restore(attributes)  # undone together with the replay's assignments
        for m, training in self._training:
            if m.training != training:
                undo.append((setattr, (m, "training", m.training)))
                m.training = training
        return [entry for entry in changed if tuple(entry[0]) != entry[1].names]


class _Restored:
    """The context of :meth:`Conditions.restored`; a class, since a generator takes longer."""

    __slots__ = ("_altered", "_conditions", "_inverting", "_locked", "_locks", "_states", "_undo")

    def __init__(self, conditions: Conditions, inverting: bool) -> None:
        self._conditions = conditions
        self._inverting = inverting

    def __enter__(self) -> None:
        c = self._conditions
        c._tensors.check()
        self._undo: Undo = []
        # the locks first, in the order of the forward pass: see NOTE [ Threads ]
        self._locks = c._reaches[0].locks if c._tensors.swaps_buffers else []
        threads.acquire(self._locks)
        # before the states are read: a replay of another thread may have swapped them
        self._locked = c._random.repeats and threads.random_lock.acquire()
        self._states = states = c._random.to_repeat()
        if states:
            threads.swaps.enter()
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            # copies, not differences: a branch may assign to any attribute
            self._undo += [(_restore_namespace, (s, s.copy())) for s in c._values.namespaces()]
            if states:
                self._undo.append((set_random_states, (random_states(states),)))
                set_random_states(states)
            unordered = c._values.restore(self._undo, c._reaches)
            c._tensors.restore(self._undo)
            for attributes, plain in unordered:  # last: some entries were put back just now
                reorder(attributes, plain.names)
            if self._inverting:
                c._tensors.restore_carried(self._undo)
            self._altered = c._tensors.swap_altered(self._undo)
            c._surroundings.restore(self._undo)
        except BaseException:
            self._leave()
            raise

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        c = self._conditions
        try:
            if failure is None:
                if self._altered:
                    c._tensors.check_altered(self._altered)
                # an inverse may draw other numbers, or none
                if self._states and not self._inverting:
                    c._random.check_draws()
        finally:
            self._leave()

    def _leave(self) -> None:
        _thread.depth -= 1
        failed: Exception | None = None
        try:
            for fn, arguments in reversed(self._undo):
                try:
                    fn(*arguments)
                except Exception as error:  # restore the other values nevertheless
                    failed = failed or error
        finally:
            if self._states:
                threads.swaps.leave()
            if self._locked:
                threads.random_lock.release()
            threads.release(self._locks)
        if failed is not None:
            raise RuntimeError(
                "a replay could not put a value of the caller back, but put back all others: "
                f"{type(failed).__name__}: {failed}"
            ) from failed


def buffers_locked_in_training(step: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context for a forward pass without recording: no other thread may swap its buffers."""
    return buffers_locked(step) if step.training else contextlib.nullcontext()


def buffers_locked(step: nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which no other thread may swap or update the buffers of ``step``."""
    if torch.compiler.is_compiling() or threading.active_count() == 1:
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


def _restore_namespace(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    if same(attributes, before):
        return
    for name in attributes.keys() - before.keys() - NOT_RESTORED:
        del attributes[name]
    for name, value in before.items():
        if name not in NOT_RESTORED and attributes.get(name, ABSENT) is not value:
            attributes[name] = value
    reorder(attributes, [name for name in before if name not in NOT_RESTORED])


def _are_there(read: Read, values: Sequence[Any]) -> bool:
    try:
        now = tuple(read())
    except LookupError:  # one is gone
        return False
    return len(now) == len(values) and all(map(is_, now, values))


def _put_values(place: Place, keys: Sequence[Any], read: Read, values: Sequence[Any]) -> None:
    if not _are_there(read, values):
        for key, value in zip(keys, values, strict=True):
            if place.get(key, ABSENT) is not value:
                put(place, key, value)


def _put_items_back(container: Any, read: Read, length: int, now: tuple[Any, ...]) -> None:
    """Restore the items ``now`` of the caller, and keep those that the replay added at the end.

    Args:
        container: the list, set or deque.
        read: reads its items.
        length: number of items when the replay began.
        now: the items of the caller.
    """
    refill(container, (*now, *tuple(read())[length:]))
