"""The guard: detects wrong reconstructions, without stalling the device.

Reconstructions and gradients are wrong if a network amplifies rounding errors, if streams have a
narrow dtype, or if a branch is not deterministic. So the guard keeps up to 128 values of every
stream that a step changes, and compares them with the reconstruction. The largest error, relative
to the largest value, is the *drift*; its limit is ``Step.drift_limit``. Of fixed-point streams the
guard compares the sums of the words, which must be equal, and checks the ranges.

All figures stay on the device. We read them once, after the backward pass; only the ranges of
outputs that need no gradient are read in the forward pass. Steps whose limit is None are not
guarded: nothing is compared or read, and a value beyond the range shows only as NaN.

NOTE [ Streams that overflow ]
    An infinite output cannot be inverted, and plain training has no finite gradient there either.
    In float16 this is a normal event: GradScaler skips the step. So chains that end in values that
    are not finite are not compared, nor are single such values. Words are restored all the same, so
    their sums must be equal.

NOTE [ Channels that are lost in rounding ]
    A channel that is constant in the forward pass (a pruned filter, a dead ReLU, a stream of
    zeros) holds only rounding errors when it is reconstructed: 1e-7 of the size of the other
    channels. But norms divide by the channel's spread, at least sqrt(eps), which amplifies the
    errors 300 times. Then rounding decides whether the next ReLU passes a gradient. Measured: two
    pruned filters in a stem make its gradient 13 to 37 times too large, at a drift of 2e-5.

    So in ``invert`` we also compare each value's error with the spread of its channel, taken over
    the whole reconstructed channel: of mostly zeros, as after a ReLU, the spread of a sample is
    zero. We check only streams that a replay reads and saves tensors from: the first input of a
    chain is added to, but never read.

    To find the spread takes longer than all other figures, and most such channels are there from
    the start. So a step stops after two passes without one (``Step.close_checks``).

NOTE [ Couplings that share a function ]
    From the third pass on, couplings share functions (rule 8 of NOTE [ The tape ] in
    :mod:`revzoo.core.tape`). Then only the streams before the first coupling of each function are
    compared, since errors add up from step to step, and an error names the first and the last one.
    After it, each step is compared by itself again, so the next error names the step.

NOTE [ Streams beyond their range ]
    A sample beyond the range of its grid reads as NaN, and so does every value computed from it.
    The scale of its chain logs the peaks of measured sums (rule 6 of NOTE [ Words and floats ]).

    1. Every gradient that flows through a sum, or through a replay, notes the chain's scale. We
       read the logs of all noted scales once, after the backward pass, and raise a RangeError.
    2. A chain whose outputs need no gradient is checked where it ends: by the sequence, or by the
       step that was called alone. In evaluation mode it then runs again on the adapted grid, mostly
       once, at most five times.
    3. The first pass of a chain is read where it ends, too. It sets the floor of
       :class:`~revzoo.core.kernels.Growth`, and warns if tokens or channels have few units.
    4. Infinite values and NaN are not an error here, as in a plain network.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from revzoo._checks import is_number
from revzoo.core.invertible import State, Step, all_steps, name_of
from revzoo.core.kernels import Scale, fraction_bits, free_to_read, magnitudes, sum_of
from revzoo.core.tensors import (
    capturing_cuda_graph,
    has_values,
    storage_id,
    values_of,
)
from revzoo.core.words import Fixed, Streams, fixed_of

_FEWEST_UNITS = 1024  # a token or channel should span so many units of the grid
_FEW = 0.25  # warn if so many of the tokens or channels have fewer


class RangeError(RuntimeError):
    """A stream left the range in which its fixed-point sums are exact.

    Attributes:
        adapted: whether the grid is coarser now, so that the same pass would succeed.
        grid: fractional bits that fit, for :func:`revzoo.set_memory`; None if none do, or if the
            grid adapts.
        reason: which stream left which range, without remedies.
    """

    adapted: bool = False
    grid: int | None = None
    reason: str = ""


def range_failure(scale: Scale) -> RangeError | None:
    """The error for the first stream beyond its range; adapts the grid (host sync)."""
    if scale.log:
        _read(scale)
        scale.log.clear()
        scale.growth.failures = 0 if scale.failure is None else scale.growth.failures + 1
    if scale.failure is None:
        return None
    measured, value, end = scale.failure
    error = _range_error(measured.step, scale, value, end)
    error.adapted = scale.bits is None and bool((scale.adapted() > scale.down).any())
    return error


def _read(scale: Scale) -> None:
    """Note the first sum beyond its range; adapt the grid."""
    sizes = torch.cat([m.sizes for m in scale.log])
    peaks = torch.cat([m.peaks for m in scale.log])
    ends = torch.cat([m.down for m in scale.log]) * scale.limit
    # one value is read, unless something has grown
    usual = ends
    if scale.bits is None:  # another chain may have widened the grid since
        usual = torch.minimum(scale.growth.base(sizes), ends)
    grown = (peaks >= usual) & peaks.isfinite()
    if not bool(grown.any()):
        return
    rows: list[int] = grown.nonzero().flatten().tolist()
    of_rows = torch.stack([sizes.double(), peaks.double(), ends.double()])[:, grown].T.tolist()
    for row, (_, peak, end) in zip(rows, of_rows, strict=True):
        if peak >= end and scale.failure is None:
            scale.failure = scale.log[row // len(scale.down)], peak, end
    if scale.bits is None:
        reached = [(size, peak) for size, peak, _ in of_rows]
        scale.growth.widen(reached, failed=scale.failure is not None)


def check_ranges(scales: Iterable[Scale]) -> None:
    """Raise a RangeError for the first stream beyond its range (host sync)."""
    errors = [error for scale in scales if (error := range_failure(scale)) is not None]
    if errors:
        raise errors[0]


def scales_of(state: Iterable[Tensor | Fixed]) -> list[Scale]:
    """The scales of the streams that have words, each once."""
    fixed = (t if isinstance(t, Fixed) else fixed_of(t) for t in state)
    return list(dict.fromkeys(f.scale for f in fixed if f is not None))


def finish_chains(scales: Sequence[Scale], outputs: State) -> RangeError | None:
    """Check the chains that began in a call, at its end (NOTE [ Streams beyond their range ]).

    Returns:
        An error if the call should run again, on a grid that has adapted: to values beyond the
        range, or to small ones.

    Raises:
        RangeError: a stream left its range, no gradient needs the outputs, and no grid fits.
    """
    again: RangeError | None = None
    trained = any(t.requires_grad for t in outputs)
    for scale in scales:
        growth = scale.growth
        if not has_values(scale.down) or capturing_cuda_graph():
            continue
        if growth.seen != scale.grid:
            if scale.guarded and scale.bits is None and growth.settle(scale.log):
                again = RangeError("values are small: run the chain again, on a finer grid")
            else:
                growth.seen = scale.grid
                if scale.guarded and (what := _rounded_part(scale, outputs)):
                    bits = fraction_bits(scale)
                    finer = "" if scale.bits is None else ", or choose more bits or grid='auto'"
                    warnings.warn(
                        f"{_name(scale.log[-1].step)} and the steps before it: {what} reach less "
                        f"than {_FEWEST_UNITS} units of the grid (grid={bits}: multiples of "
                        f"2**-{bits}), which rounds them: scale the input or normalise the "
                        f"branches{finer}, or use memory='invert'",
                        RuntimeWarning,
                        stacklevel=3,
                    )
        if not scale.guarded:
            growth.failures = 0
            continue
        if trained and not free_to_read(scale.down):
            continue  # reading would stall: the backward pass checks (rule 1)
        error = range_failure(scale)
        if error is not None and error.adapted:
            again = error
        elif error is not None and not trained:
            raise error
    return again


def _rounded_part(scale: Scale, outputs: State) -> str:
    """What has so few units that the grid rounds it; empty if nothing has.

    On a grid that adapts we look at tokens and channels, on a chosen one at the largest value.
    """
    if scale.bits is not None:
        largest = max(float(m.peaks.amax()) for m in scale.log)
        return "all values" if 0 < largest < _FEWEST_UNITS * float(scale.down[0]) else ""
    for t in outputs:
        fixed = fixed_of(t)
        if fixed is None or fixed.scale is not scale or fixed.words.dim() > 5:
            continue
        for kept, others in _channel_dims(fixed.words):
            units = torch.maximum(fixed.words.amax(others), -fixed.words.amin(others))
            known = units[units > 0]
            few = float((known < _FEWEST_UNITS).float().mean()) if len(known) else 0.0
            if few >= _FEW:
                return f"{few:.0%} of the channels or tokens (dimension {kept})"
    return ""


def _name(step: Step | None) -> str:
    return "a step" if step is None else name_of(step)


def _range_error(step: Step | None, scale: Scale, value: float, end: float) -> RangeError:
    """The error for a stream of this magnitude; names the step and, for a number, a grid."""
    reason = f"{_name(step)}: a stream or a value added to it reached {value:.3g}"
    if scale.bits is None:
        reason += f", but the range of its sample ends at {end:g}"
        error = RangeError(
            f"{reason}. The grid adapts to what a chain has seen: compute the step again. If this "
            "repeats, normalise the branches, or lower the learning rate if the training diverges"
        )
    else:
        # one bit in reserve, since training changes the values
        excess = math.ceil(math.log2(value / end)) + 1
        fitting = scale.bits - excess if excess <= scale.bits else None
        reason += f", but with grid={scale.bits} sums are exact only below {end:g}"
        choice = "" if fitting is None else f", or grid={fitting}"
        error = RangeError(
            f"{reason}: choose revzoo.set_memory(model, 'exact', grid='auto'){choice}; normalise "
            "the branches, or lower the learning rate if the training diverges"
        )
        error.grid = fitting
    error.reason = reason
    return error


# A random mask may change one image of a batch, so each image needs some values. More of them would
# cost memory: the tape keeps a sample of each stream.
SAMPLED = 128  # values of a stream
_SMALLEST_CHANNEL = 4  # values; the spread of fewer means little


def sample(computed: Streams, known: Streams) -> dict[int, Tensor]:
    """Sample the streams that a replay computes, except those that it knows; by their index.

    Leaves out fixed-point streams, whose words are summed, and tensors without values to compare.
    """
    others = set(map(id, known))
    changed = [
        (i, sample_of(t))
        for i, t in enumerate(computed)
        if isinstance(t, Tensor) and id(t) not in others
    ]
    return {i: values for i, values in changed if values is not None}


def sample_of(t: Tensor) -> Tensor | None:
    """Sampled values of one stream; None if it has no values to compare."""
    t = _plain(t)
    # of integers masks and indices; not bytes, in which kernels keep uninitialised workspaces
    choices = (torch.bool, torch.int32, torch.int64)
    numbers = t.is_floating_point() or t.is_complex() or t.dtype in choices
    return values_in(t) if numbers and t.layout is torch.strided and has_values(t) else None


def _plain(t: Tensor) -> Tensor:
    return t if type(t) is Tensor else values_of(t)


def values_in(t: Tensor) -> Tensor:
    """The sampled values of a stream, in the same places for every layout."""
    t = _plain(t).detach()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return torch.take(t, _places(t.numel(), t.device))


@functools.lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> Tensor:
    # One in each of equal parts, at random: a stride would visit the same rows, columns or channels
    # of every image. The guard must not draw from the caller's random numbers.
    size = min(count, SAMPLED)
    parts = torch.arange(size, dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    within = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return ((parts + within) * (count / size)).long().clamp_max(count - 1).to(device)


def _channel_dims(t: Tensor) -> list[tuple[int, list[int]]]:
    """The dimension of channels, and the others; two for tokens (B, N, C) or signals (B, C, L)."""
    dims = (1, 2) if t.dim() == 3 else (1,) if t.dim() > 1 else ()
    return [(d, [other for other in range(t.dim()) if other != d]) for d in dims]


def spread_of_channels(t: Tensor) -> Tensor | None:
    """For each sampled value, the range of values of its channel; None if there are no channels.

    Infinity for a channel of equal values: only a constant can be added to it, which no norm
    amplifies.
    """
    t = _plain(t).detach()
    if not t.is_floating_point():
        return None
    spreads = []
    for d, others in _channel_dims(t):
        if t.numel() // t.shape[d] >= _SMALLEST_CHANNEL:
            spread = t.amax(others).float() - t.amin(others).float()
            spread = torch.where(spread > 0, spread, math.inf)
            channel = _places(t.numel(), t.device) // t.shape[d + 1 :].numel() % t.shape[d]
            spreads.append(spread[channel])
    return functools.reduce(torch.minimum, spreads) if spreads else None


def operand_of(t: Tensor, computed: Streams, known: Streams) -> Tensor:
    """The stream in ``known`` from which a replay computed ``t``; ``t`` if it cannot be told.

    Its size is that of the rounding errors, if ``t`` is smaller: in ``x = y - F(z)``, it is y.
    """
    passed_on = set(map(id, computed))
    kind = t.shape, t.is_floating_point(), t.is_complex()
    others = [o for o in known if isinstance(o, Tensor) and id(o) not in passed_on]
    alike = [o for o in others if (o.shape, o.is_floating_point(), o.is_complex()) == kind]
    return alike[-1] if alike else t


class DriftError(RuntimeError):
    """Recomputed activations differ from the forward pass's, so gradients are wrong.

    Attributes:
        step: the first step beyond its limit; None if unknown.
        reason: what differs, without consequences and remedies.
    """

    step: Step | None = None
    reason: str = ""


class Replayed(NamedTuple):
    """One or more replayed steps."""

    steps: tuple[Step, ...]
    name: str
    limit: float  # their largest allowed drift
    inverts: bool  # or starts from values with rounding errors


@dataclass(slots=True, eq=False)
class _Comparison:
    """Sampled values of one reconstructed stream, to compare with the forward pass's."""

    replayed: Replayed
    stream: int  # its index in the state
    expected: Tensor
    actual: Tensor
    operand: Tensor  # values of the stream from which it was computed
    end: Tensor | None  # the largest value at the end of the chain, (1,); None of outputs
    spread: Tensor | None = None  # of the channel of each value; None if it is not checked
    used: bool = False  # whether a replay has read the stream


class Guard:
    """Collects what the replays of one chain compare in a backward pass."""

    def __init__(self) -> None:
        self._pass: _Pass | None = None
        self._end: Tensor | None = None
        self._unread: dict[int, _Comparison] = {}  # by storage_id

    def begin(self, state: Streams) -> None:
        """Record the state that a backward pass starts from; no effect later in the same pass."""
        if self._pass is (running := _Pass.running()):
            return
        self._pass, self._unread = running, {}
        sizes = [
            magnitudes(values_of(t), 1)
            for t in state
            if isinstance(t, Tensor) and t.is_floating_point() and has_values(t)
        ]
        self._end = functools.reduce(torch.maximum, sizes) if sizes else None

    def compare(
        self,
        replayed: Replayed,
        samples: Mapping[int, Tensor],
        computed: Streams,
        known: Streams = (),
    ) -> None:
        """Record the streams that a replay ``computed`` from the ``known`` ones.

        ``samples`` are of the forward pass, by stream.
        """
        for stream, expected in samples.items():
            t = computed[stream]
            if self._pass is None or not isinstance(t, Tensor):
                continue
            values, operand = values_in(t), operand_of(t, computed, known)
            size = values if operand is t else values_in(operand)
            comparison = _Comparison(replayed, stream, expected, values, size, self._end)
            self._pass.comparisons.append(comparison)
            if replayed.inverts and replayed.steps[0].close_checks > 0:
                comparison.spread = spread_of_channels(t)
                self._unread[storage_id(t)] = comparison

    def note_uses(self, used: Sequence[Tensor], state: Streams) -> None:
        """Record the streams that a replay read; the next replay starts from ``state``.

        See NOTE [ Channels that are lost in rounding ].
        """
        if not self._unread:
            return
        # by storage_id: the next replay reads the reconstructed stream itself or an alias
        for t in used:
            if (comparison := self._unread.get(storage_id(t))) is not None:
                comparison.used = True
        kept = {storage_id(t) for t in state if isinstance(t, Tensor)}
        self._unread = {at: c for at, c in self._unread.items() if at in kept and not c.used}


class _Pass:
    """One backward pass; checks all its chains together, at the cost of one chain.

    Autograd holds it until the pass succeeds or fails.
    """

    def __init__(self) -> None:
        self.comparisons: list[_Comparison] = []
        self.sums: list[tuple[tuple[Step, ...], Tensor, Tensor]] = []
        self.scales: dict[Scale, None] = {}

    @staticmethod
    def running() -> _Pass | None:
        """The running pass; None if someone uses a node or a saved tensor by hand."""
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        running = _passes.get(task)
        if running is None:
            running = _passes[task] = _Pass()
            # autograd runs it once, after the whole pass, where reading values stalls nothing
            Variable._execution_engine.queue_callback(running.check)
        return running

    def check(self) -> None:
        """Read the figures, set each step's drift, and raise a RangeError or a DriftError."""
        found = self.scales, self.sums, self.comparisons
        self.__init__()  # type: ignore[misc]  # chains may hold this object for longer
        check_ranges(found[0])
        _check_sums(found[1])
        _check_comparisons(found[2])


_passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()


def note_scale(scale: Scale, step: Step | None) -> None:
    """Check the ranges of a chain at the end of the running backward pass, for ``step``."""
    if not (scale.log or scale.failure) or (step is not None and step.drift_limit is None):
        return
    if (running := _Pass.running()) is not None:
        running.scales[scale] = None


def words_sum(streams: Sequence[Fixed]) -> Tensor:
    """The sum of all words of ``streams``."""
    sums = [sum_of(t.words) for t in streams]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


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
    if not sums:
        return
    device = sums[0][1].device
    expected = torch.stack([total.to(device) for _, total, _ in sums])
    found = torch.stack([total.to(device) for _, _, total in sums])
    for (steps, _, _), same in zip(sums, (expected == found).tolist(), strict=True):
        for step in steps:
            # nn.Module's own assignment is slow
            object.__setattr__(step, "drift", 0.0 if same else math.inf)
            object.__setattr__(step, "close_checks", step.close_checks - 1)
        if not same:
            raise _failure(
                steps,
                f"{names_of(steps)}: its replay did not repeat the forward pass",
                ", so the gradients are wrong. The step is not deterministic, or something has "
                "changed that a replay does not restore: it restores torch's random state, "
                "autocast and defaults, training flags, parameters, and buffers. Make the rest "
                f"constant between forward and backward, or {steps[0].remedy}",
            )


def _measured(comparisons: list[_Comparison]) -> list[tuple[_Comparison, float, float]]:
    """Each comparison, its largest error relative to the stream, and to the channel (host sync).

    Leaves out chains that ended in values that are not finite.
    """
    groups: dict[tuple[object, ...], list[_Comparison]] = {}
    for c in comparisons:
        t = c.actual
        key = t.device, t.shape, t.dtype, c.expected.dtype, c.spread is None, c.end is None
        groups.setdefault(key, []).append(c)
    found: dict[_Comparison, tuple[float, float]] = {}
    # one stack for all streams of one kind: a transfer for each would stall the device each time
    for alike in groups.values():
        expected = _stack([c.expected for c in alike])
        compared = expected.isfinite()
        difference = torch.where(compared, (_stack([c.actual for c in alike]) - expected).abs(), 0)
        # not relative to each value: rounding errors have the size of the largest summand
        sizes = torch.cat((expected, _stack([c.operand for c in alike])), 1)
        rows = [difference.amax(1), sizes.nan_to_num(0, 0, 0).abs().amax(1)]
        ends = [c.end.to(expected) for c in alike if c.end is not None]
        rows.append(torch.cat(ends) if ends else torch.zeros_like(rows[0]))
        if spreads := [c.spread for c in alike if c.spread is not None]:
            rows.append((difference / _stack(spreads)).amax(1))
        for c, (error, size, end, *lost) in zip(alike, torch.stack(rows, 1).tolist(), strict=True):
            if math.isfinite(end):
                found[c] = error / max(size, sys.float_info.min), sum(lost)
    return [(c, *found[c]) for c in comparisons if c in found]


def _stack(tensors: list[Tensor]) -> Tensor:
    stacked = torch.stack(tensors)
    # float32 would round integers
    floats = torch.float32 if stacked.is_floating_point() else torch.float64
    return stacked.to(torch.promote_types(stacked.dtype, floats))


def _check_comparisons(comparisons: list[_Comparison]) -> None:
    measured = _measured(comparisons)
    of_step: dict[Step, float] = {}
    for c, error, _ in measured:
        for step in c.replayed.steps:
            of_step[step] = max(of_step.get(step, 0.0), error)
    for step, error in of_step.items():
        step.drift = error
    for c, error, _ in measured:
        if not error <= c.replayed.limit:  # not >, so that NaN raises, too
            reason = (
                f"{c.replayed.name}: a recomputed stream is off by {error:.2g} of its size (limit "
                f"{c.replayed.limit:g}; worst of this backward pass {max(of_step.values()):.2g})"
            )
            advice = f", so the gradients are wrong. {_remedy(c.replayed)}"
            raise _failure(c.replayed.steps, reason, advice)
    for c, _, lost in measured:
        # a channel must keep half as many digits as the limit demands of the stream
        limit = math.sqrt(c.replayed.limit)
        if c.spread is not None and c.used and not lost <= limit:
            raise _failure(
                c.replayed.steps,
                f"{c.replayed.name}: a channel of recomputed stream {c.stream} is off by "
                f"{lost:.2g} of its spread (limit {limit:.2g})",
                ". It is nearly constant in the forward pass, so recomputed it is mostly rounding "
                "errors. If a normalisation amplifies them, the gradients are wrong. Causes: "
                "pruned filters, dead channels, streams of zeros. Remedy: "
                f"{c.replayed.steps[0].drift_remedy}",
            )
    for step in {c.replayed.steps[0] for c, *_ in measured if c.replayed.inverts}:
        step.close_checks -= 1


def _failure(steps: tuple[Step, ...], reason: str, advice: str) -> DriftError:
    for step in steps:  # the next passes compare each by itself
        step.close_checks = Step.close_checks
    error = DriftError(reason + advice)
    error.step = steps[0] if isinstance(steps[0], Step) else None  # of checkpoint(): no step
    error.reason = reason
    return error


def _remedy(replayed: Replayed) -> str:
    step = replayed.steps[0]
    if not replayed.inverts:
        return (
            "It was computed again from the same inputs, so it is not deterministic, or reads "
            f"values that changed since: {step.remedy}"
        )
    if replayed.limit == 0:
        return (
            "On a grid it must be equal, so the step is not deterministic, or its output was "
            f"changed around autograd (y.data, y.numpy()): {step.remedy}"
        )
    return (
        "Causes: streams in a narrow type (keep float32 weights, and train under "
        "torch.autocast(device, torch.bfloat16)), a branch that amplifies (normalise it; lower "
        "the learning rate if the training diverges) or is not deterministic, a wrong inverse "
        "(see revzoo.check_inverse()) or one that draws random numbers in another order. "
        f"Remedy: {step.drift_remedy}"
    )


def set_drift_limit(module: nn.Module, limit: float | None) -> None:
    """Set the largest allowed relative drift for the steps of ``module``.

    Infinity allows any drift; :func:`drift` still measures it. The error of a single channel,
    relative to its spread, may be the square root of ``limit``. None switches the guard off, as a
    CUDA graph needs: wrong reconstructions go unnoticed, so run a few guarded steps first.

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
