"""Calls of steps: hooks, changes in place, numbers of streams."""

import threading

import pytest
import torch
from compare import error, gradients_in, leaf_rows, linear_net, streams
from torch import nn

from revzoo import (
    AdditiveCoupling,
    DriftError,
    Invertible,
    ReversibleSequence,
    Squeeze,
    check_inverse,
    set_memory,
)


class Careless(Invertible):
    def forward(self, x1, x2):
        return x2, x1 + x2.sin()

    def inverse(self, y1, y2):
        return y2.sub_(y1.sin()), y1


class CarelessCoupling(AdditiveCoupling):
    def uncombine(self, y2, value):
        return y2.sub_(value)


class Pass(Invertible):
    """Costs nothing and saves nothing: inverted, but never replayed."""

    def forward(self, x1, x2):
        return x2, x1

    inverse = forward


@pytest.mark.parametrize("last", [[], [Pass()]], ids=["replayed", "inverted"])
@pytest.mark.parametrize("step", [Careless, lambda: CarelessCoupling(nn.Tanh())])
def test_an_inverse_that_works_in_place_is_refused(step, last):
    """It changed the output that the caller still held."""
    net = ReversibleSequence(
        [AdditiveCoupling(nn.Tanh()), step(), AdditiveCoupling(nn.Tanh()), *last]
    )
    y = net(*streams("dense"))
    before = [t.detach().clone() for t in y]
    with pytest.raises(RuntimeError, match=r"inverse of steps\.1 .*in place.*out of place"):
        sum(t.sum() for t in y).backward()
    with pytest.raises(RuntimeError, match=r"inverse of steps\.1 .*in place.*out of place"):
        net.inverse(*(t.clone() for t in before))
    with pytest.raises(RuntimeError, match=r"inverse.*in place.*out of place"):
        check_inverse(net, *(t.detach().float() for t in before))


@pytest.mark.parametrize("mode", ["offload", "recompute", "invert", "exact"])
@pytest.mark.parametrize("kind", ["step", "pre", "global", "in place"])
def test_a_forward_hook_on_a_step_that_changes_its_streams(mode, kind):
    """The replay ignored it: gradients of a different loss. Such a step is recomputed."""
    net, x = linear_net().float(), leaf_rows().detach().float().requires_grad_()
    step = net[1][0]

    def double(module, args, outputs=None):
        state = args if outputs is None else outputs
        if module is not step:
            return None
        if kind == "in place":
            state[1].mul_(2)
            return None
        return tuple(2 * t for t in state)

    handle = {
        "step": step.register_forward_hook,
        "in place": step.register_forward_hook,
        "pre": step.register_forward_pre_hook,
        "global": nn.modules.module.register_module_forward_hook,
    }[kind](double)
    grid = 14 if mode == "exact" else None
    try:
        expected = gradients_in(net, "store", x, grid=grid)
        if kind == "global" and mode in ("invert", "exact"):
            with pytest.raises(DriftError):
                gradients_in(net, mode, x, grid=grid)
        else:
            assert error(gradients_in(net, mode, x, grid=grid), expected) < 1e-5
    finally:
        handle.remove()


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_hooks_on_a_step_that_only_look_are_welcome(mode):
    net, x, seen = linear_net(), leaf_rows(), []
    net[1][0].register_forward_pre_hook(lambda m, args: seen.append(args))
    net[1][0].register_forward_hook(lambda m, args, outputs: seen.append(outputs))
    net[1][0].register_full_backward_hook(lambda m, gin, gout: seen.append(gout))
    assert error(gradients_in(net, mode, x), gradients_in(net, "store", x)) < 1e-12
    assert len(seen) >= 6


def test_a_hook_on_a_step_with_its_log_determinant():
    """There the step is called inside another one."""
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))])
    net[0].register_forward_hook(lambda m, args, outputs: tuple(2 * t for t in outputs))
    x, found = torch.randn(2, 8, requires_grad=True), []
    for mode in ("invert", "store"):
        set_memory(net, mode)
        y, _ = net.forward_with_log_det(x)
        found.append(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]))
    assert error(*found) < 1e-5


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_layer_given_another_number_of_streams(streams):
    """It ran on all of them."""
    layer = Squeeze(2, streams=3)
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(ValueError, match=rf"Squeeze got {streams} streams, expected 3"):
        layer(*[x] * streams)
    with pytest.raises(ValueError, match=rf"got {streams} streams, .* 3"):
        ReversibleSequence([layer])(*[x] * streams)


def test_hooks_on_a_step_that_several_threads_call():
    """The threads swapped the step's forward at the same time: an error, or a leftover wrapper."""
    step = AdditiveCoupling(nn.Tanh())
    step.register_forward_hook(lambda *_: None)
    step(
        leaf_rows(), leaf_rows()
    )  # seen to draw nothing, so that threads do not wait for each other
    both = threading.Event()

    def overlap(*_):  # the first thread enters first and leaves first
        if threading.current_thread() is first:
            second.start()
            both.wait(5)
        else:
            both.set()
            first.join(5)

    step.branch.register_forward_hook(overlap)
    failures = []

    def call():
        try:
            step(leaf_rows(), leaf_rows())
        except (RuntimeError, AttributeError) as failure:
            failures.append(failure)

    first, second = threading.Thread(target=call), threading.Thread(target=call)
    first.start()
    first.join()
    second.join()
    assert not failures
    assert "forward" not in vars(step)
