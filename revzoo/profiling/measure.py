"""Memory and time of each step of a model in each memory mode, measured on fake tensors.

The model runs one training step in every mode, without computing or allocating anything (see
:mod:`revzoo.profiling.trace`). We count the bytes that a step keeps and its temporary bytes there,
instead of deriving them from the definition of a mode.
"""

from __future__ import annotations

import bisect
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from revzoo._checks import check_choice
from revzoo.core.invertible import Step, kind_of, leaves
from revzoo.core.modes import INVERTING, assign_memory, mode_of
from revzoo.profiling.chain import Chain, Choice, Link, levels
from revzoo.profiling.trace import (
    Allocation,
    StepCall,
    Trace,
    modes_on,
    trace_step,
)
from revzoo.profiling.twins import fake_twin, images_for

log = logging.getLogger(__name__)


def measure(
    model: nn.Module,
    shape: Sequence[int],
    *,
    inverting: str,
    recompute: bool = True,
    device: torch.device | None = None,
) -> dict[str, Trace]:
    """One fake training step of ``model`` in each mode that the planner may choose.

    Args:
        model: real, or on the meta device.
        shape: of its input, the batch first.
        inverting: the mode for steps with an inverse, ``invert`` or ``exact``.
        recompute: whether steps with an inverse may also be recomputed, which seldom helps.
        device: the device of the training; None for the model's.

    Raises:
        ValueError: the model has or calls no step, or nothing in it requires gradient;
            ``inverting`` does not fit.
    """
    steps = leaves(model).values()
    if not steps:
        raise ValueError(
            f"{kind_of(model)} has no step to plan: make its blocks reversible, "
            "revzoo.make_reversible(model) or --bits 4, or build it from ReversibleSequence, "
            "ReversibleBlock or your own Step"
        )
    check_choice("inverting", inverting, INVERTING)
    devices = [device] if device is not None else [p.device for p in model.parameters()]
    modes = [name for name in modes_on(devices) if not mode_of(name).inverts]
    if any(step.invertible for step in steps):
        modes = [*(m for m in modes if recompute or m != "recompute"), inverting]
    traces = {mode: trace_in_mode(model, shape, mode, device=device) for mode in modes}
    if not traces[modes[0]].calls:
        raise ValueError(
            f"the forward pass of {type(model).__name__} calls none of its {len(steps)} steps, so "
            "there is nothing to plan: expected a call such as self.steps(x), not "
            "self.steps.forward(x)"
        )
    return traces


def trace_in_mode(
    model: nn.Module, shape: Sequence[int], mode: str, *, device: torch.device | None = None
) -> Trace:
    """One fake training step with every step in ``mode``."""
    log.debug("counting a training step in mode %s", mode)
    twin = fake_twin(model, device)
    assign_memory([m for m in twin.modules() if isinstance(m, Step)], mode)
    return trace_step(twin, images_for(twin, shape))


def chain_of(traces: Mapping[str, Trace]) -> Chain:
    """Build the chain from the traces of one model, one trace per mode."""
    first = next(iter(traces.values()))
    streams = _Streams(first.calls)
    pieces = {mode: _Pieces(trace, streams) for mode, trace in traces.items()}
    names = Counter(call.name for call in first.calls)
    links = []
    for i, call in enumerate(first.calls):
        # a step may run in one mode in two traces (a stem in "recompute" and in "invert"): reversed
        # twice, so that the first trace counts
        by_mode = {piece.choices[i].mode: piece.choices[i] for piece in reversed(pieces.values())}
        choices = tuple(reversed(by_mode.values()))
        # A plan gives a step one mode, but its calls are separate links: leave no choice. The
        # last mode keeps least.
        if names[call.name] > 1:
            choices = choices[-1:]
        links.append(Link(call.name, streams.inputs[i], streams.outputs[i], choices))
    last = streams.outputs[-1]
    links.append(Link("", last, (), (pieces["store"].choices[-1],)))  # the head
    return Chain(tuple(links), streams.sizes, first.base)


def _mode_of(call: StepCall) -> str:
    """The mode in which a step ran: an inverting mode recomputes steps without an inverse."""
    return "recompute" if mode_of(call.mode).inverts and not call.joins else call.mode


class _Streams:
    """Numbers the streams between steps; a stream that passes through a step keeps its number."""

    def __init__(self, calls: Sequence[StepCall]) -> None:
        numbers: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

        def number(allocation: Allocation) -> int:
            key = numbers.setdefault(id(allocation), len(numbers))
            self.sizes[key] = allocation.size
            return key

        self.inputs = [tuple(map(number, call.inputs)) for call in calls]
        self.outputs = [tuple(map(number, call.outputs)) for call in calls]

    def words_of(self, stream: int, size: int) -> int:
        """The number of a stream's words, whose ``size`` is recorded."""
        words = -stream - 1  # negative, so no stream has it; equal in all traces
        self.sizes[words] = size
        return words


class _Pieces:
    """A trace, cut into links: a link for every step, and a last one for the head.

    Link ``i`` runs the operators from ``starts[i]`` to ``starts[i + 1]`` in the forward pass.
    Operators between two steps belong to the step before.
    """

    def __init__(self, trace: Trace, streams: _Streams) -> None:
        self.trace, calls = trace, trace.calls
        # by identity: a stream that passes a step unchanged is the same allocation
        self.numbers = {
            id(allocation): number
            for i, call in enumerate(calls)
            for allocation, number in (
                *zip(call.inputs, streams.inputs[i], strict=True),
                *zip(call.outputs, streams.outputs[i], strict=True),
            )
        }
        self.words: dict[int, int] = {}  # stream's number -> number of its words
        for call in calls:
            for stream, allocation in call.words.items():
                number = self.numbers[stream]
                self.words[number] = self.numbers[id(allocation)] = streams.words_of(
                    number, allocation.size
                )
        self.starts = [0, *(call.start for call in calls[1:]), calls[-1].end, trace.turn]
        holds, keeps = self._kept()
        plain = [
            Choice(
                _mode_of(call),
                joins=call.joins,
                holds=frozenset(holds[i]),
                keeps=keeps[i],
                closes=self._closing(i) if call.joins else 0,
                state=self._kept_of(streams.outputs[i]),
            )
            for i, call in enumerate(calls)
        ]
        plain.append(Choice("store", holds=frozenset(holds[-1]), keeps=keeps[-1]))
        ends = zip((*streams.inputs, streams.outputs[-1]), (*streams.outputs, ()), strict=True)
        links = [
            Link("", before, after, (choice,))
            for (before, after), choice in zip(ends, plain, strict=True)
        ]
        # the chain tells what is alive when a link starts; the rest of the link's peak is temporary
        alive = levels(Chain(tuple(links), streams.sizes, trace.base), plain)
        peaks = self._peaks_and_costs()
        self.choices = [
            replace(choice, forward=max(0, top - before), backward=max(0, back - after), cost=cost)
            for choice, (before, after), (top, back, cost) in zip(plain, alive, peaks, strict=True)
        ]

    def _kept(self) -> tuple[list[set[int]], list[int]]:
        """The streams that each link holds, and the other bytes that it keeps."""
        calls = self.trace.calls
        holds: list[set[int]] = [set() for _ in range(len(calls) + 1)]
        keeps = [0] * len(holds)
        kept = [allocation for allocation in self.trace.allocations if allocation.kind == "kept"]
        for allocation in kept:
            number = self.numbers.get(id(allocation))
            savers = {i % len(holds) for i in allocation.savers}  # -1 is the head
            if number is None:
                # the first saver frees it last: the backward pass walks back
                keeps[min(savers, default=self._at(allocation.born))] += allocation.size
            else:
                for i in savers:
                    holds[i].add(number)
        saving = {i for allocation in kept for i in allocation.savers}
        alive = {
            self.numbers[id(allocation)] for allocation in kept if id(allocation) in self.numbers
        }
        for i, call in enumerate(calls):
            # no saved tensor and no run of inverses: a tape keeps the inputs, to recompute from
            if i not in saving and not call.joins:
                inputs = self._kept_of(self.numbers[id(t)] for t in call.inputs)
                holds[i].update(alive.intersection(inputs))
        return holds, keeps

    def _kept_of(self, streams: Iterable[int]) -> frozenset[int]:
        """The tensors that a tape keeps for the streams: their words, if they have words."""
        return frozenset(self.words.get(stream, stream) for stream in streams)

    def _at(self, tick: int) -> int:
        """The last link whose forward pass began before an operator."""
        return min(bisect.bisect_right(self.starts, tick), len(self.starts) - 1) - 1

    def _closing(self, i: int) -> int:
        """Bytes other than streams that a step leaves and the next one frees."""
        start, end = self.starts[i], self.trace.calls[i].end
        return sum(
            allocation.size
            for allocation in self.trace.allocations
            if allocation.kind == "temporary"
            and start <= allocation.born < end
            and allocation.alive(self.starts[i + 1])
            and id(allocation) not in self.numbers
        )

    def _peaks_and_costs(self) -> Iterator[tuple[int, int, int]]:
        """The most bytes alive in each link's forward and backward pass, and its nanoseconds."""
        trace = self.trace
        backward: list[list[int]] = [[] for _ in self.starts[1:]]
        for tick in range(trace.turn, trace.tick):
            backward[trace.owners[tick]].append(tick)  # -1, outside of steps, is the head
        for (start, end), ticks in zip(itertools.pairwise(self.starts), backward, strict=True):
            yield (
                max(trace.levels[start:end], default=0),
                max((trace.levels[tick] for tick in ticks), default=0),
                sum(trace.costs[start:end]) + sum(trace.costs[tick] for tick in ticks),
            )
