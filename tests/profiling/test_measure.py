"""Every assignment of modes to the steps of small networks, counted in real training steps.

The planner knows a few training steps only. It must predict the others, and find the best.
"""

import functools
import itertools
import random

import pytest
import torch
from chain_modes import outcome_of, steps_of
from torch import nn

import revzoo
from revzoo.core.twins import fake_twin, images_for
from revzoo.profiling.audit import audit
from revzoo.profiling.chain import chain_of
from revzoo.profiling.count import trace_step
from revzoo.profiling.plan import Planner

SHAPE = (64, 16, 16, 16)  # large: a real step also keeps random states and the guard's samples
IMAGES = (16, 3, 32, 32)


def branch(width):
    norm, conv = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, padding=1, bias=False)
    return nn.Sequential(norm, nn.ReLU(), conv)


def block():
    return revzoo.ReversibleBlock(branch(8), branch(8))


def two_blocks():
    """The peak may lie after the last step, where the streams are merged."""
    return revzoo.ReversibleSequence([block(), block()])


def layers_between():
    chains = [revzoo.ReversibleSequence([block()]) for _ in range(2)]
    return nn.Sequential(chains[0], nn.MaxPool2d(2), nn.Tanh(), chains[1])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.branch = branch(16)

    def forward(self, x):
        return x + self.branch(x)


def plain_blocks():
    """Three residual blocks that were made reversible."""
    net = nn.Sequential(nn.Conv2d(16, 16, 1), *(Residual() for _ in range(3)))
    return revzoo.make_reversible(net, bits=4)


def revnet():
    return revzoo.create_model("revnet38", units=(1, 1, 1))


NETWORKS = {
    "two blocks, invert": (two_blocks, SHAPE, "invert"),
    "two blocks, exact": (two_blocks, SHAPE, "exact"),
    "layers between, exact": (layers_between, SHAPE, "exact"),
    "revnet, exact": (revnet, IMAGES, "exact"),
    "plain blocks, exact": (plain_blocks, SHAPE, "exact"),
}


@functools.cache
def brute_force(name):
    """The planner of a network; the counted peak of each assignment, by modes."""
    make, shape, inverting = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    planner = Planner(model, shape, inverting=inverting, clock=False)
    steps = steps_of(planner.chain)
    peaks = {}
    for modes in itertools.product(*({c.mode: 0 for c in link.choices} for link in steps)):
        revzoo.set_memory(model, {step.name: m for step, m in zip(steps, modes, strict=True)})
        peaks[modes] = audit(model, shape, modes=[], real=True).peak_bytes
    return planner, peaks


@pytest.mark.parametrize("name", NETWORKS)
def test_no_assignment_peaks_lower_than_the_leanest_plan(name):
    """The least budget of two blocks in ``exact`` was a seventh too high."""
    planner, peaks = brute_force(name)
    assert planner.leanest.peak_bytes == pytest.approx(min(peaks.values()), rel=0.002)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_of_each_assignment_is_predicted(name):
    planner, peaks = brute_force(name)
    for modes, peak in peaks.items():
        assert 0.99 < outcome_of(planner.chain, modes).peak / peak < 1.03


@pytest.mark.parametrize("name", NETWORKS)
def test_no_assignment_that_fits_is_faster_than_the_plan(name):
    planner, peaks = brute_force(name)
    costs = {modes: outcome_of(planner.chain, modes).cost for modes in peaks}
    least, most = min(peaks.values()), max(peaks.values())
    for k in range(9):
        goal = least + (most - least) * k // 8
        plan = planner.plan(goal + planner.least - planner.leanest.peak_bytes)
        assert plan.peak_bytes <= goal
        assert plan.peak_bytes == pytest.approx(peaks[tuple(plan.values())], rel=0.01)
        fitting = [modes for modes in costs if peaks[modes] <= goal]
        assert plan.seconds * 1e9 <= min(costs[modes] for modes in fitting) * (1 + 1e-9)


@pytest.mark.parametrize("inverting", ["invert", "exact"])
def test_steps_that_only_move_values_keep_nothing_alone(inverting):
    """Except words, where a later step holds the stream: irevnet13 was predicted 23 % too high."""
    model = revzoo.create_model("irevnet13")
    planner = Planner(model, IMAGES, inverting=inverting, clock=False)
    draw, steps = random.Random(0), steps_of(planner.chain)
    chosen = [[draw.choice(link.choices).mode for link in steps] for _ in range(8)]
    # one step inverted, the others stored
    chosen += [[s.choices[-(s is one)].mode for s in steps] for one in steps]
    for modes in chosen:
        revzoo.set_memory(model, {s.name: m for s, m in zip(steps, modes, strict=True)})
        peak = audit(model, IMAGES, modes=[]).peak_bytes
        predicted = outcome_of(planner.chain, modes).peak
        assert predicted == pytest.approx(peak, rel=0.02)


def test_of_equal_steps_two_run():
    """Their copies have the bytes and the time that the steps would have."""
    model = revzoo.create_model("revnet38")
    planner = Planner(model, IMAGES, clock=False)
    for plan in [planner.balanced(), *planner.frontier(4)]:
        revzoo.set_memory(model, plan)
        whole = audit(model, IMAGES, modes=[]).peak_bytes
        assert plan.peak_bytes == pytest.approx(whole, rel=0.002)
    twin = fake_twin(revzoo.create_model("revnet38", memory="store"))
    short, whole = (trace_step(twin, images_for(twin, IMAGES), shortens=s) for s in (True, False))
    # a stem, the first branch, which has no norm before it, and two transitions; two of each stage
    assert len(short.calls) == 10
    assert [*dict(short.named_calls())] == [*dict(whole.named_calls())] == [*planner.leanest]
    chains = chain_of([short]), chain_of([whole])
    costs = [sum(link.choices[0].cost for link in chain.links) for chain in chains]
    assert costs[0] == pytest.approx(costs[1], rel=0.002)


def test_steps_with_other_options_are_not_equal():
    layers = [nn.Conv2d(8, 8, 3, padding=d, dilation=d) for d in (1, 2, 1, 1, 1)]
    layers[-1].requires_grad_(False)
    net = revzoo.ReversibleSequence(map(revzoo.AdditiveCoupling, layers))
    twin = fake_twin(net)
    assert len(trace_step(twin, images_for(twin, SHAPE), shortens=True).calls) == 5
