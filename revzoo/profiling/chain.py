"""Which step keeps what, so that a chain of steps runs fastest within a number of bytes.

Plain data and an exact search; nothing here knows torch. The costs of each step in each memory mode
are measured in :mod:`revzoo.profiling.measure`.

NOTE [ The peak of a chain ]
    Forward and backward pass walk the same row of links, there and back. So whatever link ``i``
    does, in either direction, only the links before it keep anything for later. With
    ``K(i)`` = the bytes that links up to ``i`` keep, the peak is the largest of, for every ``i``,

        forward    K(i-1) + input streams that nobody keeps + what the link takes while it runs
        backward   K(i) + what the link takes while it is differentiated, replay included

    Streams are kept once however many links hold them. A run of links that *join* (inverting
    modes) holds the ``state`` of its last link; on the way back it carries its state along,
    so that the run keeps no more than its links' own ``keeps`` while it is walked.

    Both lines grow with ``K`` and with nothing else that earlier links decide, apart from which
    streams are held and whether a run is open. So of two ways to the same point that agree in
    these, one with no less ``K`` and no less time is of no use: the search keeps the others, and
    is exact. Times are whole numbers, so that equal sums are equal.

Sources: rematerialisation on a chain as a dynamic program: Beaumont et al., "Optimal checkpointing
for heterogeneous chains", 2019, arXiv 1911.13214. Theirs chooses what to store and where to
recompute from; here a link can also be inverted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Choice:
    """A link in one memory mode.

    Attributes:
        mode: its name.
        joins: whether it keeps no state itself while the next link joins, too.
        holds: the streams that it keeps from forward to backward; not those of an open run.
        keeps: further bytes that it keeps.
        closes: further bytes of the state after it, kept where its run ends.
        state: the streams that are kept where its run ends.
        forward: bytes above what is kept and the input, at most, while it runs.
        backward: bytes above what is kept, at most, while it is differentiated.
        cost: nanoseconds of forward and backward pass.
    """

    mode: str
    joins: bool = False
    holds: frozenset[int] = frozenset()
    keeps: int = 0
    closes: int = 0
    forward: int = 0
    backward: int = 0
    cost: int = 0
    state: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Link:
    """A step of the chain, or whatever runs between and after steps.

    Attributes:
        name: the step's path; empty for what is no step.
        inputs: the streams that enter, as keys of :attr:`Chain.sizes`.
        outputs: the streams that leave.
        choices: at least one.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Links in the order of the forward pass.

    Attributes:
        links: see :class:`Link`.
        sizes: bytes of each stream.
        base: bytes that are there all along.
    """

    links: tuple[Link, ...]
    sizes: Mapping[int, int]
    base: int = 0

    def bytes_of(self, streams: Iterable[int]) -> int:
        """Size of a set of streams."""
        return sum(self.sizes[s] for s in streams)


class Outcome(NamedTuple):
    """What an assignment of modes takes: peak bytes, and nanoseconds."""

    peak: int
    cost: int


def levels(chain: Chain, choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Bytes that stand at each link: as its forward pass begins, and as its backward pass begins.

    That is what is kept, the base included; on the way forward also the link's input.
    """
    held: set[int] = set()
    kept = chain.base
    for i, (link, choice) in enumerate(zip(chain.links, choices, strict=True)):
        if i and choices[i - 1].joins and not choice.joins:  # the run before ends
            held.update(choices[i - 1].state)
            kept += choices[i - 1].closes
        before = kept + chain.bytes_of(held.union(link.inputs))
        held |= choice.holds
        kept += choice.keeps
        yield before, kept + chain.bytes_of(held)


def evaluate(chain: Chain, choices: Sequence[Choice]) -> Outcome:
    """Peak and time of a chain whose links work as chosen, one choice a link."""
    peak = max(
        max(before + choice.forward, after + choice.backward)
        for choice, (before, after) in zip(choices, levels(chain, choices), strict=True)
    )
    return Outcome(peak, sum(choice.cost for choice in choices))


class _Label(NamedTuple):
    """A way through the first links: what it keeps, its cost, and how it came about."""

    kept: int
    cost: int
    choice: Choice | None
    before: _Label | None

    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        label: _Label | None = self
        while label is not None and label.choice is not None:
            found.append(label.choice)
            label = label.before
        return found[::-1]


_State = tuple[Choice | None, frozenset[int]]  # the last choice, if its run is open; streams held


def fastest(chain: Chain, budget: int) -> list[Choice] | None:
    """The choices of least cost whose peak is at most ``budget`` bytes; None if there are none."""
    room = budget - chain.base
    states: dict[_State, list[_Label]] = {(None, frozenset()): [_Label(0, 0, None, None)]}
    for i, link in enumerate(chain.links):
        later = _mentioned(chain.links[i + 1 :])
        following: dict[_State, list[_Label]] = {}
        for (open_run, held), labels in states.items():
            for choice in link.choices:
                closing = open_run is not None and not choice.joins
                now = held
                added = 0
                if closing and open_run is not None:
                    added = open_run.closes + chain.bytes_of(open_run.state - held)
                    now = held | open_run.state
                entering = added + chain.bytes_of(frozenset(link.inputs) - now) + choice.forward
                added += choice.keeps + chain.bytes_of(choice.holds - now)
                most = room - max(entering, added + choice.backward)
                state = choice if choice.joins else None, (now | choice.holds) & later
                front = following.setdefault(state, [])
                for label in labels:
                    if label.kept > most:
                        break  # they ascend
                    _insert(
                        front,
                        _Label(label.kept + added, label.cost + choice.cost, choice, label),
                    )
        states = following
    ends = [label for labels in states.values() for label in labels]
    return min(ends, key=lambda label: (label.cost, label.kept)).choices() if ends else None


def leanest(chain: Chain) -> list[Choice]:
    """The choices with the lowest peak, and of these the fastest.

    Bisection over byte counts: choices that fit a budget fit every larger one.
    """
    free = Chain(_without_cost(chain.links), chain.sizes, chain.base)
    first = [link.choices[0] for link in chain.links]
    low, high = chain.base, evaluate(free, first).peak
    while low < high:
        middle = (low + high) // 2
        found = fastest(free, middle)
        if found is None:
            low = middle + 1
        else:
            high = evaluate(free, found).peak
    choices = fastest(chain, high)
    assert choices is not None
    return choices


def _without_cost(links: Sequence[Link]) -> tuple[Link, ...]:
    """The links at no cost: then one label a state is enough, the one that keeps least."""
    return tuple(
        Link(
            link.name,
            link.inputs,
            link.outputs,
            tuple(replace(c, cost=0) for c in link.choices),
        )
        for link in links
    )


def _mentioned(links: Sequence[Link]) -> frozenset[int]:
    """The streams that links enter, leave or hold."""
    found: set[int] = set()
    for link in links:
        found.update(link.inputs, link.outputs, *(c.holds | c.state for c in link.choices))
    return frozenset(found)


def _insert(front: list[_Label], label: _Label) -> None:
    """Keep the labels that no other beats: ascending in what they keep, descending in cost."""
    at = bisect.bisect_right(front, label.kept, key=lambda other: other.kept)
    if at and front[at - 1].cost <= label.cost:
        return
    start = at
    while start and front[start - 1].kept == label.kept:
        start -= 1
    while at < len(front) and front[at].cost >= label.cost:
        at += 1
    front[start:at] = [label]
