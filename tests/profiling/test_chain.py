"""The search over chains: optimal, by brute force."""

import random
from collections import Counter

import pytest

from revzoo.profiling.chain import (
    Chain,
    Choice,
    Link,
    fastest,
    in_modes,
    leanest,
    outcome_of,
    words_of,
)

PLAIN, INVERTED = (False,), (True,)


def chain_of(seed: int, length: int) -> Chain:
    """A chain of couplings of random sizes; streams pass through, and several links hold one.

    Each mode costs something else after an inverted step. Between two steps, streams may be
    copied, and a run of inverted steps keeps a state at its end.
    """
    draw = random.Random(seed)
    sizes = {s: draw.randint(1, 30) for s in range(-length - 2, length + 2)}
    links = [Link(None, (), (Choice("", PLAIN, keeps=draw.randint(0, 9)),))]
    for i in range(length):
        inputs, outputs = (i, i + 1), (i + 1, i + 2)
        names = ("store", "recompute", "invert") if draw.random() < 0.8 else ("store", "recompute")
        made = [
            _choice(draw, mode, kind, inputs, outputs)
            for mode in names
            for kind in (PLAIN, INVERTED)
        ]
        links.append(Link(f"steps.{i}", inputs, tuple(made)))
        between = [
            Choice(
                "",
                kind,
                kind,
                holds=frozenset(draw.choice([outputs, map(words_of, outputs)]))
                if kind == INVERTED
                else frozenset(),
                renews=frozenset(draw.sample([*outputs, *map(words_of, outputs)], 2)),
                keeps=draw.randint(0, 9),
                forward=draw.randint(0, 40),
                backward=draw.randint(0, 40),
                cost=draw.randint(0, 3),
            )
            for kind in (PLAIN, INVERTED)
        ]
        links.append(Link(None, outputs, tuple(between)))
    return Chain(tuple(links), sizes, base=1000)


def _choice(draw, mode, after, inputs, outputs) -> Choice:
    """A step in one mode after a step of the kind ``after``."""
    forward = draw.randint(1, 40)
    store = mode == "store"
    return Choice(
        mode,
        INVERTED if mode == "invert" else PLAIN,
        after,
        holds=frozenset(
            draw.sample([*inputs, *outputs], draw.randint(0, 3))
            if store
            else (inputs if mode == "recompute" else ())
        ),
        keeps=draw.randint(10, 60) if store else draw.randint(0, 2),
        forward=forward,
        backward=draw.randint(0, 40) if store else draw.randint(20, 140),
        cost=draw.randint(3, 27) if store else draw.randint(4, 38),
    )


def assignments(chain: Chain, kind=()):
    """All choices of links that can follow each other."""
    if not chain.links:
        yield []
        return
    first, *rest = chain.links
    for choice in first.choices:
        if kind == choice.follows:
            for others in assignments(Chain(tuple(rest), chain.sizes), choice.kind):
                yield [choice, *others]


def peak_by_hand(chain: Chain, choices) -> int:
    """The peak from the list of live tensors at each moment, without running sums."""
    alive = []
    kept = []  # what each link keeps for its backward pass: a stream with its copy's number, bytes
    copies = Counter()
    for i, (link, choice) in enumerate(zip(chain.links, choices, strict=True)):
        alive.append([*kept, *((s, copies[s]) for s in link.inputs), ("bytes", choice.forward, "")])
        copies.update(choice.renews)
        kept += [*((s, copies[s]) for s in choice.holds), ("bytes", choice.keeps, f"{i} keeps")]
        alive.append([*kept, ("bytes", choice.backward, "")])
    sizes = [
        sum(x[1] if x[0] == "bytes" else chain.sizes[x[0]] for x in set(moment)) for moment in alive
    ]
    return chain.base + max(sizes)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_brute_force_finds(seed):
    """All 3^8 assignments of eight steps, at twelve budgets."""
    chain = chain_of(seed, 8)
    found = [outcome_of(chain, choices) for choices in assignments(chain)]
    least, most = min(o.peak for o in found), max(o.peak for o in found)
    lean = outcome_of(chain, leanest(chain))
    assert lean.peak == least
    assert lean.cost == min(o.cost for o in found if o.peak == least)
    assert fastest(chain, least - 1) is None
    for k in range(12):
        budget = least + k * (most - least) // 11
        chosen = fastest(chain, budget)
        assert chosen is not None
        outcome = outcome_of(chain, chosen)
        assert outcome.peak <= budget
        assert outcome.cost == min(o.cost for o in found if o.peak <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_equals_a_list_of_live_tensors(seed):
    chain = chain_of(seed, 10)
    draw = random.Random(seed)
    steps = chain.steps
    for _ in range(50):
        modes = [draw.choice(link.choices).mode for link in steps]
        choices = in_modes(chain, modes)
        assert choices is not None
        assert [c.mode for c in choices if c.mode] == modes
        assert outcome_of(chain, choices).peak == peak_by_hand(chain, choices)


def test_a_longer_chain_is_solved_fast():
    """As many steps as the deepest network of the zoo, each different."""
    chain = chain_of(0, 60)
    least = outcome_of(chain, leanest(chain)).peak
    costs = []
    for k in range(4):
        chosen = fastest(chain, least + 400 * k)
        assert chosen is not None
        costs.append(outcome_of(chain, chosen).cost)
    assert costs == sorted(costs, reverse=True)
