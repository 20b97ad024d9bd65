"""How long each step takes, by the clock, on few images.

A step's time is close to proportional to its images, so a sample that takes some milliseconds tells
it. Equal steps are timed once, where they store; what the other modes add is in proportion to the
counted work. Nothing is timed on a whole batch, and no model is trained: the steps are copies with
random weights.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace

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
    known: dict[object, float] = {}
    links: list[Link] = []
    nominal = measured = 0
    for link, call in zip(chain.links, calls, strict=False):
        step = model.get_submodule(call.name)
        assert isinstance(step, Step)
        plain = link.choices[0]
        key = (type(step), repr(step), call.layout)
        if key not in known:
            known[key] = _seconds(step, call.layout, plain, rounds) * 1e9 / max(1, plain.cost)
        links.append(_scaled(link, known[key]))
        nominal, measured = nominal + plain.cost, measured + links[-1].choices[0].cost
    rate = measured / max(1, nominal)
    links += [_scaled(link, rate) for link in chain.links[len(links) :]]
    return Chain(tuple(links), chain.sizes, chain.base)


def _scaled(link: Link, rate: float) -> Link:
    return replace(link, choices=tuple(replace(c, cost=int(c.cost * rate)) for c in link.choices))


def _seconds(step: Step, layout: Sequence[Layout], plain: Choice, rounds: int) -> float:
    """Seconds of a training step of ``step`` on all images, with everything stored."""
    whole = layout[0].shape[0]
    count = max(min(_FEW, whole), min(whole, int(whole * _SAMPLE / max(1, plain.cost))))
    device = next((p.device for p in step.parameters()), torch.device("cpu"))
    device = torch.device("cpu") if device.type == "meta" else device
    with torch.random.fork_rng([device] if device.type == "cuda" else [], device_type=device.type):
        replica = _replica(step, device)
        set_memory(replica, {"": "store"})
        state = tuple(_sample(one, count, device) for one in layout)
        _time(replica, state, device)  # to warm up
        return min(_time(replica, state, device) for _ in range(rounds)) * whole / count


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
