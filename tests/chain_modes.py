"""The choices of a plan's chain, by the modes of its steps."""

from __future__ import annotations

from collections.abc import Sequence

from revzoo.profiling.chain import Chain, Choice, Link, Outcome, State


def steps_of(chain: Chain) -> list[Link]:
    """The links that are steps."""
    return [link for link in chain.links if link.name is not None]


def in_modes(chain: Chain, modes: Sequence[str]) -> list[Choice]:
    """The choices whose steps have these modes, in order."""
    named = iter(modes)
    chosen: list[Choice] = []
    state = State()
    for link in chain.links:
        mode = next(named) if link.name is not None else ""
        chosen.append(next(c for c in link.after(state.last) if c.mode == mode))
        state = chain.run(state, link, chosen[-1])[2]
    return chosen


def outcome_of(chain: Chain, modes: Sequence[str]) -> Outcome:
    """Predicted peak and time with these modes."""
    return chain.outcome(in_modes(chain, modes))
