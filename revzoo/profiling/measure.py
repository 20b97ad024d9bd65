"""Memory and time of each step of a model in each memory mode, measured on fake tensors.

The model runs a few training steps in different modes, without computing or allocating anything
(see :mod:`revzoo.profiling.trace`). We count the bytes that a step keeps and its temporary bytes
there, instead of deriving them from the definition of a mode.

NOTE [ Neighbours of a step ]
    The memory and time of a step depend on whether it and the step before it are inverted, and on
    which of its streams have words (:mod:`revzoo.core.fixedpoint.words`). The same holds for the
    operators between two steps. Training steps in one mode show steps among neighbours of the same
    mode. In further training steps, the inverting mode and ``recompute`` take turns:

        invert    every second step is inverted
        exact     every third: a coupling passes one of its streams on, so words outlive one step
                  that is not inverted, but not two

    Each of these training steps shifts the alternation by one step. The chain has no choice for
    neighbours that no training step shows. In ``exact`` this excludes a single invertible step that
    is not inverted between two inverted ones. A step that keeps its activations costs the same
    wherever it could also be recomputed, so one training step in ``store`` is enough.

    Each training step takes a second, so we leave out one:

        invert    the training step in ``recompute``: the alternating ones show it at every step
        exact     the last of them, in a network of more than ``_MANY`` steps: the others show each
                  change of modes in many places, but one step in three cannot be the first or last
                  of an inverted run (``docs/experiments.md``, 2026-11-25)
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from revzoo._checks import check_choice
from revzoo.core.invertible import kind_of, steps_in
from revzoo.core.modes import INVERTING, mode_of
from revzoo.core.set_memory import assign_memory, refuse_own_memory, set_memory
from revzoo.profiling.chain import Chain, Choice, Kind, Link, levels, words_of
from revzoo.profiling.trace import (
    Allocation,
    StepCall,
    Trace,
    modes_on,
    trace_step,
)

log = logging.getLogger(__name__)

_MANY = 24  # steps


def measure(twin: nn.Module, images: Tensor, *, inverting: str) -> list[Trace]:
    """Fake training steps of a model, with each mode that the planner may choose.

    The first one is in mode ``store`` (NOTE [ Neighbours of a step ]).

    Args:
        twin: the model's copy, see :func:`~revzoo.profiling.twins.fake_twin`; we change its modes.
        images: its fake input.
        inverting: the mode for steps with an inverse, ``invert`` or ``exact``.

    Raises:
        ValueError: the model has or calls no step, or nothing in it requires gradient;
            ``inverting`` does not fit.
    """
    steps = [*steps_in(twin).values()]
    if not steps:
        refuse_own_memory(twin, "plan")
        raise ValueError(
            f"{kind_of(twin)} has no step to plan: make its blocks reversible, "
            "revzoo.make_reversible(model) or --bits 4, or build it from ReversibleSequence, "
            "ReversibleBlock or your own Step"
        )
    check_choice("inverting", inverting, INVERTING)
    modes = modes_on(p.device for p in twin.parameters())
    modes = [name for name in modes if not mode_of(name).inverts]
    inverts = any(step.invertible for step in steps)
    exact = mode_of(inverting).grid is not None
    if inverts:
        modes.append(inverting)
        if not exact:
            modes.remove("recompute")
    traces: list[Trace] = []
    for mode in modes:
        log.debug("counting a training step in mode %s", mode)
        assign_memory(steps, mode)
        traces.append(trace_step(twin, images))
    if traces[1].base != traces[0].base:
        # the first forward pass left tensors in the model, such as features: count a later pass
        assign_memory(steps, modes[0])
        traces[0] = trace_step(twin, images)
    counts = Counter(call.name for call in traces[0].calls)
    if not counts:
        raise ValueError(
            f"the forward pass of {type(twin).__name__} calls none of its {len(steps)} steps, so "
            "there is nothing to plan: expected a call such as self.steps(x), not "
            "self.steps.forward(x)"
        )
    # steps that are called several times cannot take turns; chain_of() leaves them no choice
    single = [name for name, count in counts.items() if count == 1]
    period = 3 if exact else 2
    shifts = period - 1 if exact and len(single) > _MANY else period
    for first in range(shifts if inverts else 0):
        log.debug("counting a training step in which modes take turns")
        turns = {name: "recompute" for i, name in enumerate(single) if (i - first) % period}
        set_memory(twin, dict.fromkeys(counts, inverting) | turns)
        traces.append(trace_step(twin, images))
    _check_calls(twin, traces)
    return traces


def _check_calls(twin: nn.Module, traces: Sequence[Trace]) -> None:
    rows = [[call.name for call in trace.calls] for trace in traces]
    for number, names in enumerate(itertools.zip_longest(*rows, fillvalue="missing"), start=1):
        if len({*names}) > 1:
            one, other = [*dict.fromkeys(names)][:2]
            raise ValueError(
                f"the forward pass of {type(twin).__name__} does not call the same steps each time "
                f"(call {number} is {one} in one pass, {other} in another): expected the same "
                "calls in every pass. Set the memory modes by hand, as with "
                "revzoo.set_memory(model, 'recompute')"
            )


def chain_of(traces: Sequence[Trace]) -> Chain:
    """Build the chain from the traces of one model, the first one in mode ``store``."""
    calls = traces[0].calls
    streams = _Streams(calls)
    pieces = [_Pieces(trace, streams).choices for trace in traces]
    counts = Counter(call.name for call in calls)
    links = []
    for i, measured in enumerate(zip(*pieces, strict=True)):
        name = calls[i // 2].name if i % 2 else None
        # A plan gives a step one mode, but its calls are separate links: leave no choice. The last
        # trace has such steps in the mode that keeps least.
        if name is not None and counts[name] > 1:
            measured = tuple(c for c in measured if c.mode == measured[-1].mode)
        links.append(Link(name, streams.inputs[i], tuple(_distinct(measured))))
    return Chain(tuple(links), streams.sizes, traces[0].base)


def _distinct(measured: Sequence[Choice]) -> Iterable[Choice]:
    """The choices of a link, each once: the first trace counts."""
    choices: dict[tuple[str, Kind, Kind], Choice] = {}
    # a step that is not inverted costs the same wherever another such mode was measured
    # (NOTE [ Neighbours of a step ])
    plain = [c for c in measured if not c.kind[0]]
    more = [
        replace(c, follows=other.follows, kind=other.kind)
        for c, other in itertools.product(plain, plain)
    ]
    for c in (*measured, *more):
        choices.setdefault((c.mode, c.follows, c.kind), c)
    return choices.values()


def _with_words(call: StepCall, streams: Iterable[Allocation]) -> Iterator[bool]:
    """Whether each of a call's streams has words."""
    return (id(t) in call.words for t in streams)


class _Streams:
    """Numbers the streams between steps; a stream that passes through a step keeps its number.

    Attributes:
        inputs: the streams that enter each link.
        sizes: see :class:`~revzoo.profiling.chain.Chain`.
    """

    def __init__(self, calls: Sequence[StepCall]) -> None:
        numbers: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

        def number(allocation: Allocation) -> int:
            key = numbers.setdefault(id(allocation), len(numbers))
            self.sizes[key] = allocation.size
            return key

        self.inputs: list[tuple[int, ...]] = [()]
        for call in calls:
            self.inputs += [tuple(map(number, call.inputs)), tuple(map(number, call.outputs))]

    def number_words(self, stream: int, words: Allocation) -> int:
        """The number of a stream's words; adds their size to ``sizes``."""
        key = words_of(stream)
        self.sizes[key] = words.size
        return key


class _Pieces:
    """A trace, cut into its links (NOTE [ Links of a trace ] in :mod:`revzoo.profiling.trace`).

    Link ``i`` runs the operators from ``starts[i]`` to ``starts[i + 1]`` in the forward pass.
    """

    def __init__(self, trace: Trace, streams: _Streams) -> None:
        self.trace, self.calls = trace, trace.calls
        # by identity: a stream that passes a step unchanged is the same allocation
        self.numbers: dict[int, int] = {}
        for i, call in enumerate(self.calls):
            before, after = streams.inputs[2 * i + 1 : 2 * i + 3]
            self.numbers.update(zip(map(id, call.inputs), before, strict=True))
            self.numbers.update(zip(map(id, call.outputs), after, strict=True))
        for call in self.calls:
            for stream, allocation in call.words.items():
                words = streams.number_words(self.numbers[stream], allocation)
                self.numbers[id(allocation)] = words
        ends = itertools.chain.from_iterable((call.start, call.end) for call in self.calls)
        self.starts = [0, *ends, trace.turn]
        plain = self._without_peaks()
        # the chain gives the bytes alive when a link starts; the rest of its peak is temporary
        links = tuple(Link(None, entering, ()) for entering in streams.inputs)
        alive = levels(Chain(links, streams.sizes, trace.base), plain)
        peaks = self._peaks_and_costs()
        self.choices = [
            replace(choice, forward=max(0, top - before), backward=max(0, back - after), cost=cost)
            for choice, (before, after), (top, back, cost) in zip(plain, alive, peaks, strict=True)
        ]

    def _without_peaks(self) -> list[Choice]:
        """The bytes that each link keeps, and the choice that it follows."""
        saved, keeps = self._saved()
        choices: list[Choice] = []
        kind: Kind = ()
        for i, (holds, kept) in enumerate(zip(saved, keeps, strict=True)):
            at, follows = i // 2, kind
            if i % 2:
                call = self.calls[at]
                kind = (call.inverted, *_with_words(call, call.outputs))
                choice = Choice(call.mode, kind, follows, frozenset(holds), keeps=kept)
            else:
                if at < len(self.calls):
                    call = self.calls[at]
                    kind = (*kind, call.inverted, *_with_words(call, call.inputs))
                holds |= self._left_of_run(at)
                renewed = self._renewed(at)
                choice = Choice("", kind, follows, frozenset(holds), renews=renewed, keeps=kept)
            choices.append(choice)
        return choices

    def _saved(self) -> tuple[list[set[int]], list[int]]:
        """The streams that autograd saves in each link, and the other bytes that the link keeps."""
        holds: list[set[int]] = [set() for _ in self.starts[1:]]
        keeps = [0] * len(holds)
        # a stream's storage holds its words
        words = {
            id(call.words[id(t)]): t.savers
            for call in self.calls
            for t in (*call.inputs, *call.outputs)
            if id(t) in call.words
        }
        for allocation in self.trace.allocations:
            if allocation.kind != "kept":
                continue
            number = self.numbers.get(id(allocation))
            if number is None:
                # the first saver frees it last: the backward pass walks back
                keeps[min(allocation.savers, default=self._at(allocation.born))] += allocation.size
            else:
                for i in allocation.savers | words.get(id(allocation), set()):
                    holds[i].add(number)
        return holds, keeps

    def _left_of_run(self, at: int) -> set[int]:
        """The part of its last output that an inverted run keeps, if it ends before step ``at``."""
        if not at or not self.calls[at - 1].inverted:
            return set()
        last = self.calls[at - 1]
        state = [last.words.get(id(t), t) for t in last.outputs]
        following = self.calls[at] if at < len(self.calls) else None
        # the run continues if the next step is inverted, too, and takes these very tensors
        continues = (
            following is not None
            and following.inverted
            and [*map(id, following.inputs)] == [*map(id, last.outputs)]
        )
        return set() if continues else {self.numbers[id(t)] for t in state if t.kind == "kept"}

    def _renewed(self, at: int) -> frozenset[int]:
        """The streams that are copied between step ``at`` and the one before, and their words."""
        if not 0 < at < len(self.calls):
            return frozenset()
        left = {self.numbers[id(t)]: t for t in self.calls[at - 1].outputs}
        entering = {self.numbers[id(t)]: t for t in self.calls[at].inputs}
        copied = [s for s, t in entering.items() if left.get(s, t) is not t]
        return frozenset([*copied, *map(words_of, copied)])

    def _at(self, tick: int) -> int:
        """The last link whose forward pass began before an operator."""
        return min(bisect.bisect_right(self.starts, tick), len(self.starts) - 1) - 1

    def _peaks_and_costs(self) -> Iterator[tuple[int, int, int]]:
        """Each link's peaks of live bytes, forward and backward, and its nanoseconds."""
        trace = self.trace
        backward: list[list[int]] = [[] for _ in self.starts[1:]]
        for tick in range(trace.turn, trace.tick):
            backward[trace.owners[tick]].append(tick)
        for (start, end), ticks in zip(itertools.pairwise(self.starts), backward, strict=True):
            yield (
                max(trace.levels[start:end], default=0),
                max((trace.levels[tick] for tick in ticks), default=0),
                sum(trace.costs[start:end]) + sum(trace.costs[tick] for tick in ticks),
            )
