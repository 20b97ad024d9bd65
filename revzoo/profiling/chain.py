"""Chooses a memory mode for each step, so that a chain runs fastest within a number of bytes.

An exact search on plain data, without torch. :mod:`revzoo.profiling.measure` measures the costs of
each step in each memory mode.

NOTE [ The peak of a chain ]
    The forward pass walks a row of links, the backward pass walks it back. While link ``i`` runs,
    in either pass, only links before it keep bytes for later. Let ``K(i)`` be the bytes that the
    links up to ``i`` keep. The peak is the maximum over all ``i`` of

        forward    K(i-1) + input streams that no link keeps + temporary bytes of link i
        backward   K(i) + temporary bytes of link i's backward pass, with its replay

    A stream counts once, even if several links hold it. A run of links that *join* (inverting
    modes) holds only the ``state`` of its last link. The backward pass carries that state along,
    so during the walk the run keeps only the ``keeps`` of its links.

    Earlier links affect both lines only through ``K``, the streams they hold, and whether a run is
    open. So among partial assignments that agree in the streams and the open run, we may drop one
    if another has no larger ``K`` and no larger time. The search drops only these, so it is exact.
    Times are integers, so equal sums compare equal.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, arXiv 1911.13214,
choose by dynamic programming the states to store and to recompute from. Here a link can also be
inverted.
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
        mode: the memory mode.
        joins: whether it needs no state of its own if the next link joins, too.
        holds: the streams that it keeps for the backward pass, without an open run's state.
        keeps: other bytes that it keeps.
        closes: other bytes of the state after it, kept if its run ends there.
        state: the streams that are kept if its run ends there.
        forward: largest number of temporary bytes in the forward pass.
        backward: largest number of temporary bytes in the backward pass.
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
    """A step of the chain, or the operators between or after steps.

    Attributes:
        name: the step's path; empty for operators outside steps.
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
        base: bytes alive during the whole training step.
    """

    links: tuple[Link, ...]
    sizes: Mapping[int, int]
    base: int = 0

    def bytes_of(self, streams: Iterable[int]) -> int:
        """Size of a set of streams."""
        return sum(self.sizes[s] for s in streams)


class Outcome(NamedTuple):
    """Peak bytes and nanoseconds of an assignment of modes."""

    peak: int
    cost: int


def levels(chain: Chain, choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Bytes alive at the start of each link's forward pass, and of its backward pass.

    They include the base and, in the forward pass, the link's input.
    """
    held: set[int] = set()
    kept = chain.base
    for i, (link, choice) in enumerate(zip(chain.links, choices, strict=True)):
        if i and choices[i - 1].joins and not choice.joins:  # the run before ends
            held.update(choices[i - 1].state)
            kept += choices[i - 1].closes
        # a union, as a stream that is held and enters counts once
        before = kept + chain.bytes_of(held.union(link.inputs))
        held |= choice.holds
        kept += choice.keeps
        yield before, kept + chain.bytes_of(held)


def evaluate(chain: Chain, choices: Sequence[Choice]) -> Outcome:
    """Peak and time of a chain with one choice per link."""
    peak = max(
        max(before + choice.forward, after + choice.backward)
        for choice, (before, after) in zip(choices, levels(chain, choices), strict=True)
    )
    return Outcome(peak, sum(choice.cost for choice in choices))


class _Label(NamedTuple):
    """Choices for the first links: bytes kept, cost, the last choice, and the label before."""

    # a linked list: labels share their beginnings, so a new one costs no copy
    kept: int
    cost: int
    choice: Choice | None
    before: _Label | None

    def choices(self) -> list[Choice]:
        backwards: list[Choice] = []
        label: _Label | None = self
        while label is not None and label.choice is not None:
            backwards.append(label.choice)
            label = label.before
        return backwards[::-1]


_State = tuple[Choice | None, frozenset[int]]  # the last choice, if its run is open; streams held


def fastest(chain: Chain, budget: int) -> list[Choice] | None:
    """The cheapest choices with a peak of at most ``budget`` bytes; None if there are none."""
    room = budget - chain.base
    # dynamic programming: per state, the partial assignments that no other one beats
    states: dict[_State, list[_Label]] = {(None, frozenset()): [_Label(0, 0, None, None)]}
    for i, link in enumerate(chain.links):
        later = _mentioned(chain.links[i + 1 :])
        following: dict[_State, list[_Label]] = {}
        for (open_run, held), labels in states.items():
            for choice in link.choices:
                now = held
                added = 0
                if open_run is not None and not choice.joins:  # the run ends and keeps its state
                    added = open_run.closes + chain.bytes_of(open_run.state - held)
                    now = held | open_run.state
                entering = added + chain.bytes_of(frozenset(link.inputs) - now) + choice.forward
                added += choice.keeps + chain.bytes_of(choice.holds - now)
                # both lines of the NOTE, solved for K(i-1)
                most = room - max(entering, added + choice.backward)
                # streams that no later link mentions cannot tell two assignments apart
                state = choice if choice.joins else None, (now | choice.holds) & later
                front = following.setdefault(state, [])
                for label in labels:
                    if label.kept > most:
                        break  # labels ascend in what they keep
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
    free = Chain(_without_cost(chain.links), chain.sizes, chain.base)
    first = [link.choices[0] for link in chain.links]
    low, high = chain.base, evaluate(free, first).peak
    while low < high:
        middle = (low + high) // 2
        fitting = fastest(free, middle)
        if fitting is None:
            low = middle + 1
        else:
            # its peak may lie far below the budget: bisect below that peak
            high = evaluate(free, fitting).peak
    choices = fastest(chain, high)
    assert choices is not None
    return choices


def _without_cost(links: Sequence[Link]) -> tuple[Link, ...]:
    """The links with cost 0: the search then keeps one label per state, with the fewest bytes."""
    return tuple(
        replace(link, choices=tuple(replace(c, cost=0) for c in link.choices)) for link in links
    )


def _mentioned(links: Sequence[Link]) -> frozenset[int]:
    """The streams that links enter, leave or hold."""
    streams: set[int] = set()
    for link in links:
        streams.update(link.inputs, link.outputs, *(c.holds | c.state for c in link.choices))
    return frozenset(streams)


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
