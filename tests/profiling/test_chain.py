"""The search over chains: optimal, by brute force."""

import itertools
import random

import pytest

from revzoo.profiling.chain import Chain, Choice, Link, evaluate, fastest, leanest


def chain_of(seed: int, length: int) -> Chain:
    """A chain of couplings of random sizes; streams pass through, and several links hold one."""
    draw = random.Random(seed)
    sizes = {s: draw.randint(1, 30) for s in range(-length - 2, length + 2)}
    links = []
    for i in range(length):
        inputs, outputs = (i, i + 1), (i + 1, i + 2)
        forward = draw.randint(1, 9)
        store = Choice(
            "store",
            holds=frozenset(draw.sample([*inputs, *outputs], draw.randint(0, 3))),
            keeps=draw.randint(10, 60),
            forward=draw.randint(0, 40),
            backward=draw.randint(0, 40),
            cost=3 * forward,
        )
        replay = {"forward": draw.randint(0, 40), "cost": 4 * forward + draw.randint(0, 2)}
        recompute = Choice(
            "recompute",
            holds=frozenset(inputs),
            keeps=draw.randint(0, 2),
            backward=draw.randint(20, 120),
            **replay,
        )
        invert = Choice(
            "invert",
            joins=True,
            keeps=draw.randint(0, 2),
            closes=draw.randint(0, 9),
            state=frozenset(draw.choice([outputs, (-1 - i, -2 - i)])),
            backward=draw.randint(20, 140),
            **replay,
        )
        choices = (store, recompute, invert) if draw.random() < 0.8 else (store, recompute)
        links.append(Link(f"steps.{i}", inputs, outputs, choices))
    head = Choice("store", holds=frozenset({length + 1}), keeps=draw.randint(0, 50), cost=5)
    return Chain((*links, Link("", (length, length + 1), (), (head,))), sizes, base=1000)


def peak_by_hand(chain: Chain, choices) -> int:
    """The peak from the list of live tensors at each moment, without running sums."""
    alive = []
    kept = []  # bytes that each link keeps for its backward pass
    for i, (link, choice) in enumerate(zip(chain.links, choices, strict=True)):
        if i and choices[i - 1].joins and not choice.joins:
            kept += [("stream", s) for s in choices[i - 1].state]
            kept += [("bytes", choices[i - 1].closes, f"{i} closes")]
        alive.append([*kept, *(("stream", s) for s in link.inputs), ("bytes", choice.forward, "")])
        kept += [("stream", s) for s in choice.holds] + [("bytes", choice.keeps, f"{i} keeps")]
        alive.append([*kept, ("bytes", choice.backward, "")])
    sizes = [
        sum(chain.sizes[x[1]] if x[0] == "stream" else x[1] for x in set(moment))
        for moment in alive
    ]
    return chain.base + max(sizes)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_brute_force_finds(seed):
    """All 3^10 assignments of ten steps, at twelve budgets."""
    chain = chain_of(seed, 10)
    found = [
        evaluate(chain, choices) for choices in itertools.product(*(k.choices for k in chain.links))
    ]
    least, most = min(o.peak for o in found), max(o.peak for o in found)
    assert evaluate(chain, leanest(chain)).peak == least
    assert fastest(chain, least - 1) is None
    for k in range(12):
        budget = least + k * (most - least) // 11
        chosen = fastest(chain, budget)
        assert chosen is not None
        outcome = evaluate(chain, chosen)
        assert outcome.peak <= budget
        assert outcome.cost == min(o.cost for o in found if o.peak <= budget)


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_equals_a_list_of_live_tensors(seed):
    chain = chain_of(seed, 10)
    draw = random.Random(seed)
    for _ in range(50):
        choices = [draw.choice(link.choices) for link in chain.links]
        assert evaluate(chain, choices).peak == peak_by_hand(chain, choices)


def test_a_longer_chain_is_solved_fast():
    """As many steps as the deepest network of the zoo, each different."""
    chain = chain_of(0, 60)
    least = evaluate(chain, leanest(chain)).peak
    costs = []
    for k in range(4):
        chosen = fastest(chain, least + 400 * k)
        assert chosen is not None
        costs.append(evaluate(chain, chosen).cost)
    assert costs == sorted(costs, reverse=True)
