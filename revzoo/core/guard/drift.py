"""The guard: detects wrong reconstructions, without stalling the device.

A reconstruction is exact only up to rounding. If a network amplifies rounding errors, if streams
have a narrow dtype, or if a branch is not deterministic, reconstructions and gradients are wrong.
So the guard samples every stream in the forward pass and compares the samples with the
reconstruction: weighted sums of values from the whole stream, and single values (in ``invert``, of
each channel). The relative error is the *drift*; its limit is ``Step.drift_limit``, and zero in
mode ``exact``. In every mode, streams on a grid must stay in its range
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

    So we also compare each channel's error with its spread. The spread is taken over the whole
    reconstructed channel, not over the sample: for a healthy channel of mostly zeros, as after a
    ReLU, the spread of a sample is zero. A channel with small values is fine if its spread is far
    above the rounding errors. We check only streams that a replay reads and saves tensors from:
    the first input of a chain is added to, but never read.
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
from revzoo.core.fixedpoint.words import Fixed, Streams, as_floats
from revzoo.core.guard.ranges import check_ranges, read
from revzoo.core.guard.samples import (
    PER_CHANNEL,
    Sampled,
    Samples,
    channel_ranges,
    figures_of,
    weights_of,
)
from revzoo.core.invertible import Step, all_steps
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
    """A replayed step.

    Attributes:
        step: the step.
        name: its path and type.
        limit: its largest allowed drift.
        half: whether it ran in float16.
        inverts: whether the replay inverts, or starts from values with rounding errors.
    """

    step: Step
    name: str
    limit: float
    half: bool
    inverts: bool


class _Comparison:
    """The sampled values of one reconstructed stream, to compare with the forward pass's."""

    __slots__ = ("actual", "overflowed", "ranges", "replayed", "samples", "used")

    def __init__(self, replayed: Replayed, samples: Samples, computed: Tensor | Fixed) -> None:
        self.replayed = replayed
        self.samples = samples
        if isinstance(computed, Tensor):
            computed = values_of(computed.detach())
        elif samples.scale is None:  # the stream was floating-point in the forward pass
            computed = as_floats((computed,))[0]
        self.actual = figures_of(computed, samples.plan, samples.scale)
        # the range of the whole channel: see NOTE [ Channels that are lost in rounding ]
        self.ranges = [
            channel_ranges(computed, channels.dim)
            for channels in samples.plan.channels
            if isinstance(computed, Tensor)
        ]
        self.overflowed = False  # whether the chain ended in values that are not finite
        self.used = False


class Guard:
    """Collects the figures of one backward pass and checks them at its end."""

    def __init__(self) -> None:
        self._task = -1
        self._start: list[Tensor] = []
        self._comparisons: list[_Comparison] = []
        self._waiting: list[tuple[int, _Comparison]] = []  # not yet used, by storage_id

    def begin(self, state: Streams) -> None:
        """Record the state that a backward pass starts from; no effect later in the same pass."""
        # drops figures of a backward pass that an exception ended
        task: int = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._comparisons, self._waiting = task, [], []
            # -1 outside a backward pass, as when a user reads a saved tensor: then nothing calls
            # check()
            if task != -1:
                self._start = [
                    magnitudes(values_of(t), 1)[0]
                    for t in state
                    if isinstance(t, Tensor) and t.is_floating_point() and has_values(t)
                ]
                _Pass.of(task).guards.append(self)

    def compare(self, replayed: Replayed, samples: list[Samples], computed: Sampled) -> None:
        """Record a replay's values, to compare with the samples of the forward pass."""
        for sampled in samples:
            if (t := computed[sampled.stream]) is None:
                continue
            comparison = _Comparison(replayed, sampled, t)
            self._comparisons.append(comparison)
            if isinstance(t, Tensor):
                self._waiting.append((storage_id(t), comparison))

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

    def pop_figures(self) -> tuple[list[Tensor], list[_Comparison]]:
        """Return and clear the figures: sizes at the start, comparisons."""
        figures = self._start, self._comparisons
        self._task, self._start, self._comparisons, self._waiting = -1, [], [], []
        return figures


class _Pass:
    """One backward pass; checks all its chains together, at the cost of one chain.

    Autograd holds it until the pass succeeds or fails.
    """

    __slots__ = ("__weakref__", "guards", "scales", "sums")

    def __init__(self) -> None:
        self.guards: list[Guard] = []
        self.sums: list[tuple[Step, str, Tensor, Tensor]] = []
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
    if not scale.log or (step is not None and step.drift_limit is None):
        return
    if (running := _Pass.running()) is not None:
        running.scales[scale] = None


def words_sum(streams: Sequence[Fixed]) -> Tensor:
    """The sum of all words of ``streams``, as a scalar on the device; wraps around."""
    sums = [_sum_of(t.words) for t in streams]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _sum_of(words: Tensor) -> Tensor:
    if words.numel() < 2**12:
        return words.sum()
    flat = in_memory_order(words) if words.dtype == torch.int32 else None
    if flat is None or flat.numel() % 2 or flat.storage_offset() % 2:
        return words.sum()
    # two words as one of 64 bits: on a CPU, torch sums them 20 times as fast
    return flat.view(torch.int64).sum()


def note_sums(step: Step, name: str, expected: Tensor, found: Tensor) -> None:
    """Compare the sums of a step's words at the end of the running backward pass."""
    if (running := _Pass.running()) is not None and has_values(expected):
        running.sums.append((step, name, expected, found))


def _check_sums(sums: list[tuple[Step, str, Tensor, Tensor]]) -> None:
    """Raise a DriftError for the first replay whose words differ from the forward pass's."""
    by_device: dict[torch.device, list[tuple[Step, str, Tensor, Tensor]]] = {}
    for each in sums:
        by_device.setdefault(each[2].device, []).append(each)
    for of_device in by_device.values():
        expected, found = (torch.stack([s[i] for s in of_device]) for i in (2, 3))  # type: ignore[misc]
        equal = (expected == found).tolist()
        for (step, name, _, _), same in zip(of_device, equal, strict=True):
            if same:
                step.drift = 0.0
                continue
            reason = f"{name}: its replay did not repeat the forward pass"
            error = DriftError(
                f"{reason}, so the gradients are wrong. The step is not deterministic, or "
                "something has changed that a replay does not restore: it restores torch's random "
                "state, autocast and defaults, training flags, parameters, and buffers. Make the "
                f"rest constant between forward and backward, or {step.remedy}"
            )
            error.step, error.reason = step, reason
            raise error


def _comparable(figures: list[tuple[list[Tensor], list[_Comparison]]]) -> list[_Comparison]:
    """The comparisons of all chains; see NOTE [ Streams that overflow ]."""
    # one transfer for all chains
    sizes = iter(read([size for start, _ in figures for size in start]))
    comparisons: list[_Comparison] = []
    for start, of_chain in figures:
        overflowed = not all(map(math.isfinite, [next(sizes) for _ in start]))
        if overflowed and any(c.replayed.half for c in of_chain):
            continue
        for comparison in of_chain:
            comparison.overflowed = overflowed
        comparisons += of_chain
    return comparisons


def _check_comparisons(comparisons: list[_Comparison]) -> None:
    errors: dict[_Comparison, float] = {}
    lost: dict[_Comparison, float] = {}
    # one stack for all streams of one kind: a transfer for each would stall the device each time
    for alike in _grouped(comparisons):
        _measure(alike, errors, lost)
    of_step: dict[Step, float] = {}
    for comparison in comparisons:
        step = comparison.replayed.step
        of_step[step] = max(of_step.get(step, 0.0), errors[comparison])
    for step, error in of_step.items():
        step.drift = error
    if overflowed := [comparison for comparison in comparisons if comparison.overflowed]:
        _warn_of_overflow(overflowed)
    # not <=, so that NaN raises, too
    for comparison in comparisons:
        if not errors[comparison] <= comparison.replayed.limit:
            raise _failure(
                comparison, *_explain(comparison, errors[comparison], max(errors.values()))
            )
    for comparison in comparisons:
        # a channel must keep half as many digits as the limit demands of the stream
        if comparison.used and not lost[comparison] <= math.sqrt(comparison.replayed.limit):
            raise _failure(comparison, *_explain_lost(comparison, lost[comparison]))


def _warn_of_overflow(comparisons: list[_Comparison]) -> None:
    # in forward order: the last replay is of the first step; the samples are of its input
    finite = [c.replayed.name for c in reversed(comparisons) if c.samples.figures.isfinite().all()]
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


def _failure(comparison: _Comparison, reason: str, advice: str) -> DriftError:
    error = DriftError(reason + advice)
    error.step, error.reason = comparison.replayed.step, reason
    return error


def _grouped(comparisons: list[_Comparison]) -> list[list[_Comparison]]:
    """Groups of streams with one shape and device, which are compared together."""
    groups: dict[tuple[object, ...], list[_Comparison]] = {}
    for c in comparisons:
        plan = c.samples.plan
        kinds = [(channels.dim, channels.size) for channels in plan.channels]
        # by type, since a stack of words and floats would round the words
        types = c.actual.dtype, c.samples.figures.dtype
        key = (c.actual.device, len(c.actual), plan.each, len(c.samples.operand), *types, *kinds)
        groups.setdefault(key, []).append(c)
    return list(groups.values())


def _measure(
    comparisons: list[_Comparison], errors: dict[_Comparison, float], lost: dict[_Comparison, float]
) -> None:
    """Measure errors relative to the stream, and to the spread of the worst channel."""
    figures = [(c.samples.figures, c.samples.operand, c.actual) for c in comparisons]
    expected, operand, actual = (torch.stack(t).cpu().double() for t in zip(*figures, strict=True))
    # the sums become means, whose error is never larger than the largest error of a value
    plan = comparisons[0].samples.plan
    sums = len(plan.summed) // plan.each
    total = weights_of(plan, expected.device, torch.float64).sum()
    for values in (expected, actual):
        values[:, -sums:] /= total
    overflowed = torch.tensor([[c.overflowed] for c in comparisons], device="cpu")
    # infinite in the forward pass already, or lost behind an overflow: nothing to compare
    not_compared = ~expected.isfinite() | overflowed & ~actual.isfinite()
    difference = (actual - expected).masked_fill(not_compared, 0).abs().nan_to_num(nan=math.inf)
    # not relative to each value: rounding errors have the size of the largest summand
    size = torch.cat((expected, operand), 1).nan_to_num(0, 0, 0).abs().amax(1)
    relative = difference.amax(1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    errors.update(zip(comparisons, relative.tolist(), strict=True))
    lost.update(zip(comparisons, _worst_channels(comparisons, difference).tolist(), strict=True))


def _worst_channels(comparisons: list[_Comparison], difference: Tensor) -> Tensor:
    """The largest error of a channel, relative to the channel's spread, for each comparison."""
    plans = [c.samples.plan for c in comparisons]
    worst, at = torch.zeros(len(comparisons), dtype=torch.float64, device="cpu"), 0
    for k, channels in enumerate(plans[0].channels):
        ends = [torch.stack([c.ranges[k][i] for c in comparisons]).cpu().double() for i in (0, 1)]
        spread = ends[1] - ends[0]
        if channels.chosen is not None:
            index = torch.tensor([p.channels[k].chosen for p in plans], device="cpu")
            spread = spread.gather(1, index)
        count = spread.shape[1] * PER_CHANNEL
        of_channel = difference[:, at : at + count].view(*spread.shape, PER_CHANNEL).amax(2)
        # spread 0: the whole channel is shifted by a constant, which no norm amplifies
        ratio = torch.where(spread > 0, of_channel / spread, 0)
        worst, at = torch.maximum(worst, ratio.amax(1)), at + count
    return worst


def _explain(comparison: _Comparison, error: float, worst: float) -> tuple[str, str]:
    """The reason and the advice of an error."""
    step, name, limit, _, inverts = comparison.replayed
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


def _explain_lost(comparison: _Comparison, ratio: float) -> tuple[str, str]:
    """The reason and the advice for a channel that is lost in rounding."""
    replayed = comparison.replayed
    reason = (
        f"{replayed.name}: a channel of recomputed stream {comparison.samples.stream} is off by "
        f"{ratio:.2g} of its spread (limit {math.sqrt(replayed.limit):.2g})"
    )
    return reason, (
        ". It is nearly constant in the forward pass, so recomputed it is mostly rounding errors. "
        "If a normalisation amplifies them, the gradients are wrong. Causes: pruned filters, dead "
        f"channels, streams of zeros. Remedy: {replayed.step.drift_remedy}"
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
