"""The guard: detects wrong reconstructions, without stalling the device.

A reconstruction is exact only up to rounding. If a network amplifies rounding errors, if streams
have a narrow dtype, or if a branch is not deterministic, reconstructions and gradients are wrong.
So the guard keeps up to 128 values of every stream that a step changes, spread evenly over it, and
compares them with the reconstruction. The largest error, relative to the largest value, is the
*drift*; its limit is ``Step.drift_limit``. Words must be equal: of fixed-point streams, the guard
compares the sums. In every mode, streams on a grid must stay in its range
(:mod:`revzoo.core.guard.ranges`).

All figures stay on the device. We read them once, after the backward pass; only the ranges of
outputs that need no gradient are read in the forward pass. Steps whose limit is None are not
guarded: nothing is compared or read, and a value beyond the range shows only as NaN.

NOTE [ Streams that overflow ]
    An infinite output cannot be inverted, and plain training has no finite gradient there either.
    In float16 this is a normal event: GradScaler skips the step. So:

    1. Chains that ran in float16 and ended in values that are not finite are skipped.
    2. A sample of a fixed-point stream with such a value becomes NaN as a whole. Its words are
       restored all the same, so their sums must be equal.
    3. In other streams it compares the values that are finite in both passes, so a wrong inverse
       does not hide behind an overflow, and warns about the rest.

NOTE [ Channels that are lost in rounding ]
    A channel that is constant in the forward pass (a pruned filter, a dead ReLU, a stream of
    zeros) holds only rounding errors when it is reconstructed. They are small: 1e-7 of the size of
    the other channels. But BatchNorm, GroupNorm and RMSNorm divide by the channel's spread, at
    least sqrt(eps). They amplify the errors 300 times, and the next ReLU is at its kink, where
    rounding decides whether a gradient passes. Measured: two pruned filters in a stem make its
    gradient 13 to 37 times too large, at a drift of 2e-5 of the stream.

    So in ``invert`` we also compare each value's error with the spread of its channel. The spread
    is taken over the whole reconstructed channel: for a healthy channel of mostly zeros, as after a
    ReLU, the spread of a sample is zero. A channel with small values is fine if its spread is far
    above the rounding errors. We check only streams that a replay reads and saves tensors from: the
    first input of a chain is added to, but never read.

    To find the spread takes longer than all other figures, and most such channels are there from
    the start. So a step stops after two passes without one (``Step.close_checks``).

NOTE [ Couplings that share a function ]
    From the third pass on, couplings share functions (rule 8 of NOTE [ The tape ] in
    :mod:`revzoo.core.tape`). Then only the streams before the first coupling of each function are
    compared, since errors add up from step to step, and an error names the first and the last one.
    After it, each step is compared by itself again, so the next error names the step.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from revzoo._checks import is_number
from revzoo.core.fixedpoint.scale import Scale, magnitudes
from revzoo.core.fixedpoint.words import Fixed, Streams
from revzoo.core.guard.ranges import check_ranges
from revzoo.core.guard.samples import (
    Comparison,
    Sample,
    measure,
    operand_of,
    spread_of_channels,
    values_in,
)
from revzoo.core.invertible import Step, all_steps, name_of
from revzoo.core.tensors import has_values, in_memory_order, storage_id, values_of


class DriftError(RuntimeError):
    """Recomputed activations differ from the forward pass's, so gradients are wrong.

    Attributes:
        step: the first step beyond its limit; None if unknown.
        reason: what differs, without consequences and remedies.
    """

    step: Step | None = None
    reason: str = ""


class Replayed(NamedTuple):
    """One or more replayed steps.

    Attributes:
        steps: the steps.
        name: their path and type.
        limit: their largest allowed drift.
        half: whether they ran in float16.
        inverts: whether the replay inverts, or starts from values with rounding errors.
    """

    steps: tuple[Step, ...]
    name: str
    limit: float
    half: bool
    inverts: bool


_Compared = tuple[Replayed, Comparison]


class Guard:
    """Collects the figures of one backward pass and checks them at its end."""

    def __init__(self) -> None:
        self._drop(-1)

    def _drop(self, task: int) -> None:
        self._task = task
        self._start: list[Tensor] = []
        self._comparisons: list[_Compared] = []
        self._sampled: list[tuple[weakref.ref[Tensor], Tensor]] = []  # of the current state
        self._waiting: list[tuple[int, Comparison]] = []  # not yet used, by storage_id

    def begin(self, state: Streams) -> None:
        """Record the state that a backward pass starts from; no effect later in the same pass."""
        # drops figures of a backward pass that an exception ended
        task: int = torch._C._current_graph_task_id()
        if task != self._task:
            self._drop(task)
            # -1 outside a backward pass, as when a user reads a saved tensor: then nothing calls
            # check()
            if task != -1:
                self._start = [
                    magnitudes(values_of(t), 1)[0]
                    for t in state
                    if isinstance(t, Tensor) and t.is_floating_point() and has_values(t)
                ]
                _Pass.of(task).guards.append(self)

    def compare(
        self, replayed: Replayed, samples: Sequence[Sample], computed: Streams, known: Streams = ()
    ) -> None:
        """Record a replay's values, to compare with the samples of the forward pass.

        Args:
            replayed: the step.
            samples: of the forward pass.
            computed: the streams that the replay computed.
            known: the streams that it started from.
        """
        found = []
        for stream, expected in samples:
            t = computed[stream]
            if isinstance(t, Tensor):
                operand = operand_of(t, computed, known)
                size = expected if operand is None else self._sample_of(operand)
                comparison = Comparison(stream, expected, values_in(t), size)
                found.append((weakref.ref(t), expected))
                self._comparisons.append((replayed, comparison))
                if replayed.inverts and replayed.steps[0].close_checks > 0:
                    comparison.spread = spread_of_channels(t)
                    self._waiting.append((storage_id(t), comparison))
        self._sampled = [*(each for each in self._sampled if each[0]() is not None), *found]

    def _sample_of(self, t: Tensor) -> Tensor:
        # the replay of a later step has mostly compared it
        for ref, values in self._sampled:
            if ref() is t:
                return values
        return values_in(t)

    def note_uses(self, used: Sequence[Tensor], state: Streams) -> None:
        """Record the streams that a replay read; the next replay starts from ``state``.

        See NOTE [ Channels that are lost in rounding ].
        """
        if not self._waiting:
            return
        storages = {storage_id(t) for t in used}
        # by storage_id: the next replay reads the reconstructed stream itself or an alias
        for at, comparison in self._waiting:
            comparison.used |= at in storages
        storages = {storage_id(t) for t in state if isinstance(t, Tensor)}
        self._waiting = [(at, c) for at, c in self._waiting if at in storages and not c.used]

    def pop_figures(self) -> tuple[list[Tensor], list[_Compared]]:
        """Return and clear the figures: sizes at the start, comparisons."""
        figures = self._start, self._comparisons
        self._drop(-1)
        return figures


class _Pass:
    """One backward pass; checks all its chains together, at the cost of one chain.

    Autograd holds it until the pass succeeds or fails.
    """

    __slots__ = ("__weakref__", "guards", "scales", "sums")

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self.sums: list[tuple[tuple[Step, ...], Tensor, Tensor]] = []
        self.scales: dict[Scale, None] = {}

    @staticmethod
    def of(task: int) -> _Pass:
        """The object of a running graph task of autograd."""
        running = _passes.get(task)
        if running is None:
            running = _passes[task] = _Pass()
            # autograd runs it once, after the whole pass, where reading values stalls nothing
            Variable._execution_engine.queue_callback(running.check)
        return running

    @staticmethod
    def running() -> _Pass | None:
        """The running pass; None if someone uses a node or a saved tensor by hand."""
        task = torch._C._current_graph_task_id()
        return None if task == -1 else _Pass.of(task)

    def check(self) -> None:
        """Read the figures, set each step's drift, and raise for figures beyond their limit.

        Raises:
            RangeError: a stream reached its limit; names the step and a grid that fits.
            DriftError: a drift beyond the step's limit; names the step.
        """
        figures = [guard.pop_figures() for guard in self.guards]
        sums, self.sums = self.sums, []
        scales, self.scales = self.scales, {}
        check_ranges(scales)
        _check_sums(sums)
        _check_comparisons(_comparable(figures))


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


def note_scale(scale: Scale, step: Step | None) -> None:
    """Check the ranges of a chain at the end of the running backward pass, for ``step``."""
    if not (scale.log or scale.log.failure) or (step is not None and step.drift_limit is None):
        return
    if (running := _Pass.running()) is not None:
        running.scales[scale] = None


def words_sum(streams: Sequence[Fixed]) -> Tensor:
    """The sum of all words of ``streams``."""
    sums = [sum_of(t.words) for t in streams]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def sum_of(words: Tensor) -> Tensor:
    """The sum of all ``words``, as a scalar on the device; wraps around."""
    if words.numel() < 2**12:
        return words.sum()
    flat = in_memory_order(words) if words.dtype == torch.int32 else None
    if flat is None or flat.numel() % 2 or flat.storage_offset() % 2:
        return words.sum()
    # two words as one of 64 bits: on a CPU, torch sums them 20 times as fast
    return flat.view(torch.int64).sum()


def note_sums(steps: tuple[Step, ...], expected: Tensor, found: Tensor) -> None:
    """Compare sums of words before ``steps`` at the end of the running backward pass."""
    if (running := _Pass.running()) is not None and has_values(expected):
        running.sums.append((steps, expected, found))


def names_of(steps: Sequence[Step]) -> str:
    """The path and type of a step; of several, of the first and the last."""
    first = name_of(steps[0])
    return first if len(steps) == 1 else f"{first} to {name_of(steps[-1])}"


def _check_sums(sums: list[tuple[tuple[Step, ...], Tensor, Tensor]]) -> None:
    """Raise a DriftError for the first replay whose words differ from the forward pass's."""
    by_device: dict[torch.device, list[tuple[tuple[Step, ...], Tensor, Tensor]]] = {}
    for each in sums:
        by_device.setdefault(each[1].device, []).append(each)
    for of_device in by_device.values():
        expected, found = (torch.stack([s[i] for s in of_device]) for i in (1, 2))  # type: ignore[misc]
        equal = (expected == found).tolist()
        for (steps, _, _), same in zip(of_device, equal, strict=True):
            for step in steps:
                step.drift = 0.0 if same else math.inf
                step.close_checks = step.close_checks - 1 if same else Step.close_checks
            if same:
                continue
            step = steps[0]
            reason = f"{names_of(steps)}: its replay did not repeat the forward pass"
            error = DriftError(
                f"{reason}, so the gradients are wrong. The step is not deterministic, or "
                "something has changed that a replay does not restore: it restores torch's random "
                "state, autocast and defaults, training flags, parameters, and buffers. Make the "
                f"rest constant between forward and backward, or {step.remedy}"
            )
            error.step, error.reason = step, reason
            raise error


def _read_all(scalars: Sequence[Tensor]) -> list[float]:
    """Read scalars: one transfer for each type and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(scalars):
        groups.setdefault((t.dtype, t.device), []).append(i)
    values = [0.0] * len(scalars)
    for indices in groups.values():
        for i, value in zip(
            indices, torch.stack([scalars[i] for i in indices]).tolist(), strict=True
        ):
            values[i] = value
    return values


def _comparable(figures: list[tuple[list[Tensor], list[_Compared]]]) -> list[_Compared]:
    """The comparisons of all chains; see NOTE [ Streams that overflow ]."""
    # one transfer for all chains
    sizes = iter(_read_all([size for start, _ in figures for size in start]))
    comparisons: list[_Compared] = []
    for start, of_chain in figures:
        overflowed = not all(map(math.isfinite, [next(sizes) for _ in start]))
        if overflowed and any(replayed.half for replayed, _ in of_chain):
            continue
        for _, comparison in of_chain:
            comparison.overflowed = overflowed
        comparisons += of_chain
    return comparisons


def _check_comparisons(comparisons: list[_Compared]) -> None:
    measure([c for _, c in comparisons])
    of_step: dict[Step, float] = {}
    for replayed, c in comparisons:
        for step in replayed.steps:
            of_step[step] = max(of_step.get(step, 0.0), c.drift)
    for step, error in of_step.items():
        step.drift = error
    if overflowed := [each for each in comparisons if each[1].overflowed]:
        _warn_of_overflow(overflowed)
    for replayed, c in comparisons:
        if not c.drift <= replayed.limit:  # not >, so that NaN raises, too
            for step in replayed.steps:
                step.close_checks = Step.close_checks
            raise _failure(replayed, *_explain(replayed, c.drift, max(of_step.values())))
    for replayed, c in comparisons:
        # a channel must keep half as many digits as the limit demands of the stream
        if c.spread is not None and c.used and not c.lost <= math.sqrt(replayed.limit):
            raise _failure(replayed, *_explain_lost(replayed, c))
        if replayed.inverts:
            replayed.steps[0].close_checks -= 1


def _warn_of_overflow(comparisons: list[_Compared]) -> None:
    # in forward order: the last replay is of the first step; the samples are of its input
    finite = [r.name for r, c in reversed(comparisons) if c.expected.isfinite().all()]
    where = f"finite up to the input of {finite[-1]}" if finite else "not finite at its start"
    what = f"a chain of steps ends in values that are not finite; as far as sampled, it is {where}"
    _warn(what, "as in plain training")


def _warn(what: str, where_else: str) -> None:
    warnings.warn(
        f"{what}. So the gradients are not finite, {where_else}: normalise the branches, lower the "
        "learning rate, or check the data",
        RuntimeWarning,
        stacklevel=3,
    )


def _failure(replayed: Replayed, reason: str, advice: str) -> DriftError:
    error = DriftError(reason + advice)
    error.step, error.reason = replayed.steps[0], reason
    return error


def _explain(replayed: Replayed, error: float, worst: float) -> tuple[str, str]:
    """The reason and the advice of an error."""
    steps, name, limit, _, inverts = replayed
    step = steps[0]
    reason = (
        f"{name}: a recomputed stream is off by {error:.2g} of its size (limit {limit:g}; worst of "
        f"this backward pass {worst:.2g})"
    )
    if not inverts:
        remedy = (
            "It was computed again from the same inputs, so it is not deterministic, or reads "
            f"values that changed since: {step.remedy}"
        )
    elif limit == 0:
        remedy = (
            "On a grid it must be equal, so the step is not deterministic, or its output was "
            f"changed around autograd (y.data, y.numpy()): {step.remedy}"
        )
    else:
        remedy = (
            "Causes: streams in a narrow type (keep float32 weights, and train under "
            "torch.autocast(device, torch.bfloat16)), a branch that amplifies (normalise it; lower "
            "the learning rate if the training diverges) or is not deterministic, a wrong inverse "
            "(see revzoo.check_inverse()) or one that draws random numbers in another order. "
            f"Remedy: {step.drift_remedy}"
        )
    return reason, f", so the gradients are wrong. {remedy}"


def _explain_lost(replayed: Replayed, comparison: Comparison) -> tuple[str, str]:
    """The reason and the advice for a channel that is lost in rounding."""
    reason = (
        f"{replayed.name}: a channel of recomputed stream {comparison.stream} is off by "
        f"{comparison.lost:.2g} of its spread (limit {math.sqrt(replayed.limit):.2g})"
    )
    return reason, (
        ". It is nearly constant in the forward pass, so recomputed it is mostly rounding errors. "
        "If a normalisation amplifies them, the gradients are wrong. Causes: pruned filters, dead "
        f"channels, streams of zeros. Remedy: {replayed.steps[0].drift_remedy}"
    )


def set_drift_limit(module: nn.Module, limit: float | None) -> None:
    """Set the largest allowed relative drift for the steps of ``module``.

    Infinity allows any drift; :func:`drift` still measures it. The error of a single channel,
    relative to its spread, may be the square root of ``limit``. None switches the guard off: it
    compares nothing, checks no range of fixed-point streams and reads nothing from the device, as
    a CUDA graph needs. Wrong reconstructions then go unnoticed, so run a few guarded steps first.

    Raises:
        ValueError: ``limit`` is negative or not a number.

    Example:
        >>> block = revzoo.ReversibleBlock(nn.Linear(4, 4))
        >>> net = revzoo.ReversibleSequence([block], memory="invert")
        >>> revzoo.set_drift_limit(net, 1e-4)
    """
    if limit is not None and not (is_number(limit) and limit >= 0):
        raise ValueError(
            f"limit={limit!r}: expected a relative error, 0 or more, or None for no guard"
        )
    for step in all_steps(module).values():
        step.drift_limit = limit
        if limit is None:
            step.drift = None


def drift(module: nn.Module) -> dict[str, float]:
    """Relative drift of each step of ``module`` in its last replay, by path, in order.

    Leaves out steps that were never replayed.

    Example:
        >>> block = revzoo.ReversibleBlock(nn.Linear(4, 4))
        >>> net = revzoo.ReversibleSequence([block], memory="invert")
        >>> net(torch.randn(2, 8)).sum().backward()
        >>> {path: error < 1e-5 for path, error in revzoo.drift(net).items()}
        {'steps.0.steps.0': True, 'steps.0.steps.1': True}
    """
    steps = all_steps(module)
    return {path: step.drift for path, step in steps.items() if step.drift is not None}
