"""How long each step takes, by the clock, on few images.

A step's time is close to proportional to its images, so a sample that takes some milliseconds tells
it. Equal steps are timed once, where they store. What the other modes add is in proportion to the
counted work, and a constant that two images tell: recording and replaying a step takes Python some
time, however small the step is. Nothing is timed on a whole batch, and no model is trained: the
steps are copies with random weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from revzoo.core.invertible import State, Step, as_state
from revzoo.core.modes import set_memory
from revzoo.profiling.chain import Chain, Choice, Link
from revzoo.profiling.trace import Layout, StepCall

_ROUNDS = 3
_SAMPLE = 1e7  # nominal nanoseconds of a sample's training step
_FEW = 2  # images at least: normalisation over one value is refused


def timed(
    chain: Chain, model: nn.Module, calls: Sequence[StepCall], *, rounds: int = _ROUNDS
) -> Chain:
    """The chain with measured costs in the place of nominal ones.

    What is no step, such as the head, is taken to be as much faster or slower than nominal as the
    steps are together.

    Args:
        chain: see :func:`revzoo.profiling.measure.measure`.
        model: whose steps it has.
        calls: as they were called.
        rounds: timings of each step in each mode, of which the fastest counts: on a shared machine
            all others are too long.
    """
    known: dict[object, _Rate] = {}
    links: list[Link] = []
    nominal = measured = 0
    for link, call in zip(chain.links, calls, strict=False):
        step = model.get_submodule(call.name)
        assert isinstance(step, Step)
        key = (type(step), repr(step), call.layout)
        if key not in known:
            known[key] = _rate(step, call.layout, link.choices, rounds)
        links.append(_scaled(link, known[key]))
        nominal += link.choices[0].cost
        measured += links[-1].choices[0].cost
    rest = _Rate(measured / max(1, nominal), {})
    links += [_scaled(link, rest) for link in chain.links[len(links) :]]
    return Chain(tuple(links), chain.sizes, chain.base)


class _Rate(NamedTuple):
    """Measured over nominal nanoseconds, and what each mode takes beside the counted work."""

    factor: float
    constants: Mapping[str, float]


def _scaled(link: Link, rate: _Rate) -> Link:
    costs = [int(c.cost * rate.factor + rate.constants.get(c.mode, 0)) for c in link.choices]
    pairs = zip(link.choices, costs, strict=True)
    return replace(link, choices=tuple(replace(c, cost=cost) for c, cost in pairs))


def _rate(step: Step, layout: Sequence[Layout], choices: Sequence[Choice], rounds: int) -> _Rate:
    """That of a step, by its copy's training steps on few images."""
    plain, whole = choices[0], layout[0].shape[0]
    few = min(_FEW, whole)
    count = max(few, min(whole, int(whole * _SAMPLE / max(1, plain.cost))))
    device = next((p.device for p in step.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
        replica = _replica(step, device)
        states = {n: tuple(_sample(one, n, device) for one in layout) for n in (few, count)}

        def fastest(mode: str, n: int) -> float:
            set_memory(replica, {"": mode})
            _time(replica, states[n], device)  # to warm up
            return 1e9 * min(_time(replica, states[n], device) for _ in range(rounds))

        factor = fastest(plain.mode, count) * whole / count / max(1, plain.cost)
        least = fastest(plain.mode, few)
        constants = {
            c.mode: max(
                0, fastest(c.mode, few) - least - factor * (c.cost - plain.cost) * few / whole
            )
            for c in choices[1:]
        }
    return _Rate(factor, constants)


def _replica(step: Step, device: torch.device) -> Step:
    """A copy of the step alone, with random weights."""
    memo: dict[int, object] = {}
    for t in (*step.parameters(), *step.buffers()):
        value = torch.rand(t.shape, device=device).to(t.dtype) / 16
        memo[id(t)] = nn.Parameter(value, t.requires_grad) if isinstance(t, nn.Parameter) else value
    replica = copy.deepcopy(step, memo)
    return replica if replica.training else replica.train()


def _sample(layout: Layout, count: int, device: torch.device) -> Tensor:
    """A stream of few images, laid out as the whole one."""
    order = sorted(range(len(layout.shape)), key=lambda d: -layout.stride[d])
    shape = [count, *layout.shape[1:]]
    dense = torch.randn([shape[d] for d in order], device=device)
    back = sorted(range(len(order)), key=order.__getitem__)
    return dense.permute(back).to(layout.dtype).requires_grad_(layout.needs)


def _time(step: Step, state: State, device: torch.device) -> float:
    """Seconds of one forward and backward pass."""
    start = now(device)
    outputs = [t for t in as_state(step(*state)) if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    seconds = now(device) - start
    for t in state:
        t.grad = None
    return seconds


def now(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what was asked of it.

    One thread is timed by its own clock, which stands still while other programs have the core.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        return time.thread_time()
    return time.perf_counter()
