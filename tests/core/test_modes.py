"""Memory modes: which modules take which modes, and what does not change."""

import pytest
import torch
from compare import conv_net, error, gradients_in, images, kept_bytes, leaf_rows, linear_net
from torch import nn

from revzoo import AdditiveCoupling, ReversibleSequence, Step, memory, set_memory
from revzoo.core import modes
from revzoo.core.live import LiveMemory
from revzoo.core.modes import MODES, Mode
from revzoo.profiling.plan import PLANNED


class Halve(Step):
    """Loses information."""

    def forward(self, x1, x2):
        return x1[:, ::2], x2[:, ::2]


def test_state_dict_is_the_same_in_every_mode():
    net = conv_net()
    keys = {m: tuple(net.state_dict()) for m in MODES if set_memory(net, m) is None}
    assert len(set(keys.values())) == 1


def test_mode_reaches_every_step():
    net = linear_net()
    set_memory(net, "recompute")
    set_memory(net[1], "store")
    assert [step.memory for block in net for step in block] == ["recompute"] * 2 + ["store"] * 2 + [
        "recompute"
    ] * 2


def test_unknown_mode():
    with pytest.raises(ValueError, match="unknown memory mode 'inverse': expected one of 'store'"):
        set_memory(linear_net(), "inverse")
    with pytest.raises(ValueError, match="unknown memory mode"):
        ReversibleSequence([], memory="reversible")


def test_a_misspelt_mode_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"'invrt': .*; did you mean 'invert'\?$"):
        set_memory(linear_net(), "invrt")


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_repr_shows_what_a_step_without_inverse_does(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.Identity()), Halve()], memory=mode)
    assert f"AdditiveCoupling[{mode}]" in repr(net)
    assert "Halve[recompute]" in repr(net)
    set_memory(net, "store")
    assert "Halve[store]" in repr(net)


@pytest.mark.parametrize("mode", [None, 3, ["invert"]])
def test_a_mode_is_a_name_or_a_plan(mode):
    with pytest.raises(TypeError, match=r"mode is .*: expected one of 'store', .*plan_memory"):
        set_memory(linear_net(), mode)


@pytest.mark.parametrize("name", PLANNED)
def test_a_planned_mode_says_how_to_get_a_plan(name):
    with pytest.raises(ValueError, match=rf"'{name}' is a plan.* = revzoo\.plan_memory\("):
        set_memory(linear_net(), name)


def test_the_module_comes_first():
    with pytest.raises(TypeError, match=r"module is 'exact': expected an nn.Module"):
        set_memory("exact", linear_net())
    with pytest.raises(TypeError, match=r"module is the class Halve: expected an nn.Module"):
        set_memory(Halve, "exact")


def test_a_module_without_steps_only_stores():
    plain = nn.Linear(2, 2)
    set_memory(plain, "store")
    with memory(plain, "store"):
        plain(torch.ones(1, 2)).sum().backward()
    for mode, grid in (("recompute", None), ("exact", None), ("store", 12)):
        with pytest.raises(ValueError, match="Linear holds no step"):
            set_memory(plain, mode, grid=grid)


def test_invert_where_nothing_has_an_inverse():
    with pytest.raises(ValueError, match="no invertible step"):
        set_memory(Halve(), "invert")


def test_a_step_without_inverse_is_recomputed_in_invert():
    torch.manual_seed(0)
    wide = [AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)]
    narrow = [AdditiveCoupling(nn.Sequential(nn.Linear(2, 2), nn.Tanh())) for _ in range(2)]
    net = ReversibleSequence([*wide, Halve(), *narrow]).double()
    grads = []
    for mode in ("invert", "store"):
        set_memory(net, mode)
        x = images(size=1).flatten(1).requires_grad_()
        grads.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


def test_a_new_mode_is_one_class_and_one_line(monkeypatch):
    """Every step runs through it."""
    calls = []

    class Counting(Mode):
        name = "counting"

        def run(self, step, state, context):
            calls.append(step.label)
            return super().run(step, state, context)

    monkeypatch.setattr(modes, "MODES", {**MODES, "counting": Counting()})
    net = linear_net()
    set_memory(net, "counting")
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    net(x).sum().backward()
    assert calls == [f"steps.{block}.steps.{i}" for block in range(3) for i in range(2)]


def net_of_stages():
    return nn.ModuleDict({"front": conv_net(2), "back": nn.ModuleList([conv_net(1), conv_net(1)])})


def set_modes(module):
    return {m.memory for m in module.modules() if isinstance(m, Step)}


def test_a_plan_maps_paths_to_modes():
    net = net_of_stages()
    set_memory(net, {"back": "store", "back.1": "recompute"})
    assert [set_modes(part) for part in net["back"]] == [{"store"}, {"recompute"}]
    assert set_modes(net["front"]) == {"exact"}


def test_a_plan_gives_each_step_the_grid_of_its_mode():
    net = net_of_stages()
    set_memory(net, {"front": "store", "back.0": "exact", "back.1": "recompute"})
    for path, grid in (("front", None), ("back.0", "auto"), ("back.1", None)):
        steps = [m for m in net.get_submodule(path).modules() if isinstance(m, Step)]
        assert {m.grid for m in steps} == {grid}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"front": "store", "side": "store"}, "'side'.* no such part"),
        ({"front": "store", "bakc.0": "store"}, r"no such part.*; did you mean 'back\.0'\?$"),
        ({"front": "store", "back": "stor"}, "unknown memory mode 'stor'"),
        ({"front": "store", "back.0.steps.0.steps.0.branch": "store"}, "holds no step"),
    ],
)
def test_a_plan_for_another_model_is_refused(plan, message):
    net = net_of_stages()
    with pytest.raises(ValueError, match=message):
        set_memory(net, plan)
    assert set_modes(net) == {"exact"}


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_chain_keeps_no_state_after_its_backward_pass(mode):
    """The loss held the graph, and so the input of each chain, until the whole pass was done."""
    net, x = linear_net(), images(256, size=1).flatten(1)
    set_memory(net, mode)
    net(x).sum().backward()  # makes gradients, and tables of the guard
    with LiveMemory() as live:
        y = net(x)
        loss = y.sum()
        loss.backward()
        del y
    assert loss.requires_grad
    assert live.now < x.nbytes


def test_the_mode_is_that_of_the_forward_pass():
    net = linear_net().float()
    x = leaf_rows().detach().float().requires_grad_()
    expected = gradients_in(net, "exact", x)
    set_memory(net, "exact")
    loss = net(x).square().sum()
    set_memory(net, "store")  # the replay must still round
    actual = torch.autograd.grad(loss, [x, *net.parameters()])
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_step_called_by_itself_keeps_what_its_mode_says(mode):
    """It silently kept as much as ``store``."""
    torch.manual_seed(0)
    branch = nn.Sequential(nn.Linear(8, 8), *[nn.Tanh() for _ in range(9)])
    coupling = AdditiveCoupling(branch)
    x1, x2 = torch.randn(2, 4000, 8).requires_grad_()
    x = x1.detach().requires_grad_(), x2.detach().requires_grad_()
    results, kept = [], []
    for m in ("store", mode):
        set_memory(coupling, m, grid="auto" if mode == "exact" else None)
        kept.append(kept_bytes(lambda: coupling(*x)))
        results.append([t.grad for t in x])
        for t in x:
            t.grad = None
    assert error(*results) < 1e-6
    assert kept[1] < kept[0] / 3
