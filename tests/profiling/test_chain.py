"""The search over chains: optimal, by brute force."""

import itertools
import random

import pytest
from chain_modes import in_modes, steps_of

from revzoo.profiling.chain import Chain, Choice, Link, fastest, leanest


def chain_of(seed: int, length: int) -> Chain:
    """A chain of couplings of random sizes; streams pass through, and several links hold one.

    A run of inverted steps keeps bytes or streams at its end, unless the operators there join it.
    """
    draw = random.Random(seed)
    sizes = {s: draw.randint(1, 30) for s in range(length + 2)}
    links = [Link(None, frozenset(), (Choice(keeps=draw.randint(0, 9)),))]
    for i in range(length):
        inputs, outputs = frozenset((i, i + 1)), frozenset((i + 1, i + 2))
        names = ("store", "recompute", "invert") if draw.random() < 0.8 else ("store", "recompute")
        choices = (_choice(draw, mode, inputs, outputs) for mode in names)
        links.append(Link(f"steps.{i}", inputs, tuple(choices)))
        if draw.random() < 0.5:
            between = [
                Choice(
                    ends=after,
                    joins=after and draw.random() < 0.5,
                    keeps=draw.randint(0, 9),
                    forward=draw.randint(0, 40),
                    backward=draw.randint(0, 40),
                    cost=draw.randint(0, 3),
                )
                for after in (False, True)
            ]
            links.append(Link(None, outputs, tuple(between)))
    return Chain(tuple(links), sizes, base=1000)


def _choice(draw, mode, inputs, outputs) -> Choice:
    store, inverts = mode == "store", mode == "invert"
    held = draw.sample(sorted(inputs | outputs), draw.randint(0, 3)) if store else inputs
    words = ()
    if inverts:
        held = outputs if draw.random() < 0.5 else ()
        words = ((s, draw.randint(1, 30)) for s in outputs - inputs)
    return Choice(
        mode,
        inverts,
        moves=inverts and draw.random() < 0.4,
        words=frozenset(words),
        holds=frozenset(held),
        keeps=draw.randint(0, 2) if mode == "recompute" else draw.randint(10, 60),
        forward=draw.randint(1, 40),
        backward=draw.randint(0, 40) if store else draw.randint(20, 140),
        cost=draw.randint(3, 27) if store else draw.randint(4, 38),
    )


def assignments(chain: Chain):
    """All choices of links that can follow each other."""
    modes = itertools.product(*([c.mode for c in link.choices] for link in steps_of(chain)))
    return (in_modes(chain, each) for each in modes)


def peak_by_hand(chain: Chain, choices) -> int:
    """The peak from the list of live tensors at each moment, without running sums."""
    alive, kept = [], []  # a stream, or bytes with a name
    run, words = [], {}  # the steps of an open run; streams with words outside of it

    def with_words(streams):
        known = {x for x in kept if not isinstance(x, tuple)}
        pairs = [(s, words[s]) for s in streams if s in words and s not in known]
        return [*streams, *((b, f"words of {s}") for s, b in pairs)]

    for i, (link, choice) in enumerate(zip(chain.links, choices, strict=True)):
        if run and not choice.inverts and not choice.joins:
            kept += [*run[-1].holds, (run[-1].keeps, f"{i} the end of a run")]
        alive.append([*kept, *with_words(link.inputs), (choice.forward, "")])
        if not choice.inverts:
            run = []
            kept += [*with_words(choice.holds), (choice.keeps, f"{i} keeps")]
        elif run or not choice.moves:  # a run begins or continues; it has its own words
            run, words = [*run, choice], {}
        else:
            words |= dict(choice.words)
        alive.append([*kept, (choice.backward, "")])
    sizes = [
        sum(x[0] if isinstance(x, tuple) else chain.sizes[x] for x in set(moment))
        for moment in alive
    ]
    return chain.base + max(sizes)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_brute_force_finds(seed):
    """All 3^8 assignments of eight steps, at twelve budgets."""
    chain = chain_of(seed, 8)
    found = [chain.outcome(choices) for choices in assignments(chain)]
    least, most = min(o.peak for o in found), max(o.peak for o in found)
    lean = chain.outcome(leanest(chain))
    assert lean.peak == least
    assert lean.cost == min(o.cost for o in found if o.peak == least)
    assert fastest(chain, least - 1) is None
    for k in range(12):
        budget = least + k * (most - least) // 11
        chosen = fastest(chain, budget)
        assert chosen is not None
        outcome = chain.outcome(chosen)
        assert outcome.peak <= budget
        assert outcome.cost == min(o.cost for o in found if o.peak <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_equals_a_list_of_live_tensors(seed):
    chain = chain_of(seed, 10)
    draw = random.Random(seed)
    steps = steps_of(chain)
    for _ in range(50):
        modes = [draw.choice(link.choices).mode for link in steps]
        choices = in_modes(chain, modes)
        assert [c.mode for c in choices if c.mode] == modes
        assert chain.outcome(choices).peak == peak_by_hand(chain, choices)


def test_a_longer_chain_is_solved_fast():
    """As many steps as the deepest network of the zoo, each different."""
    chain = chain_of(0, 60)
    least = chain.outcome(leanest(chain)).peak
    costs = []
    for k in range(4):
        chosen = fastest(chain, least + 400 * k)
        assert chosen is not None
        costs.append(chain.outcome(chosen).cost)
    assert costs == sorted(costs, reverse=True)
