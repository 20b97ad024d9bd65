"""Chooses a memory mode for each step, so that a chain runs fastest within a number of bytes.

An exact search on plain data, without torch. :mod:`revzoo.profiling.measure` measures the costs of
each step in each memory mode.

NOTE [ The peak of a chain ]
    The forward pass walks a row of links, the backward pass walks it back. While link ``i`` runs,
    in either pass, only links before it keep bytes for later. Let ``K(i)`` be the bytes that the
    links up to ``i`` keep. The peak is the maximum over all ``i`` of

        forward    K(i-1) + input streams that no link keeps + temporary bytes of link i
        backward   K(i) + temporary bytes of its backward pass, with its replay

    A stream counts once, even if several links hold it. An inverted step keeps nothing itself: a
    run of inverted steps keeps its last output, which the operators after the run hold.

    Earlier links affect both lines only through ``K``, the streams they hold, and the ``kind`` of
    the last choice, which decides which choices can follow. So among partial assignments that agree
    in the streams and the kind, we may drop one if another has no larger ``K`` and no larger time.
    The search drops only these, so it is exact. Times are integers, so equal sums compare equal.

NOTE [ Choices depend on their neighbours ]
    The bytes and the time of a step depend on the step before it. The first inverted step of a run
    starts a tape. In ``exact`` it rounds copies of its streams. A merge after a step runs in that
    step's mode. So a step has several choices in one mode, and between two steps there is a link
    whose choices have no mode: each fits certain neighbours.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", 2019, arXiv 1911.13214,
choose by dynamic programming the states to store and to recompute from. Here a link can also be
inverted.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

Kind = tuple[bool, ...]
_UNLIMITED = 2**63  # bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """A link in one memory mode, after certain choices of the link before.

    Attributes:
        mode: the memory mode of a step; empty for operators outside steps.
        kind: decides which choices of the next link can follow: which steps beside the link are
            inverted, and which streams have words.
        follows: the ``kind`` of the choice before it; ``()`` for the first link.
        holds: the streams that it keeps for the backward pass, and words (:func:`words_of`).
        renews: the streams that leave it as new tensors; old ones that are held count as well.
        keeps: other bytes that it keeps.
        forward: largest number of temporary bytes in the forward pass.
        backward: largest number of temporary bytes in the backward pass.
        cost: nanoseconds of forward and backward pass.
    """

    mode: str
    kind: Kind = ()
    follows: Kind = ()
    holds: frozenset[int] = frozenset()
    renews: frozenset[int] = frozenset()
    keeps: int = 0
    forward: int = 0
    backward: int = 0
    cost: int = 0

    def held_after(self, held: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """The streams that are held after the link, and the new ones among them."""
        old = held - self.renews
        now = old | self.holds
        return now, now - old


def words_of(stream: int) -> int:
    """The key of a fixed-point stream's words, which are a separate tensor."""
    return -stream - 1  # negative, so no stream has it


@dataclass(frozen=True, slots=True)
class Link:
    """A step of the chain, or the operators before, between or after steps.

    Attributes:
        name: the step's path; None for operators outside steps.
        inputs: the streams that enter, as keys of :attr:`Chain.sizes`.
        choices: none if nothing fits.
    """

    name: str | None
    inputs: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Links in the order of the forward pass.

    Attributes:
        links: see :class:`Link`.
        sizes: bytes of each stream, and of its words.
        base: bytes alive during the whole training step.
    """

    links: tuple[Link, ...]
    sizes: Mapping[int, int]
    base: int = 0

    @property
    def steps(self) -> list[Link]:
        """The links that are steps."""
        return [link for link in self.links if link.name is not None]

    def bytes_of(self, streams: Iterable[int]) -> int:
        """Size of a set of streams."""
        return sum(self.sizes[s] for s in streams)


class Outcome(NamedTuple):
    """Peak bytes and nanoseconds of an assignment of modes."""

    peak: int
    cost: int


def levels(chain: Chain, choices: Sequence[Choice]) -> Iterator[tuple[int, int]]:
    """Bytes alive at the start of each link's forward pass, and of its backward pass.

    Both include the base, and the first include the link's input.
    """
    held: frozenset[int] = frozenset()
    kept = chain.base
    for link, choice in zip(chain.links, choices, strict=True):
        # a stream that is held and enters counts once
        before = kept + chain.bytes_of(frozenset(link.inputs) - held)
        held, new = choice.held_after(held)
        kept += choice.keeps + chain.bytes_of(new)
        yield before, kept


def outcome_of(chain: Chain, choices: Sequence[Choice]) -> Outcome:
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


_State = tuple[Kind, frozenset[int]]  # kind of the last choice; streams held


def fastest(chain: Chain, budget: int) -> list[Choice] | None:
    """The cheapest choices with a peak of at most ``budget`` bytes; None if there are none."""
    room = budget - chain.base
    # dynamic programming: for each state, the partial assignments that no other one beats
    states: dict[_State, list[_Label]] = {((), frozenset()): [_Label(0, 0, None, None)]}
    for i, link in enumerate(chain.links):
        later = _mentioned(chain.links[i + 1 :])
        following: dict[_State, list[_Label]] = {}
        for (kind, held), labels in states.items():
            entering = chain.bytes_of(frozenset(link.inputs) - held)
            for choice in link.choices:
                if kind != choice.follows:
                    continue
                now, new = choice.held_after(held)
                added = choice.keeps + chain.bytes_of(new)
                # both lines of the NOTE, solved for K(i-1)
                most = room - max(entering + choice.forward, added + choice.backward)
                # streams that no later link mentions cannot tell two assignments apart
                front = following.setdefault((choice.kind, now & later), [])
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


def in_modes(chain: Chain, modes: Sequence[str]) -> list[Choice] | None:
    """The fastest choices whose steps have these modes, in order; None if there are none."""
    named = iter(modes)
    links = []
    for link in chain.links:
        if link.name is not None:
            mode = next(named)
            link = replace(link, choices=tuple(c for c in link.choices if c.mode == mode))
        links.append(link)
    return fastest(replace(chain, links=tuple(links)), _UNLIMITED)


def leanest(chain: Chain) -> list[Choice]:
    """The fastest among the choices with the lowest peak.

    Bisection over byte counts: choices that fit a budget fit every larger one.
    """
    free = Chain(_without_cost(chain.links), chain.sizes, chain.base)
    low, high = chain.base, _UNLIMITED
    while low < high:
        middle = (low + high) // 2
        fitting = fastest(free, middle)
        if fitting is None:
            low = middle + 1
        else:
            # its peak may lie far below the budget: bisect below that peak
            high = outcome_of(free, fitting).peak
    choices = fastest(chain, high)
    assert choices is not None
    return choices


def _without_cost(links: Sequence[Link]) -> tuple[Link, ...]:
    """The links with cost 0: the search then keeps one label per state, with the fewest bytes."""
    return tuple(
        replace(link, choices=tuple(replace(c, cost=0) for c in link.choices)) for link in links
    )


def _mentioned(links: Sequence[Link]) -> frozenset[int]:
    """The streams that enter links or that links hold."""
    streams: set[int] = set()
    for link in links:
        streams.update(link.inputs)
        for choice in link.choices:
            streams.update(choice.holds)
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
