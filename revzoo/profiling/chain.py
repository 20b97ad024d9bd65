"""The steps of a model as a chain, and the fastest memory modes within a number of bytes.

Each mode's training step is counted once (:mod:`revzoo.profiling.count`). A link of the chain, a
step or the operators between two steps, costs in every plan what it costs there.

NOTE [ The peak of a chain ]
    The forward pass walks a row of links, the backward pass walks it back. While link ``i`` runs,
    in either pass, only links before it keep bytes for later. Let ``K(i)`` be the bytes that the
    links up to ``i`` keep. The peak is the maximum over all ``i`` of

        forward    K(i-1) + input streams that no link keeps + temporary bytes of link i
        backward   K(i) + temporary bytes of its backward pass, with its replay

    A stream counts once, even if several links hold it. An inverted step keeps nothing itself: a
    run of inverted steps keeps its last output, which is the state of its last step's replay. A run
    that only moves values, such as a squeeze, keeps nothing, as its gradient reads no values. But
    if a later link holds one of its streams in floating point, the stream's words stay, too.

    Earlier links affect both lines only through ``K``, the streams they hold, and the end of a run
    that is still open. So among partial assignments that agree in these streams and that end, we
    may drop one if another has no larger ``K`` and no larger time. The search drops only these, so
    it is exact. Times are integers, so equal sums compare equal.

Known limit: where modes change, a step costs a little more or less than among steps of one mode.
So the planner counts each plan that it returns once more, as a whole.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, arXiv 1911.13214,
choose by dynamic programming the states to store and to recompute from. Here a link can also be
inverted.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from revzoo.profiling.count import Allocation, Trace

_UNLIMITED = 2**63  # bytes
_NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """A link in one memory mode."""

    mode: str = ""  # of a step; empty for operators outside steps
    inverts: bool = False
    """Whether the step is inverted. Then it keeps something only at the end of a run, and
    ``backward`` includes the state that it inverts."""
    moves: bool = False  # whether it is inverted and only moves values, so that it begins no run
    rounds: bool = False
    """Whether it is inverted, and would round its inputs to a grid if it began a run."""
    words: frozenset[tuple[int, int]] = frozenset()  # if it moves: streams that it makes, bytes
    ends: bool = False  # for operators outside steps: whether the step before is inverted
    joins: bool = False  # whether they join the run of that step, so that its end is not kept
    holds: frozenset[int] = _NOTHING  # the streams that it keeps for the backward pass
    keeps: int = 0  # other bytes that it keeps
    forward: int = 0  # largest number of temporary bytes in the forward pass
    backward: int = 0  # largest number of temporary bytes in the backward pass
    cost: int = 0  # nanoseconds of forward and backward pass


@dataclass(frozen=True, slots=True)
class Link:
    """A step of the chain, or the operators before, between or after steps."""

    name: str | None  # the step's path; None for operators outside steps
    inputs: frozenset[int]  # the streams that enter, as keys of Chain.sizes
    choices: tuple[Choice, ...]  # the first one is in the mode that keeps most

    def after(self, last: Choice | None) -> list[Choice]:
        """The choices that can follow the step before, of which ``last`` is the inverted one."""
        return [c for c in self.choices if c.mode or c.ends == (last is not None)]


class State(NamedTuple):
    """What later links need to know of earlier ones."""

    held: frozenset[int] = _NOTHING  # streams
    last: Choice | None = None  # the last step, if a run of inverted steps ends with it
    words: frozenset[tuple[int, int]] = frozenset()  # of streams, outside of runs


class Outcome(NamedTuple):
    """Peak bytes and nanoseconds of an assignment of modes."""

    peak: int
    cost: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Links in the order of the forward pass."""

    links: tuple[Link, ...]
    sizes: Mapping[int, int]  # bytes of each stream
    base: int = 0  # bytes alive during the whole training step

    def run(self, state: State, link: Link, choice: Choice) -> tuple[int, int, State]:
        """Run a link after the ``state`` of the links before it.

        Returns:
            The bytes that are alive when its forward pass starts, and those that are kept when it
            ends, both besides what was kept before; and the new state.
        """
        held, last, words = state
        kept = 0
        if last is not None and not (choice.inverts or choice.joins):  # the run ends
            kept = last.keeps + self._bytes_of(last.holds - held)
            held |= last.holds
        alive = kept + self._bytes_of(link.inputs - held, words)
        if choice.rounds and last is None:
            alive += self._bytes_of(link.inputs)  # copies
        if choice.inverts and choice.moves and last is None:
            return alive, kept, State(held, None, words | choice.words)
        if choice.inverts:
            return alive, kept, State(held, choice)
        kept += choice.keeps + self._bytes_of(choice.holds - held, words)
        return alive, kept, State(held | choice.holds, None, words)

    def _bytes_of(self, streams: frozenset[int], words: Iterable[tuple[int, int]] = ()) -> int:
        return sum(self.sizes[s] for s in streams) + sum(b for s, b in words if s in streams)

    def levels(self, choices: Iterable[Choice]) -> Iterator[tuple[int, int]]:
        """Bytes alive at the start of each link's forward pass, and of its backward pass.

        Both include the base, and the first include the link's input.
        """
        state, kept = State(), self.base
        for link, choice in zip(self.links, choices, strict=True):
            alive, added, state = self.run(state, link, choice)
            yield kept + alive, kept + added
            kept += added

    def outcome(self, choices: Sequence[Choice]) -> Outcome:
        """Peak and time with one choice per link."""
        peak = max(
            max(before + choice.forward, after + choice.backward)
            for choice, (before, after) in zip(choices, self.levels(choices), strict=True)
        )
        return Outcome(peak, sum(choice.cost for choice in choices))


class _Label(NamedTuple):
    """Choices for the first links."""

    # a linked list: labels share their beginnings, so a new one costs no copy
    kept: int  # bytes
    cost: int
    choice: Choice | None  # the last one
    before: _Label | None

    def choices(self) -> list[Choice]:
        backwards: list[Choice] = []
        label: _Label | None = self
        while label is not None and label.choice is not None:
            backwards.append(label.choice)
            label = label.before
        return backwards[::-1]


def fastest(chain: Chain, budget: int) -> list[Choice] | None:
    """The cheapest choices with a peak of at most ``budget`` bytes; None if there are none."""
    room = budget - chain.base
    # dynamic programming: for each state, the partial assignments that no other one beats
    states: dict[State, list[_Label]] = {State(): [_Label(0, 0, None, None)]}
    for i, link in enumerate(chain.links):
        # streams that no later link mentions cannot tell two assignments apart
        later = _mentioned(chain.links[i + 1 :])
        following: dict[State, list[_Label]] = {}
        for state, labels in states.items():
            for choice in link.after(state.last):
                alive, added, (held, last, words) = chain.run(state, link, choice)
                # both lines of the NOTE, solved for K(i-1)
                most = room - max(alive + choice.forward, added + choice.backward)
                words = frozenset(pair for pair in words if pair[0] in later)
                front = following.setdefault(State(held & later, last, words), [])
                for label in labels:
                    if label.kept > most:
                        break  # labels ascend in the bytes that they keep
                    _insert(
                        front,
                        _Label(label.kept + added, label.cost + choice.cost, choice, label),
                    )
        states = following
    ends = [label for labels in states.values() for label in labels]
    return min(ends, key=lambda label: (label.cost, label.kept)).choices() if ends else None


def leanest(chain: Chain) -> list[Choice]:
    """The fastest among the choices with the lowest peak.

    Bisection over byte counts: choices that fit a budget fit every larger one.
    """
    # with cost 0 the search keeps one label per state, with the fewest bytes
    links = [
        replace(link, choices=tuple(replace(c, cost=0) for c in link.choices))
        for link in chain.links
    ]
    free = replace(chain, links=tuple(links))
    low, high = chain.base, _UNLIMITED
    while low < high:
        middle = (low + high) // 2
        fitting = fastest(free, middle)
        if fitting is None:
            low = middle + 1
        else:
            # its peak may lie far below the budget: bisect below that peak
            high = free.outcome(fitting).peak
    choices = fastest(chain, high)
    assert choices is not None
    return choices


def _mentioned(links: Sequence[Link]) -> frozenset[int]:
    """The streams that enter links or that links hold."""
    held = (choice.holds for link in links for choice in link.choices)
    return _NOTHING.union(*held, *(link.inputs for link in links))


def _insert(front: list[_Label], label: _Label) -> None:
    """Keep only labels that no other dominates: ascending in bytes, descending in cost."""
    # ascending in bytes, so only the one before can be as small and as cheap
    at = bisect.bisect_right(front, label.kept, key=lambda other: other.kept)
    if at and front[at - 1].cost <= label.cost:
        return
    start = at
    while start and front[start - 1].kept == label.kept:  # as many bytes, but dearer
        start -= 1
    while at < len(front) and front[at].cost >= label.cost:  # more bytes, and no cheaper
        at += 1
    front[start:at] = [label]


def chain_of(traces: Sequence[Trace]) -> Chain:
    """The chain of a model, from the traces of its training steps in single modes.

    The first trace is in mode ``store``, the last one in the mode that keeps least.
    """
    first = traces[0]
    places = _places(first)
    # if nothing runs between two steps in mode store, other modes may round there for the next one
    working = {places[k] for k, cost in zip(first.owners, first.costs, strict=True) if cost}
    streams, sizes = _streams(first)
    rows = [_row(trace, working, streams) for trace in traces]
    counts = Counter(link.name for link in rows[0].values())
    links = []
    for place, link in rows[0].items():
        # a plan gives a step one mode, but its calls are separate links: leave no choice
        among = rows[-1:] if link.name is not None and counts[link.name] > 1 else rows
        choices: dict[tuple[str, bool], Choice] = {}
        for row in among:  # of equal ones, the first trace counts
            (choice,) = row[place].choices
            choices.setdefault((choice.mode, choice.ends), choice)
        links.append(replace(link, choices=tuple(choices.values())))
    return Chain(tuple(links), sizes, first.base)


def _places(trace: Trace) -> list[int]:
    """The place of each link of a trace in the chain, in which copies of steps have places, too."""
    places = [0]
    for call in trace.calls:
        at = places[-1]
        places += [at + 1, at + 2 + 2 * len(call.copies)]
    return places


def _streams(trace: Trace) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The numbers of the streams that enter each place of the chain; the bytes of each stream."""
    streams: dict[int, list[int]] = {0: []}
    sizes: dict[int, int] = {}
    # by identity: a stream that passes a step unchanged is the same allocation
    numbers: dict[int, int] = {}

    def number(t: Allocation) -> int:
        if id(t) not in numbers:
            numbers[id(t)] = len(sizes)
            sizes[len(sizes)] = t.size
        return numbers[id(t)]

    for call, place in zip(trace.calls, _places(trace)[1::2], strict=True):
        entering = [number(t) for t in call.inputs]
        for at in range(place, place + 2 + 2 * len(call.copies), 2):
            if at > place:  # a copy takes what the step made, and makes new streams
                entering = streams[at - 1]
                numbers = {k: n for k, n in numbers.items() if k not in map(id, call.outputs)}
                numbers |= zip(map(id, call.inputs), entering, strict=True)
            streams[at] = entering
            streams[at + 1] = [number(t) for t in call.outputs]
    return streams, sizes


def _row(
    trace: Trace, working: Collection[int], streams: Mapping[int, Sequence[int]]
) -> dict[int, Link]:
    """The links of a trace by place, steps and ``working`` places; each with one choice."""
    places = _places(trace)
    shown = [k for k in range(len(places)) if k % 2 or places[k] in working]
    # the streams that enter each link of the trace
    states = [[], *(state for call in trace.calls for state in (call.inputs, call.outputs))]
    found = _choices(trace, states, shown)
    row: dict[int, Link] = {}
    # number in the chain, by identity in the trace; a link may hold what enters a later one
    numbers: dict[int, int] = {}
    for state, place in zip(states[::-1], places[::-1], strict=True):
        numbers |= zip(map(id, state), streams[place], strict=True)
    for k, choice in found.items():
        names = [trace.calls[k // 2].name, *trace.calls[k // 2].copies] if k % 2 else [None]
        for at, name in enumerate(names):
            place = places[k] + 2 * at
            # what enters it, and what it makes for the next link
            for i, state in enumerate(states[k : k + 2]):
                numbers |= zip(map(id, state), streams[place + i], strict=True)
            holds = frozenset(numbers[s] for s in choice.holds)
            words = frozenset((numbers[s], size) for s, size in choice.words)
            placed = replace(choice, holds=holds, words=words)
            row[place] = Link(name, frozenset(streams[place]), (placed,))
    return row


def _choices(
    trace: Trace, states: Sequence[Sequence[Allocation]], shown: Sequence[int]
) -> dict[int, Choice]:
    """What the ``shown`` links cost in a trace; an operator of another one counts in the next.

    Streams have their identities as keys.
    """
    calls = trace.calls
    sizes = {id(t): t.size for state in states for t in state}
    ends = {id(t) for call in calls if call.inverted for t in call.ends}
    holds: defaultdict[int, set[int]] = defaultdict(set)
    keeps: Counter[int] = Counter()

    @functools.cache
    def link(k: int) -> int:
        return k if k in shown else k + 1

    for t in trace.allocations:
        if t.kind != "kept":
            continue
        if id(t) in sizes:
            for k in t.savers:
                holds[link(k)].add(id(t))
        elif id(t) not in ends:
            # the first saver frees it last: the backward pass walks back
            keeps[link(min(t.savers, default=trace.owners[t.born]))] += t.size
    found: dict[int, Choice] = {}
    for k in shown:
        call = calls[k // 2] if k % 2 else None
        if call is not None and call.inverted:
            kept = {id(t): t.size for t in call.ends}
            other = sum(size for i, size in kept.items() if i not in sizes)
            pairs = zip(call.outputs, call.ends, strict=True)
            words = frozenset((id(t), w.size) for t, w in pairs if w is not t)
            streams = frozenset(kept.keys() & sizes.keys())
            # the first of a run has rounded them in the trace
            rounds = call.rounds and k > 1 and calls[k // 2 - 1].inverted
            flags = True, call.moves, rounds
            found[k] = Choice(call.mode, *flags, words, holds=streams, keeps=other)
        elif call is not None:
            found[k] = Choice(call.mode, holds=frozenset(holds[k]), keeps=keeps[k])
        else:
            before = calls[k // 2 - 1].ends if k and calls[k // 2 - 1].inverted else []
            joins = any(t.kind != "kept" for t in before)
            kept_here = frozenset(holds[k])
            found[k] = Choice(ends=bool(before), joins=joins, holds=kept_here, keeps=keeps[k])
    # the chain gives the bytes alive when a link starts; the rest of its peak is temporary
    links = (Link(None, frozenset(map(id, states[k])), ()) for k in shown)
    plain = Chain(tuple(links), sizes, trace.base)
    peaks: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    costs: Counter[int] = Counter()
    for tick, k in enumerate(map(link, trace.owners)):
        peak = peaks[tick >= trace.turn]
        peak[k] = max(peak[k], trace.levels[tick])
        costs[k] += trace.costs[tick]
    return {
        k: replace(
            choice,
            forward=max(0, peaks[0][k] - before),
            backward=max(0, peaks[1][k] - after),
            cost=costs[k],
        )
        for (k, choice), (before, after) in zip(
            found.items(), plain.levels(found.values()), strict=True
        )
    }
